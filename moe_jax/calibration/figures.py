"""The fits, drawn over the points that they were fitted to (Parm, fig. 6).

Inputs: measured points and fits by name. Outputs: one PNG, and the points as CSV. matplotlib is imported late.
"""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Mapping

from moe_jax.calibration.measure import Points
from moe_jax.cluster import Cluster


def write_points(points: Mapping[str, Points], path: str | pathlib.Path) -> None:
    """Write columns name, x, y, seconds: sizes as each fit counts them."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", *Points._fields])
        for name, found in points.items():
            writer.writerows([name, *point] for point in zip(*found, strict=True))


def draw_fits(points: Mapping[str, Points], cluster: Cluster, path: str | pathlib.Path) -> None:
    """Draw seconds over size, a panel per fit, as dots and a line, with R^2 in its title.

    Panels of two-term fits show predicted against measured seconds.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fits = dict(cluster.fits)
    columns = 6
    rows = -(-len(points) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2.3 * columns, 1.9 * rows), squeeze=False)
    for axis in axes.flat[len(points) :]:
        axis.axis("off")
    for axis, (name, found) in zip(axes.flat, points.items(), strict=False):
        fit = fits[name]
        if name.startswith("saa"):  # the points without gathers gave the slope of x alone
            found = Points(*zip(*(point for point in zip(*found, strict=True) if point[1]), strict=True))
        predicted = [1e3 * fit.seconds(x, y) for x, y in zip(found.x, found.y, strict=True)]
        measured = [1e3 * s for s in found.seconds]
        if any(found.y):
            axis.plot(measured, predicted, "o", ms=3)
            axis.plot([0, max(measured)], [0, max(measured)], lw=1)
            axis.set_xlabel("measured ms", fontsize=6)
        else:
            axis.plot(found.x, measured, "o", ms=3)
            axis.plot(found.x, predicted, lw=1)
            axis.set_xlabel("FLOPs" if name == "dense" else "bytes", fontsize=6)
        axis.set_title(f"{name}  R²={fit.r2:.3f}", fontsize=7)
        axis.tick_params(labelsize=5)
        axis.xaxis.get_offset_text().set_fontsize(5)
    figure.suptitle("calibration: milliseconds over size, or predicted over measured", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=70)
    plt.close(figure)
