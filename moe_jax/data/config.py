"""What a run reads: the text, how it becomes tokens, how long a window is. Host only; checked on creation."""

from dataclasses import dataclass

from moe_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Name the text and how it is cut into training windows.

    The order of the windows is no part of this: it follows from `train.seed` alone.

    Args:
      path: a file, a folder (read recursively), a glob, or several of them separated by commas.
        '' means the Python standard library's sources, found at run time.
      field: the key under which a line of a .jsonl or .jsonl.gz file holds its text.
      sequence_length: targets in a window; a window holds one token more.
      tokenizer: 'byte', or the path of a Hugging Face tokenizer.json.
      held_out_fraction: the share of the tokens that training never sees, above 0 and below 0.5.
      cache_dir: folder of the token caches; '' means $XDG_CACHE_HOME/moe_jax, or ~/.cache/moe_jax.
    """

    path: str = ""
    field: str = "text"
    sequence_length: int = 128
    tokenizer: str = "byte"
    held_out_fraction: float = 0.02
    cache_dir: str = ""

    def __post_init__(self):
        for name in ("path", "field", "tokenizer", "cache_dir"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise UserError(f"DataConfig.{name} ({value!r}) must be text; write it in quotes")
        for name in ("field", "tokenizer"):
            if not getattr(self, name):
                raise UserError(f"DataConfig.{name} ('') must not be empty; leave it out to get its default")
        length = self.sequence_length
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise UserError(f"DataConfig.sequence_length ({length!r}) must be a whole number of at least 1; set it so")
        share = self.held_out_fraction
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 0.5:
            raise UserError(
                f"DataConfig.held_out_fraction ({share!r}) must be above 0 and below 0.5, because every run reports "
                "a held-out loss; set it to, say, 0.02"
            )
