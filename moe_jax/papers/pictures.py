"""How a table's figure is drawn: bars of its rows, or lines. Each function returns what draws on matplotlib's axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Draw = Callable[[Any], None]
FEW, MANY = 8, 24  # of more rows names are turned, and then left out but where a row's first cell is new


def bars(columns: Sequence[str], rows: Sequence[tuple], label: str, of: Sequence[str] = (), stacked=False) -> Draw:
    """Draw a group of bars for each row, named by the cells before its first figure.

    Args:
      label: what all of them are, with the unit; of: the columns that are drawn, all figures when not given.
      stacked: on each other, as parts of a whole.
    """
    first = next(at for at, cell in enumerate(rows[0]) if isinstance(cell, float))
    names = [("\n" if len(rows) <= FEW else ", ").join(map(str, row[:first])) for row in rows]
    if len(rows) > MANY:
        names = [row[0] if at == 0 or rows[at - 1][0] != row[0] else "" for at, row in enumerate(rows)]
    drawn = [columns.index(name) for name in of] or range(first, len(columns))

    def draw(axes):
        base, width = np.zeros(len(rows)), 0.8 if stacked else 0.8 / len(drawn)
        for at, column in enumerate(drawn):
            places = np.arange(len(rows)) + (0.0 if stacked else (at + 0.5) * width - 0.4)
            cells = np.array([row[column] for row in rows])
            axes.bar(places, cells, width, bottom=base if stacked else 0.0, label=columns[column])
            base += cells
        axes.set_xticks(range(len(rows)), names, fontsize=7, rotation=0 if len(rows) <= FEW else 90)
        axes.set(ylabel=label)
        axes.legend(frameon=False, fontsize=7)

    return draw


def lines(series: Mapping[str, Iterable[tuple]], **settings) -> Draw:
    """Draw lines {label: points (x, y)}, a baseline dotted in the colour of the line before it."""

    def draw(axes):
        for label, points in series.items():
            how = {"linestyle": ":", "color": axes.lines[-1].get_color()} if "baseline" in label else {}
            axes.plot(*zip(*points, strict=True), marker=".", label=label, **how)
        axes.set(**settings)
        axes.legend(frameon=False, fontsize=7)

    return draw
