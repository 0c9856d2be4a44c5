"""Times as straight lines (seconds = alpha + beta x + gamma y): of a user's calibration, and of public tables.

A calibration's sizes are in whatever unit the caller measured; alpha is in seconds. A group of n devices is n
neighbours in the order of the device index, or n devices a stride apart; MP, ESP and EP&ESP are neighbours and EP
stands N_ESP apart, so one calibration serves all meshes of a machine.

The tables of `measured/` (its README has their sources):

    collective       alpha + beta sqrt(Z) + gamma Z     Z bytes, for each GPU, opcode and group size
    matmul           t0 + c k + d A + e A k - f sqrt(A) k     A = b m n, for each GPU and arithmetic
    grouped matmul   a R K N + w G K N                  R rows, G groups, for each GPU and pass
    attention        a FLOPs + s scores + r rows + c causal rows     for each GPU and pass, half of both where causal

Each of these fits takes rows and returns coefficients, so that a part can be left out (`scripts/checks/prices.py`).
Relative errors count: small sizes scatter, and large ones must not drown them.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import pathlib

import numpy as np

from moe_jax.errors import UserError

FOLDER = pathlib.Path(__file__).parent / "measured"
LEVELS = ("low", "middle", "high")  # of seconds: the fastest, a middle and the slowest that sources speak for


def fit_name(collective: str, size: int, *others: int, stride: int = 1) -> str:
    """Return for example 'all_to_all:8', 'permute:2x4' or 'saa:8,2,4'.

    Args:
      collective: its name; size: devices of the group, which stand `stride` apart; others: for SAA, N_MP and N_ESP.
    """
    return f"{collective}:{','.join(map(str, (size, *others)))}{'' if stride == 1 else f'x{stride}'}"


@dataclasses.dataclass(frozen=True, order=True)
class Fit:
    """The line seconds = alpha + beta x + gamma y; gamma is 0 for a collective with one size."""

    alpha: float
    beta: float
    gamma: float = 0.0
    r2: float | None = None

    def seconds(self, x: float, y: float = 0.0) -> float:
        """Return the predicted time of sizes x and y."""
        return self.alpha + self.beta * x + self.gamma * y


def fit_alpha_beta(sizes, seconds, second_sizes=None) -> Fit:
    """Fit seconds = alpha + beta size [+ gamma second size] by least squares, none below 0.

    Args:
      sizes: [n], at least two different ones; seconds: [n], measured times.
      second_sizes: [n], of a simultaneous all-to-all (sizes) and all-gather; both must vary apart.

    Source: Parm, equation 12 and section V. That no coefficient is below 0 is our addition: otherwise noise could give
    small sizes a negative time.
    """
    names, columns = ("size", [sizes]) if second_sizes is None else ("x and y", [sizes, second_sizes])
    times = np.asarray(seconds, np.float64)
    matrix = np.stack([np.ones(len(times)), *(np.asarray(column, np.float64) for column in columns)], axis=1)
    if not np.isfinite(matrix).all() or not np.isfinite(times).all():
        raise UserError(f"a fit over {names} needs finite sizes and times; drop the failed measurements")
    rank = np.linalg.matrix_rank(matrix / np.maximum(np.abs(matrix).max(axis=0), 1e-300))
    if rank < matrix.shape[1]:
        raise UserError(
            f"a fit over {names} needs at least {matrix.shape[1]} measurements at different sizes, got "
            f"{len(times)} of rank {rank}; measure more sizes"
        )
    coefficients = least_squares(matrix, times)
    return Fit(*(float(c) for c in np.r_[coefficients, 0.0][:3]), _r2(times, matrix @ coefficients))


def fit_layers(names, communication, computation, seconds) -> dict[str, Fit]:
    """Fit seconds = alpha of the layer's schedule + beta communication + gamma computation, relative errors least.

    Args:
      names: [n] schedule of each layer; communication, computation: [n] predicted seconds of its parts alone.
      seconds: [n] measured times of the whole.

    Returns:
      {schedule: Fit} with the same beta, gamma and R^2 of all; no coefficient is below 0.
    """
    kinds = sorted(set(names))
    columns = [np.asarray([name == kind for name in names], np.float64) for kind in kinds]
    columns += [np.asarray(communication, np.float64), np.asarray(computation, np.float64)]
    times = np.asarray(seconds, np.float64)
    if len(times) < len(columns):
        raise UserError(f"a fit of layers needs at least {len(columns)} measurements, got {len(times)}; measure more")
    matrix = np.stack(columns, axis=1)
    answer = least_squares(matrix / times[:, None], np.ones(len(times)))
    r2 = _r2(times, matrix @ answer)
    beta, gamma = (float(value) for value in answer[-2:])
    return {kind: Fit(float(alpha), beta, gamma, r2) for kind, alpha in zip(kinds, answer, strict=False)}


def least_squares(matrix: np.ndarray, times: np.ndarray, signed: bool = False) -> np.ndarray:
    """Return coefficients [c] of columns [n, c]; those below 0 become 0 one by one, unless they are `signed`."""
    # Columns differ by orders of magnitude: scale them, or a small one is lost.
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    answer, kept = np.zeros(matrix.shape[1]), list(range(matrix.shape[1]))
    while kept:
        found = np.linalg.lstsq(matrix[:, kept] / scale[kept], times, rcond=None)[0]
        if signed or found.min() >= 0:
            answer[kept] = found / scale[kept]
            break
        kept.pop(int(np.argmin(found)))
    return answer


def _r2(times: np.ndarray, predicted: np.ndarray) -> float:
    """Return 1 - residual / total variance, 1 where all times are equal."""
    total = float(((times - times.mean()) ** 2).sum())
    return 1.0 if total == 0 else 1.0 - float(((predicted - times) ** 2).sum()) / total


@functools.cache
def rows_of(table: str) -> tuple[dict[str, str], ...]:
    """Return the rows of a table of `measured/` as they stand there."""
    with open(FOLDER / f"{table}.csv", encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


@functools.cache
def assumed(name: str, level: str) -> float:
    """Return a figure that nobody measured, at a level of `LEVELS`."""
    return float(next(row for row in rows_of("assumed") if row["name"] == name)[level])


def relative_fit(columns: np.ndarray, rows, signed: bool = False) -> np.ndarray:
    """Return coefficients [c] of columns [n, c] that make the relative errors of the seconds of n rows small.

    Least squares of the ratio, weighted again and again so that outliers count by less than their square; no
    coefficient is below 0 unless they are `signed`.
    """
    columns = np.asarray(columns, np.float64)
    seconds = 1e-6 * np.array([float(row["microseconds"]) for row in rows])
    weights = 1 / seconds
    for _ in range(40):
        answer = least_squares(columns * weights[:, None], seconds * weights, signed)
        off = np.abs(columns @ answer - seconds) / seconds
        weights = 1 / seconds / np.sqrt(np.maximum(off, 0.01))
    return answer


def fit_collective(rows) -> Fit:
    """Fit the rows of one GPU, opcode and group size over x = sqrt(Z), since bandwidth grows with Z, and y = Z."""
    size = np.array([float(row["bytes"]) for row in rows])
    columns = np.stack([np.ones_like(size), np.sqrt(size), size], axis=1)
    return Fit(*relative_fit(columns, rows).tolist())


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
    return relative_fit(columns_of(table, rows), rows, signed=table == "matmuls")


@functools.cache
def fitted(table: str, gpus: tuple[str, ...], kind: str):
    """Return the fit of a table: coefficients [c], of collectives {members: `Fit`}; None where it has no such rows.

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


def collective_line(lines: dict[int, Fit], members: int, kind: str) -> Fit:
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
        ends = ((fit.alpha, fit.beta, fit.gamma) for fit in (lines[lower], lines[upper]))
        return Fit(*(a + part * (b - a) for a, b in zip(*ends, strict=True)))
    nearest = sizes[0] if members < sizes[0] else sizes[-1]
    line, rounds = lines[nearest], (members - 1) / (nearest - 1)
    if kind != "all-to-all":
        rounds = math.log2(members) / math.log2(nearest)
    sent = (1 - 1 / members) / (1 - 1 / nearest)
    return Fit(line.alpha * rounds, line.beta * math.sqrt(sent), line.gamma * sent)
