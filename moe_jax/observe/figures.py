"""How every picture of this package is drawn: one size, one palette, one way to thin out long runs.

matplotlib is imported inside functions and used through its objects only, never through pyplot, so drawing needs no
display and leaves a user's own figures alone. The colours can be distinguished by colour-blind readers too (Okabe and
Ito's).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_jax.observe.atomic import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 200
MOST_POINTS = 400  # along the time axis; longer runs are averaged in windows

PURPLE, YELLOW, SKY = "#CC79A7", "#E69F00", "#56B4E9"
BLUE, ORANGE, GREEN, INK, GREY, FAINT = "#0072B2", "#D55E00", "#009E73", "#1f2328", "#656d76", "#d8dee4"


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG atomically, without the metadata that would make equal pictures differ."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH, facecolor="white", metadata={"Software": None})
    return path


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that many inches that draws with Agg."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def windowed(steps: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Average neighbouring records so that at most `most` points are left.

    Args:
      steps: [n].
      values: [n] or [n, layers]; NaN counts as absent.

    Returns:
      (steps, values) of at most `most` rows: the last step of each window and the mean over it.
    """
    if len(steps) <= most:
        return steps, values
    starts = np.linspace(0, len(steps), most, endpoint=False).astype(int)
    present = np.isfinite(values)
    counts = np.add.reduceat(present, starts, axis=0, dtype=np.float64)
    sums = np.add.reduceat(np.where(present, values, 0.0), starts, axis=0)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return steps[np.append(starts[1:], len(steps)) - 1], means


def smoothed(values: np.ndarray, reach: int | None = None) -> np.ndarray:
    """Average each value [n] with its neighbours up to `reach` away on both sides; NaN is left out."""
    n = len(values)
    reach = max(1, min(10, n // 20)) if reach is None else reach
    present = np.isfinite(values)
    counts = np.concatenate([[0.0], np.cumsum(present)])
    sums = np.concatenate([[0.0], np.cumsum(np.where(present, values, 0.0))])
    index = np.arange(n)
    # The same reach on both sides, so that a falling curve is not shifted.
    sides = np.minimum(reach, np.minimum(index, n - 1 - index))
    first, stop = index - sides, index + sides + 1
    number = counts[stop] - counts[first]
    return np.where(present, (sums[stop] - sums[first]) / np.maximum(number, 1), np.nan)


def style_axes(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(True, axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=8.5, length=0)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=GREY, size=9)


def title_axes(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", color=INK, fontsize=11, fontweight="bold", pad=10)


def span_axes(axes: Axes, steps: np.ndarray) -> None:
    """Let the axis begin and end with the data; a single step gets a margin on both sides."""
    if len(steps):
        first, last = float(steps.min()), float(steps.max())
        room = 0.01 * (last - first) if last > first else 0.5
        axes.set_xlim(first - room, last + room)
