"""Fits of the public tables in `measured/` (its README has their sources): seconds as lines over sizes.

    collective       start + root sqrt(Z) + slope Z     Z bytes, for each GPU, opcode and group size
    matmul           t0 + c k + d A + e A k - f sqrt(A) k     A = b m n, for each GPU and arithmetic
    grouped matmul   a R K N + w G K N                  R rows, G groups, for each GPU and pass
    attention        a FLOPs + s scores + r rows + c causal rows     for each GPU and pass, half of both where causal

Each fit takes rows and returns coefficients, so that a part can be left out (`scripts/checks/prices.py`). Relative
errors count: small sizes scatter, and large ones must not drown them.
"""

from __future__ import annotations

import csv
import functools
import math
import pathlib
import typing

import numpy as np

from moe_jax.cluster.fits import least_squares

FOLDER = pathlib.Path(__file__).parent / "measured"
LEVELS = ("low", "middle", "high")  # of seconds: the fastest, a middle and the slowest that sources speak for


class Line(typing.NamedTuple):
    """Seconds of a collective over its bytes Z."""

    start: float
    root: float  # seconds per square root of a byte: bandwidth grows until transfers are long
    slope: float  # seconds per byte

    def seconds(self, size):
        """Return the seconds of Z bytes [...]."""
        return self.start + self.root * np.sqrt(size) + self.slope * size


@functools.cache
def rows_of(table: str) -> tuple[dict[str, str], ...]:
    """Return the rows of a table of `measured/` as they stand there."""
    with open(FOLDER / f"{table}.csv", encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


@functools.cache
def assumed(name: str, level: str) -> float:
    """Return a figure that nobody measured, at a level of `LEVELS`."""
    return float(next(row for row in rows_of("assumed") if row["name"] == name)[level])


def reached_links(cluster: str) -> dict[str, float]:
    """Return the links of a cluster's file at what others reached on such machines: fields of `Cluster`, bytes/s."""
    return {row["link"]: float(row["bytes_per_second"]) for row in rows_of("links") if row["cluster"] == cluster}


def relative_fit(columns: np.ndarray, seconds: np.ndarray, signed: bool = False) -> np.ndarray:
    """Return coefficients [c] of columns [n, c] that make the relative errors of seconds [n] small.

    Least squares of the ratio, weighted again and again so that outliers count by less than their square; no
    coefficient is below 0 unless they are `signed`.
    """
    columns, seconds = np.asarray(columns, np.float64), np.asarray(seconds, np.float64)
    weights = 1 / seconds
    for _ in range(40):
        answer = least_squares(columns * weights[:, None], seconds * weights, signed)
        off = np.abs(columns @ answer - seconds) / seconds
        weights = 1 / seconds / np.sqrt(np.maximum(off, 0.01))
    return answer


def fit_collective(rows) -> Line:
    """Fit the rows of one GPU, opcode and group size."""
    size = np.array([float(row["bytes"]) for row in rows])
    columns = np.stack([np.ones_like(size), np.sqrt(size), size], axis=1)
    return Line(*relative_fit(columns, _seconds(rows)).tolist())


def matmul_columns(b, m, n, k) -> np.ndarray:
    """Return what a matmul's seconds are a sum of: sizes [...] -> [..., 5]."""
    area = b * m * n
    return np.stack([np.ones_like(area), k, area, area * k, -np.sqrt(area) * k], axis=-1)


def grouped_columns(rows, k, n, groups) -> np.ndarray:
    """Return what a grouped matmul's seconds are a sum of: sizes [...] -> [..., 2]; groups of 0 are not known."""
    return np.stack(np.broadcast_arrays(rows * k * n, groups * k * n), axis=-1)


def attention_columns(batch, heads, length, head_dim, value_dim, causal) -> np.ndarray:
    """Return what the seconds of attention, forward or backward, are a sum of: sizes [...] -> [..., 4]."""
    counted = np.where(causal, 0.5, 1.0)
    scores, values = batch * heads * length**2 * counted, batch * heads * length * (head_dim + value_dim)
    return np.stack([scores * (head_dim + value_dim), scores, values, causal * values], axis=-1)


# of a kernel's table the columns of its sizes, and what its seconds are a sum of
KERNELS = {
    "matmuls": (("b", "m", "n", "k"), matmul_columns),
    "grouped_matmuls": (("rows", "k", "n", "groups"), grouped_columns),
    "attention": (("batch", "heads", "length", "head_dim", "value_dim", "causal"), attention_columns),
}


def columns_of(table: str, rows) -> np.ndarray:
    """Return [n, c], what the seconds of a kernel's rows are a sum of."""
    names, columns = KERNELS[table]
    return columns(*np.array([[float(row[name]) for name in names] for row in rows]).T)


def fit_kernel(table: str, rows) -> np.ndarray:
    """Fit the rows of one GPU and kind; of attention's backward those of cuDNN, which is what runs.

    A matmul's last coefficient is negative where launch and work overlap.
    """
    if table == "attention":
        rows = [row for row in rows if row["kind"] == "forward" or row["implementation"] == "cudnn"]
    return relative_fit(columns_of(table, rows), _seconds(rows), signed=table == "matmuls")


def _seconds(rows) -> np.ndarray:
    return 1e-6 * np.array([float(row["microseconds"]) for row in rows])


@functools.cache
def fitted(table: str, gpus: tuple[str, ...], kind: str):
    """Return the fit of a table: coefficients [c], of collectives {members: `Line`}; None where it has no such rows.

    Args:
      table: 'collectives', 'matmuls', 'grouped_matmuls' or 'attention'.
      gpus: names in the table, the first that has rows counts.
      kind: an opcode, an arithmetic, or a pass.
    """
    key = {"collectives": "opcode", "matmuls": "arithmetic"}.get(table, "kind")
    for gpu in gpus:
        rows = [row for row in rows_of(table) if row["gpu"] == gpu and row[key] == kind]
        if rows and table in KERNELS:
            return fit_kernel(table, rows)
        if rows:
            sizes = sorted({int(row["members"]) for row in rows})
            return {size: fit_collective([row for row in rows if int(row["members"]) == size]) for size in sizes}
    return None


def collective_line(lines: dict[int, Line], members: int, kind: str) -> Line:
    """Return the line of a group of n devices from those of other sizes.

    Between two measured sizes coefficients go with log n. Beyond them the start-up grows by rounds (n - 1 messages of
    an all-to-all, log2 n of the others) and the bytes by what a device sends of Z, (n - 1) / n.
    """
    if members in lines:
        return lines[members]
    sizes = sorted(lines)
    if sizes[0] < members < sizes[-1]:
        upper = next(size for size in sizes if size > members)
        lower = sizes[sizes.index(upper) - 1]
        part = math.log(members / lower) / math.log(upper / lower)
        pairs = zip(lines[lower], lines[upper], strict=True)
        return Line(*(a + part * (b - a) for a, b in pairs))
    nearest = sizes[0] if members < sizes[0] else sizes[-1]
    line, rounds = lines[nearest], (members - 1) / (nearest - 1)
    if kind != "all-to-all":
        rounds = math.log2(members) / math.log2(nearest)
    sent = (1 - 1 / members) / (1 - 1 / nearest)
    return Line(line.start * rounds, line.root * math.sqrt(sent), line.slope * sent)
