"""Which ids end a text, as the files of a Hugging Face checkpoint say.

Inputs: a folder, such as that of a tokenizer.json. Outputs: ids, the first of which closes a document in training.
"""

import json
import os
from pathlib import Path

from moe_jax.errors import UserError

END_FILES = ("generation_config.json", "config.json")  # the first that names an id decides


def read_end_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return `eos_token_id` of generation_config.json, else of config.json; () where neither file names one.

    Raises:
      UserError: a file that is no JSON object, or an `eos_token_id` that is neither an id nor a list of ids.
    """
    for name in END_FILES:
        path = Path(folder) / name
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"cannot read {path} ({error}); put back the file that the checkpoint came with") from error
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise UserError(f"{path}: eos_token_id ({found!r}) must be an id, or a list of ids; correct it")
        if ids:
            return tuple(ids)
    return ()
