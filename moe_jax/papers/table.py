"""A table of a paper beside ours: rows of figures, and claims, each with the paper's number, ours, and a verdict.

A claim is a row of the comparison: one number that a paper's text states, a range, or the cells of one of its tables,
which stay visible but count once. A verdict is never chosen: it follows from the numbers.

    within a fifth      a number: ours is within a fifth; a range: its ends and ours are; cells: their ends, their
                        geometric mean, and at least half of them, each beside its own, are
    explained by        an experiment that changes one named cause closes at least half of the gap, which is the largest
                        of these differences (all but a fifth of one that no ratio measures, ours being 0 or less), and
                        leaves within a fifth what else of its table was there
    unexplained         neither; the experiment that closes most of the gap, where one closes any
    no number           the paper's text has none

Modelled and simulated figures are computed at each level of assumed prices (`cluster/measured/assumed.csv`).

What a text says of its tables stands in PAPER.toml, by the names of the functions of PAPER.py that compute them:
title, columns, notes (of loads, machine and rules; one sentence each) and claims, `name = 1.2` for a number,
`"1.2 to 1.5"` for a range, a list for cells, and `"-"` for none. A name that ends with "(beside)" is of a number that
the text has beside those that are asked for: judged as they are, counted apart.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsTrace
from moe_jax.papers.loads import find_loads

FIFTH = 1.2
LEVELS = ("middle", "low", "high")  # of assumed prices
FEW, MANY = 8, 24  # of more bars names are turned, and then left out but where a row's first cell is new
WITHIN, EXPLAINED, UNEXPLAINED = "within a fifth", "explained by", "unexplained"
NO_NUMBER = "no number in the text"


class MissingResults(UserError):
    """A table of measured runs whose results are not there yet: left out, where it is not asked for by name."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a table is computed from.

    Attributes:
      trace: name or path of expert loads for all rows; None: the shipped ones of each row's K.
      level: of assumed prices, one of `LEVELS`.
    """

    trace: str | None
    level: str = "middle"

    def loads(self, top_k: int) -> LoadsTrace:
        """Return the loads of rows with this K."""
        return find_loads(self.trace or f"top_{top_k}")


Figures = tuple[float, ...]
Remarks = Callable[[Inputs], Iterable[str]]


@dataclasses.dataclass(frozen=True)
class Claim:
    """One row: what a paper's text states, and ours.

    An experiment changes one cause of a difference, to a value that has a source or was measured, and nothing else.
    """

    name: str
    paper: Figures | None  # a number, the ends of a range, or cells; None where the text has no number
    ours: Figures  # of which a number or a range counts by its ends, and cells each
    cells: bool = False
    levels: tuple[Figures, ...] = ()  # ours at each level of prices
    experiments: Mapping[str, Figures] = dataclasses.field(default_factory=dict)  # by cause ours then

    def gap(self, ours: Figures) -> float:
        """Return how far figures are from the paper's, the largest |log of a ratio| of this file's head."""
        assert self.paper is not None
        if min(ours) <= 0:
            return math.inf
        its, these = np.log(self.paper), np.log(ours)
        gaps = [these.min() - its.min(), these.max() - its.max()]
        if self.cells:
            gaps += [(these - its).mean(), np.quantile(abs(these - its), 0.5, method="lower")]
        return float(np.abs(gaps).max())

    def fits(self, ours: Figures) -> bool:
        """Say whether such figures of ours are within a fifth; any are where the text has no number."""
        return self.paper is None or self.gap(ours) <= math.log(FIFTH)

    @property
    def verdict(self) -> str:
        """What the numbers say, in the words of this file's head."""
        if self.paper is None:
            return NO_NUMBER
        if self.fits(self.ours):
            return WITHIN
        gap = self.gap(self.ours)
        least, cause = min(((self.gap(then), cause) for cause, then in self.experiments.items()), default=(gap, ""))
        if least >= gap:
            return UNEXPLAINED
        by = f"{cause}: {range_of(self.experiments[cause])}"
        explains = least <= (gap / 2 if math.isfinite(gap) else math.log(FIFTH))
        return f"{EXPLAINED} {by}" if explains else f"{UNEXPLAINED}; nearest by {by}"


def figures(values: Any) -> Figures:
    """Return a number, several, or an array of them as a tuple."""
    return tuple(np.ravel(np.array(values, float)).tolist())


Draw = Callable[["Table", Any], None]


@dataclasses.dataclass(frozen=True)
class Table:
    """One table or figure of a paper.

    Attributes:
      title: what it shows, and its number in the paper; kind: 'modelled', 'simulated' or 'measured'.
      columns: their names; levels: rows of text and numbers at each level of prices, that which is printed first.
      claims: at least one.
      notes: which loads, machine and rules; one sentence each.
      draw: draws the figure as the paper does, called with the table and matplotlib's axes; None: no figure.
    """

    title: str
    kind: str
    columns: tuple[str, ...]
    levels: Mapping[str, list[tuple[Any, ...]]]
    claims: tuple[Claim, ...]
    notes: tuple[str, ...] = ()
    draw: Draw | None = None

    def verdicts(self) -> list[tuple[str, ...]]:
        """Return the claims as rows, the first one their head."""
        rows = [("claim", "paper", "ours", "verdict")]
        for claim in self.claims:
            ours = with_span(range_of(claim.ours), claim.levels)
            rows.append((claim.name, range_of(claim.paper), ours, claim.verdict))
        return rows

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The rows at the middle level."""
        return self.levels[LEVELS[0]]

    def texts(self) -> list[tuple[str, ...]]:
        """Return columns and rows as text, of each figure its range over the levels of prices in brackets."""
        same = [rows for rows in self.levels.values() if len(rows) == len(self.rows)]  # a run may end in other rows
        rows = ((zip(*row, strict=True)) for row in zip(*same, strict=True))  # of each row its cells by level
        return [self.columns, *(tuple(with_span(text_of(cells[0]), cells) for cells in row) for row in rows)]

    def lines(self) -> list[str]:
        """Return the table as aligned lines for a terminal, with claims and notes."""
        rows = [*aligned(self.texts()), "", *aligned(self.verdicts())]
        return [f"{self.title} ({self.kind})", *rows, *(f"  {note}" for note in self.notes), ""]

    def markdown(self, name: str, command: str, picture: str | None) -> list[str]:
        """Return the lines of its section of a page."""
        head = [f"## {name}: {self.title}", "", f"{self.kind.capitalize()}. `{command}`", *self.notes, ""]
        drawn = [f"![{name}]({picture})", ""] if picture else []
        return [*head, *_pipes(self.verdicts()), "", *drawn, *_pipes(self.texts()), ""]


class Found(NamedTuple):
    """What a table's function found: rows, ours of each claim, and what only it can say or draw."""

    rows: list[tuple]
    ours: Iterable[Any]  # a number or several each
    notes: tuple[str, ...] = ()
    draw: Draw | None = None


class Tables(dict[str, Callable[[Inputs], Table]]):
    """A paper's tables: what computes each, by its name on the command line.

    Args:
      paper: whose PAPER.toml says of each table what this file's head has; it is kept as `texts`.
      kind, experiments: of all tables that say nothing else; experiments: by cause the change of it.
      remarks: what is noted last in all tables, of their inputs.
    """

    def __init__(self, paper: str, kind: str, experiments: Mapping[str, Any], remarks: Remarks = lambda inputs: ()):
        super().__init__()
        text = pathlib.Path(__file__).with_name(f"{paper}.toml").read_text(encoding="utf-8")
        self.texts: dict[str, dict] = tomllib.loads(text)
        self.kind, self.experiments, self.remarks = kind, experiments, remarks

    def add(self, draw: Draw | None = None, experiments: Mapping[str, Any] | None = None) -> Callable:
        """Take a function (inputs, change) -> `Found` for the table of its name; by default nothing is changed.

        Args:
          draw: where the function returns none; experiments: where they are not those of all.
        """

        def register(find):
            changes = self.experiments if experiments is None else experiments
            self[find.__name__] = functools.partial(self._compute, find, draw, changes)
            return find

        return register

    def _compute(self, find: Callable, draw: Draw | None, changes: Mapping[str, Any], inputs: Inputs) -> Table:
        """Return the table of a function at each level of prices; changes are tried where a claim is not explained."""
        text = self.texts[find.__name__]
        kind = text.get("kind", self.kind)
        levels = LEVELS[:1] if kind == "measured" else LEVELS
        by_level = {level: find(dataclasses.replace(inputs, level=level)) for level in levels}
        middle = by_level[LEVELS[0]]
        claims = judged(text["claims"], [[*map(figures, of.ours)] for of in by_level.values()])
        if any(claim.verdict == UNEXPLAINED for claim in claims):
            tried = {cause: [*map(figures, find(inputs, change).ours)] for cause, change in changes.items()}
            claims = explained(claims, tried)
        notes = (*text.get("notes", ()), *middle.notes, *self.remarks(inputs))
        rows = {level: each.rows for level, each in by_level.items()}
        return Table(text["title"], kind, tuple(text["columns"]), rows, claims, notes, middle.draw or draw)


def judged(paper: Mapping[str, Any], by_level: Sequence[Sequence[Figures]]) -> tuple[Claim, ...]:
    """Return a table's claims; `by_level`: ours of each claim, at each of `LEVELS`."""
    claims = []
    for (name, stated), ours in zip(paper.items(), zip(*by_level, strict=True), strict=True):
        if isinstance(stated, str):
            stated = tuple(map(float, stated.split(" to "))) if stated != "-" else None
        paper_figures = None if stated is None else figures(stated)
        claims.append(Claim(name, paper_figures, ours[0], isinstance(stated, list), ours))
    return tuple(claims)


def explained(claims: Sequence[Claim], tried: Mapping[str, Sequence[Figures]]) -> tuple[Claim, ...]:
    """Return claims with those experiments, {cause: ours of each claim}, that take no other claim out of its fifth."""
    kept = {
        cause: then
        for cause, then in tried.items()
        if all(claim.fits(ours) for claim, ours in zip(claims, then, strict=True) if claim.fits(claim.ours))
    }
    return tuple(
        dataclasses.replace(claim, experiments={cause: then[at] for cause, then in kept.items()})
        for at, claim in enumerate(claims)
    )


def counted(tables: Iterable[Table]) -> str:
    """Return how many rows of a paper have which verdict, and what counts as a row."""
    claims, said = [claim for table in tables for claim in table.claims], []
    for what, beside in (("rows", False), ("numbers beside", True)):
        verdicts = [claim.verdict for claim in claims if claim.name.endswith("(beside)") == beside]
        kinds = (WITHIN, EXPLAINED, UNEXPLAINED, NO_NUMBER)
        counts = ", ".join(
            f"{sum(verdict.startswith(kind) for verdict in verdicts)} {kind.split(' by')[0]}" for kind in kinds
        )
        said.append(f"{len(verdicts)} {what}: {counts}.")
    return " ".join((*said, "A row is a claim; cells of one table are one, and stand beside ours in it."))


def text_of(cell: Any) -> str:
    """Return a cell as text: numbers to three digits, from a thousand on all before the point."""
    return str(cell) if not isinstance(cell, float) else f"{cell:.0f}" if 1e3 <= abs(cell) < 1e7 else f"{cell:.3g}"


def aligned(rows: list[tuple]) -> list[str]:
    """Return rows as lines whose columns stand below each other."""
    texts = [[text_of(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return ["  " + "  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in texts]


def _pipes(rows: list[tuple]) -> list[str]:
    head, *rest = (f"| {' | '.join(text_of(cell).replace('|', '/') for cell in row)} |" for row in rows)
    return [head, "|" + "---|" * len(rows[0]), *rest]


def range_of(values: Figures | None) -> str:
    """Return a number, 'least to largest', or '-' as text."""
    return "-" if values is None else " to ".join(dict.fromkeys(text_of(end) for end in (min(values), max(values))))


def with_span(text: str, levels: Sequence[Any]) -> str:
    """Return a figure's text with its range over the levels of prices, where they differ in it."""
    span = text if any(isinstance(level, str) for level in levels) else range_of(sum(map(figures, levels), ()))
    return text if span == text else f"{text} ({span})"


# how a table's figure is drawn: each returns what `Table.draw` takes


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
        for label, points in series.items():
            how = {"linestyle": ":", "color": axes.lines[-1].get_color()} if "baseline" in label else {}
            axes.plot(*zip(*points, strict=True), marker=".", label=label, **how)
        axes.set(**settings)
        axes.legend(fontsize=7)

    return draw
