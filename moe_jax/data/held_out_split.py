"""Which tokens training sees and which are held out, and each part read as one array.

Inputs: where the documents end, and the share wanted. Outputs: two lists of runs of tokens, and TokenSpan, which reads
such a list as if it were one array. Windows are made elsewhere.
"""

import numpy as np

from moe_jax.data.keyed_random import uniform
from moe_jax.errors import UserError

_PURPOSE = 3  # keeps these numbers apart from those of stream.py and masking.py


def split_documents(ends: np.ndarray, held_out_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide a corpus between training and held-out text.

    Whether a document is held out is decided by a hash of its index, not by the seed or by the documents after it.
    Where the documents so chosen hold less than half or more than twice the share that was asked for (few documents,
    or one that outweighs the rest), the last tokens of the corpus are held out instead.

    Args:
      ends: int64 [documents], one past the last token of each.
      held_out_fraction: of all tokens.

    Returns:
      train, held_out: int64 [runs, 2], start and end of each run of tokens, ascending; no token in both.

    Raises:
      UserError: for a corpus of fewer than 4 tokens.
    """
    total = int(ends[-1])
    if total < 4:
        raise UserError(f"the corpus has {total} tokens and must have at least 4; name more text in DataConfig.path")
    starts = np.concatenate([[0], ends[:-1]])
    held = uniform(_PURPOSE, np.arange(ends.size)) < held_out_fraction
    count = int((ends - starts)[held].sum())
    if count >= 2 and held_out_fraction / 2 <= count / total <= min(2 * held_out_fraction, 0.5):
        border = np.flatnonzero(np.diff(held, prepend=not held[0]))
        runs = np.stack([starts[border], np.append(starts[border[1:]], total)], axis=1)
        return runs[~held[border]], runs[held[border]]
    tail = max(2, round(total * held_out_fraction))  # two tokens make one target
    return np.array([[0, total - tail]]), np.array([[total - tail, total]])


class TokenSpan:
    """Read some runs of the corpus as one array of tokens.

    Args:
      tokens: ids of the whole corpus, integers [n].
      runs: int64 [runs, 2], start and end of each run.
    """

    def __init__(self, tokens: np.ndarray, runs: np.ndarray):
        self._tokens = tokens
        self._runs = runs
        self._ends = np.cumsum(runs[:, 1] - runs[:, 0])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start to before stop, int32; fewer where the span ends earlier."""
        stop = min(stop, len(self))
        parts, run = [], int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            here = min(stop, int(self._ends[run])) - start
            first = int(self._runs[run, 1] - self._ends[run]) + start
            parts.append(self._tokens[first : first + here])
            start += here
            run += 1
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)
