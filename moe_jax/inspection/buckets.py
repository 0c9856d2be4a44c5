"""Rows of buckets: how many an instruction has by its shape, and how many of those hold a token.

Inputs: what a program's buckets are, and the arrays of an instruction of it. Outputs: its rows, the bytes of its arrays
that have them, and the share that is expected to be used. A shape counts every row of every bucket; the expected rows
are the choices that tokens make, which all have a row somewhere while nothing overflows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from moe_jax.inspection.hlo import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The buckets of one device in one exchange of one layer, of a segment of layers that are alike.

    Attributes:
      segment: name of the segment.
      by_shape: rows of all of its buckets together.
      expected: of them, those that hold a row under the stated loads, in the mean over devices.
      exchanges: of tokens in one step, there and back counted once: layers x parts of a batch x microbatches.
      overflow: the most that the chance of one of them is to overflow, None where that is not known.
    """

    segment: str
    by_shape: int
    expected: float
    exchanges: int
    overflow: float | None

    @property
    def used(self) -> float:
        """The share of the rows that is expected to hold a token, at most 1."""
        return min(1.0, self.expected / self.by_shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What a simulation assumes that the program does not say; the default assumes nothing.

    Attributes:
      buckets: of the program, for counting rows; () where they are not known.
      expected_rows: the experts' matmuls and the exchanges of rows work on the rows that are expected, not on those of
        their shapes.
      taken: share of the device's cores that a transfer under way takes from the kernels beside it, all of which then
        run at the rate of the rest.
    """

    buckets: tuple[Buckets, ...] = ()
    expected_rows: bool = False
    taken: float = 0.0


@dataclasses.dataclass
class Rows:
    """Sums over the executions of instructions of one kind that work on rows of buckets.

    Attributes:
      executions; rows: by shape; expected: of them, to be used; seconds: modelled; flops: of matmuls; bytes: of one
        device's operand or result of an exchange.
    """

    executions: int = 0
    rows: int = 0
    expected: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


def used_share(buckets: Sequence[Buckets], rows: int) -> float:
    """Return the share of `rows` that is expected to be used: of the segment with so many, else the mean of all."""
    found = [own.used for own in buckets if own.by_shape == rows] or [own.used for own in buckets]
    return sum(found) / len(found)


def exchanged_rows(arrays: Iterable[Array]) -> int:
    """Return the rows that an exchange moves by the shape of its result, 0 where it moves counts.

    Rows are floats [..., M], or bytes [..., B] of rows in float8; counts are signed. What has a shorter last dim goes
    with them (scales) and is not counted again.
    """
    arrays = list(arrays)
    rows = _floats(arrays) + [array for array in arrays if array.dtype == "u8" and len(array.dims) >= 2]
    last = max((array.dims[-1] for array in rows), default=0)
    return sum(math.prod(array.dims[:-1]) for array in rows if array.dims[-1] == last)


def multiplied_rows(arrays: Iterable[Array]) -> int:
    """Return the rows R of a grouped matmul by the shapes of its operands and result, 0 where none is [R, ...]."""
    return max((array.dims[0] for array in _floats(arrays) if len(array.dims) == 2), default=0)


def row_bytes(arrays: Iterable[Array], rows: int) -> int:
    """Return the bytes of the arrays that have a row for each of `rows`."""
    return sum(array.bytes for array in _floats(arrays) if len(array.dims) == 2 and array.dims[0] == rows)


def overflow_chance(buckets: Sequence[Buckets]) -> float:
    """Return the most that the chance of a step is to overflow somewhere; that of every bucket is known."""
    return min(1.0, sum(own.exchanges * (own.overflow or 0.0) for own in buckets))


def _floats(arrays: Iterable[Array]) -> list[Array]:
    return [array for array in arrays if array.dims and not array.dtype.startswith(("s", "u", "pred"))]
