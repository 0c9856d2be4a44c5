"""Times of collectives as straight lines (seconds = alpha + beta x + gamma y) and their names.

Sizes are in whatever unit the caller measured; alpha is in seconds. A group of n devices is n neighbours in the order
of the device index, or n devices a stride apart; MP, ESP and EP&ESP are neighbours and EP stands N_ESP apart, so one
calibration serves all meshes of a machine.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.errors import UserError


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
