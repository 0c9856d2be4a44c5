"""Heat maps of expert load: one panel per layer in one figure, from 1 to 96 layers and 2 to 512 experts.

Inputs: a `LoadsTrace`. Outputs: a matplotlib figure.
Letters: docs/notation.md; n columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from moe_jax.observe.figures import FAINT, GREY, INK, MOST_POINTS, new_figure
from moe_jax.observe.load_trace import LoadsTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

NO_TOKENS = "#000000"
_WIDTH = 7.2


def expert_load_heat_maps(trace: LoadsTrace) -> Figure:
    """Draw a panel per layer: steps to the right, experts upwards, colour = load against an even share.

    The scale is logarithmic and the same in all panels; white is an even share, an expert without a token is black.
    With more experts than pixels their colours are averaged.

    Args:
      trace: loads [Nt, L, S, E] and iterations [Nt].
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    shares, first, last = load_grid(trace)
    L, E, _ = shares.shape
    across, down = panel_grid(L)
    height = panel_height(E, down)
    figure = new_figure(_WIDTH, 0.9 + down * (height + 0.26))
    figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02)
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    reach = colour_reach(shares)
    norm = LogNorm(1.0 / reach, reach)
    for layer, axes in enumerate(panels.flat):
        if layer >= L:
            axes.set_axis_off()
            continue
        axes.imshow(
            # Below the scale: no token. The lightest loads stay on it.
            np.where(shares[layer] > 0, np.clip(shares[layer], 1.001 / reach, reach), 1e-9),
            cmap=_colours(),
            norm=norm,
            aspect="auto",
            origin="lower",
            extent=(first, last, -0.5, E - 0.5),
        )
        _dress(axes, layer, labelled_below=layer + across >= L, labelled_left=layer % across == 0)
    # The panels share their axes, and so one set of ticks.
    panels[0, 0].set_yticks(sorted({0, E // 2, E - 1}))
    panels[0, 0].xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    panels[0, 0].set_xlim(first, last)
    bar = figure.colorbar(
        ScalarMappable(norm, _colours()), ax=panels, location="top", aspect=45, shrink=0.7, pad=0.01, extend="min"
    )
    ticks, labels = _scale_ticks(reach)
    bar.set_ticks(ticks, labels=labels)
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8, colors=GREY, length=0)
    bar.outline.set_visible(False)
    figure.suptitle("Expert load over time, against an even share (black: no token)", x=0.01, ha="left", color=INK,
                    fontsize=11, fontweight="bold")  # fmt: skip
    figure.supxlabel("step", color=GREY, fontsize=9)
    figure.supylabel("expert", color=GREY, fontsize=9)
    return figure


def load_grid(trace: LoadsTrace, most: int = MOST_POINTS) -> tuple[np.ndarray, float, float]:
    """Bring samples onto an even time axis and divide each expert's load by the even share.

    Args:
      trace: loads [Nt, L, S, E].
      most: columns at most; several samples in one column are averaged, a gap repeats the sample before it.

    Returns:
      (shares float64 [L, E, n], first, last): 1 is an even share; the steps at the left and right edge.
    """
    tokens = trace.loads.sum(axis=2, dtype=np.int64).astype(np.float64)
    even = tokens.mean(axis=2, keepdims=True)
    shares = tokens / np.where(even > 0, even, 1.0)
    steps = trace.iterations.astype(np.int64)
    apart = int(np.diff(steps).min()) if len(steps) > 1 else 1
    columns = min(most, int(steps[-1] - steps[0]) // apart + 1)
    edges = steps[0] + (steps[-1] - steps[0] + apart) * np.arange(columns + 1) / columns
    # Column j holds the samples from edge j to edge j + 1, or else the newest one before it.
    stops = np.searchsorted(steps, edges[1:] - 1e-6)
    starts = np.minimum(np.concatenate([[0], stops[:-1]]), stops - 1)
    sums = np.concatenate([np.zeros((1, *shares.shape[1:])), np.cumsum(shares, axis=0)])
    means = (sums[stops] - sums[starts]) / (stops - starts)[:, None, None]
    return means.transpose(1, 2, 0), float(edges[0]), float(edges[-1])


def panel_grid(layers: int) -> tuple[int, int]:
    """Return (panels across, panels down): one or two wide panels, then 3, 4, 6 and 8 columns."""
    across = next(
        columns for columns, most in ((1, 2), (2, 6), (3, 12), (4, 24), (6, 48), (8, math.inf)) if layers <= most
    )
    across = min(across, layers)
    return across, math.ceil(layers / across)


def panel_height(experts: int, down: int) -> float:
    """Return inches: taller for more experts, lower when many panels share the page."""
    return max(0.75, min(0.6 + 0.05 * experts, 3.8, 9.0 / down))


def colour_reach(shares: np.ndarray) -> float:
    """Return the multiple of an even share at the upper end of the scale, a power of two from 2 to 64.

    It covers all but the heaviest 0.2% of the loads, so that one outlier does not make the others look alike. The lower
    end is its inverse: the light experts do not set it, since a step waits for the heavy ones.
    """
    extreme = float(np.quantile(shares, 0.998))
    return 2.0 ** min(6, max(1, math.ceil(math.log2(max(extreme, 1.0)) - 0.01)))


def _colours() -> Colormap:
    import matplotlib

    return matplotlib.colormaps["RdBu_r"].with_extremes(under=NO_TOKENS)


def _dress(axes: Axes, layer: int, *, labelled_below: bool, labelled_left: bool) -> None:
    axes.set_title(f"layer {layer}", loc="left", fontsize=8, color=INK, pad=2)
    axes.tick_params(
        colors=GREY, labelsize=7.5, length=2, color=FAINT, labelbottom=labelled_below, labelleft=labelled_left
    )
    for spine in axes.spines.values():
        spine.set_visible(False)


def _scale_ticks(reach: float) -> tuple[list[float], list[str]]:
    powers = range(-int(math.log2(reach)), int(math.log2(reach)) + 1)
    labels = [f"{2**power}x" if power > 0 else f"1/{2**-power}x" for power in powers]
    labels[0], labels[-1], labels[len(labels) // 2] = "\u2264 " + labels[0], "\u2265 " + labels[-1], "even"
    return [2.0**power for power in powers], labels
