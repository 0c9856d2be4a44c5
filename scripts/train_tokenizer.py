"""Make a tokenizer.json: byte-level BPE learned from a corpus.

    python scripts/train_tokenizer.py --data=PATH --out=tokenizer.json [--vocab_size=4096] [--field=text]

The same text gives the same file. Use it with --gin_bindings='DataConfig.tokenizer = "tokenizer.json"'.
Measured (2026-11-20, 2 CPU cores): 4096 ids from Python's standard library, 12.1 MB, in 3.9 s.
"""

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moe_jax.data.corpus import DataConfig, find_documents
from moe_jax.data.tokenizer import END_NAMES, MASK_NAMES
from moe_jax.errors import UserError
from moe_jax.storage.run_folder import atomic_file, disk_errors_named

SPECIAL = (END_NAMES[0], MASK_NAMES[0])
SMALLEST = 256 + len(SPECIAL)


def train_tokenizer(config: DataConfig, out: str, vocab_size: int) -> str:
    """Learn a byte-level BPE, write it to `out`, whole or not at all, and return one line that describes it.

    Args:
      config: `path` and `field` say what to learn from.
      vocab_size: ids wanted, the 256 bytes and the two special ones included.
    """
    if vocab_size < SMALLEST:
        raise UserError(
            f"--vocab_size ({vocab_size}) must be at least {SMALLEST}, the 256 bytes, {SPECIAL[0]}, {SPECIAL[1]}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for source in find_documents(config) for text, *_ in source.pieces())
    tokenizer.train_from_iterator(texts, trainer)
    with disk_errors_named(out):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as file:
        file.write(tokenizer.to_str(pretty=True).encode())
    got = tokenizer.get_vocab_size()
    short = f" ({vocab_size} asked, the text has no more pairs)" if got < vocab_size else ""
    return f"{out}: {got} ids{short}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="", help="a file, folder, glob or comma list; Python's own sources without")
    parser.add_argument("--out", required=True, help="the tokenizer.json to write")
    parser.add_argument("--vocab_size", type=int, default=4096, help="ids, 256 bytes and two special ones included")
    parser.add_argument("--field", default="text", help="the key of the text in records")
    given = parser.parse_args()
    try:
        print(train_tokenizer(DataConfig(path=given.data, field=given.field), given.out, given.vocab_size))
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
