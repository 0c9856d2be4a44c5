"""How a table's figure is drawn: bars of its rows, or lines. Each function returns what `Table.draw` takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from moe_jax.papers.table import Draw

FEW, MANY = 8, 24  # of more rows names are turned, and then left out but where a row's first cell is new


def bars(label: str, *names: str, stacked: bool = False) -> Draw:
    """Draw a group of bars for each row, named by the cells before its first figure.

    Args:
      label: what all of them are, with the unit; names: the columns that are drawn, all figures when not given.
      stacked: on each other, as parts of a whole.
    """

    def draw(table, axes):
        rows, columns = table.rows, table.columns
        first = next(at for at, cell in enumerate(rows[0]) if isinstance(cell, float))
        groups = [("\n" if len(rows) <= FEW else ", ").join(map(str, row[:first])) for row in rows]
        if len(rows) > MANY:
            groups = [row[0] if at == 0 or rows[at - 1][0] != row[0] else "" for at, row in enumerate(rows)]
        drawn = names or columns[first:]
        base, width = np.zeros(len(rows)), 0.8 if stacked else 0.8 / len(drawn)
        for at, name in enumerate(drawn):
            cells = np.array([row[columns.index(name)] for row in rows])
            places = np.arange(len(rows)) + (0.0 if stacked else (at + 0.5) * width - 0.4)
            axes.bar(places, cells, width, bottom=base if stacked else 0.0, label=name)
            base += cells
        axes.set_xticks(range(len(rows)), groups, fontsize=7, rotation=0 if len(rows) <= FEW else 90)
        axes.set(ylabel=label)
        axes.legend(fontsize=7)

    return draw


def lines(x: str, *names: str, by: str = "", **settings) -> Draw:
    """Draw the columns of these names over column `x`, for each value of column `by`; cells of text are left out."""

    def draw(table, axes):
        at = table.columns.index
        series = {}
        for row in table.rows:
            of = f"{by} = {row[at(by)]}, " if by else ""
            for name in names:
                if not isinstance(row[at(name)], str):
                    series.setdefault(of + name, []).append((row[at(x)], row[at(name)]))
        curves(series, xlabel=x, **settings)(table, axes)

    return draw


def curves(series: Mapping[str, Iterable[tuple]], **settings) -> Draw:
    """Draw lines {label: points (x, y)}, a baseline dotted in the colour of the line before it."""

    def draw(table, axes):
        del table
        for label, points in series.items():
            how = {"linestyle": ":", "color": axes.lines[-1].get_color()} if "baseline" in label else {}
            axes.plot(*zip(*points, strict=True), marker=".", label=label, **how)
        axes.set(**settings)
        axes.legend(fontsize=7)

    return draw
