"""A table of a paper beside ours: rows of figures, and claims, each with the paper's number, ours, and a verdict.

A verdict is never chosen: it follows from the numbers.

    within a fifth      ours lies in the paper's range, widened by a fifth at both ends
    explained by        an experiment that changes one named cause closes at least half of the gap
    unexplained         neither
    no number           the paper's text has none
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsTrace
from moe_jax.papers.loads import find_loads

FIFTH = 1.2
WITHIN, UNEXPLAINED, NO_NUMBER = "within a fifth", "unexplained", "no number in the text"


class MissingResults(UserError):
    """A table of measured runs whose results are not there yet: left out, where it is not asked for by name."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a table is computed from.

    Attributes:
      trace: name or path of expert loads for all rows; None: the shipped ones of each row's K.
      track: yields what it is given, next to a progress bar with a label.
    """

    trace: str | None
    track: Callable[[Iterable, str], Iterable]

    def loads(self, top_k: int) -> LoadsTrace:
        """Return the loads of rows with this K."""
        return find_loads(self.trace or f"top_{top_k}")


@dataclasses.dataclass(frozen=True)
class Claim:
    """One number that a paper's text states, or a range of them, and ours.

    An experiment changes one cause of a difference, to a value that has a source or was measured, and nothing else.
    """

    name: str
    paper: tuple[float, float] | None  # least and largest; None where the text has no number
    ours: tuple[float, float]
    experiments: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)  # by cause ours then

    def gap(self, ours: tuple[float, float]) -> float:
        """Return how far figures are from the paper's: the larger |log of the ratio| of both ends; infinite by sign."""
        assert self.paper is not None
        ratios = [own / its for own, its in zip(ours, self.paper, strict=True)]
        return max(abs(math.log(ratio)) for ratio in ratios) if min(ratios) > 0 else math.inf

    @property
    def verdict(self) -> str:
        """What the numbers say, in the words of this file's head."""
        if self.paper is None:
            return NO_NUMBER
        gap = self.gap(self.ours)
        if gap <= math.log(FIFTH):
            return WITHIN
        least, cause = min(((self.gap(then), cause) for cause, then in self.experiments.items()), default=(gap, ""))
        if not math.isfinite(least) or least > gap / 2:
            return UNEXPLAINED
        return f"explained by {cause}: {range_of(self.experiments[cause])}"


def ends(values: Any) -> tuple[float, float] | None:
    """Return the least and the largest of a number or of several; None stays None."""
    return None if values is None else (float(np.min(values)), float(np.max(values)))


Draw = Callable[["Table", Any], None]


@dataclasses.dataclass(frozen=True)
class Table:
    """One table or figure of a paper.

    Attributes:
      title: what it shows, and its number in the paper; kind: 'modelled', 'simulated' or 'measured'.
      columns, rows: text and numbers; numbers are printed to three digits.
      claims: at least one.
      notes: which loads, machine and rules; one sentence each.
      draw: draws the figure as the paper does, called with the table and matplotlib's axes; None: no figure.
    """

    title: str
    kind: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    claims: tuple[Claim, ...]
    notes: tuple[str, ...] = ()
    draw: Draw | None = None

    def verdicts(self) -> list[tuple[str, ...]]:
        """Return the claims as rows, the first one their head."""
        head = ("claim", "paper", "ours", "verdict")
        return [head, *((own.name, range_of(own.paper), range_of(own.ours), own.verdict) for own in self.claims)]

    def lines(self) -> list[str]:
        """Return the table as aligned lines for a terminal, with claims and notes."""
        rows = [*aligned([self.columns, *self.rows]), "", *aligned(self.verdicts())]
        return [f"{self.title} ({self.kind})", *rows, *(f"  {note}" for note in self.notes), ""]

    def markdown(self, name: str, command: str, picture: str | None) -> list[str]:
        """Return the lines of its section of a page."""
        head = [f"## {name}: {self.title}", "", f"{self.kind.capitalize()}. `{command}`", *self.notes, ""]
        drawn = [f"![{name}]({picture})", ""] if picture else []
        return [*head, *_pipes(self.verdicts()), "", *drawn, *_pipes([self.columns, *self.rows]), ""]


class Found(NamedTuple):
    """What a table's function found: rows, ours of each claim, and what only it can say or draw."""

    rows: list[tuple]
    ours: Iterable[Any]  # a number or several each
    notes: tuple[str, ...] = ()
    draw: Draw | None = None


class Tables(dict[str, Callable[[Inputs], Table]]):
    """A paper's tables: what computes each, by its name on the command line.

    Args:
      kind, experiments: of all tables that say nothing else; experiments: by cause the change of it.
      remarks: what is noted last, of a table's function, inputs and names of claims.
    """

    def __init__(self, kind: str, experiments: Mapping[str, Any], remarks: Callable[..., Iterable[str]] | None = None):
        super().__init__()
        self.kind, self.experiments, self.remarks = kind, experiments, remarks

    def add(
        self, title: str, columns: tuple, paper: Mapping[str, Any], draw=None, notes=(), kind="", experiments=None
    ) -> Callable:
        """Take a function (inputs, change) -> `Found` for a table of its name; by default of change nothing is changed.

        Args:
          paper: by the name of a claim the paper's number, several, or None.
          kind, experiments: where they are not those of all.
        """

        def register(find):
            def table(inputs: Inputs) -> Table:
                found = find(inputs)
                changes = self.experiments if experiments is None else experiments
                claims = judged(paper, found.ours, lambda change: find(inputs, change).ours, changes)
                said = (*notes, *found.notes, *(self.remarks(find, inputs, paper) if self.remarks else ()))
                return Table(title, kind or self.kind, columns, found.rows, claims, said, found.draw or draw)

            self[find.__name__] = table
            return find

        return register


def judged(
    paper: Mapping[str, Any], ours: Iterable[Any], under: Callable[..., Iterable[Any]], experiments: Mapping[str, Any]
) -> tuple[Claim, ...]:
    """Return a table's claims, with all experiments where one is unexplained; `under` a change: ours then."""
    claims = [Claim(name, ends(its), ends(own)) for (name, its), own in zip(paper.items(), ours, strict=True)]
    if all(claim.verdict != UNEXPLAINED for claim in claims):
        return tuple(claims)
    tried = {cause: [*map(ends, under(change))] for cause, change in experiments.items()}
    return tuple(
        dataclasses.replace(claim, experiments={cause: then[at] for cause, then in tried.items()})
        for at, claim in enumerate(claims)
    )


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


def range_of(ends: tuple[float, float] | None) -> str:
    """Return a number, 'least to largest', or '-' as text."""
    return "-" if ends is None else " to ".join(dict.fromkeys(text_of(float(end)) for end in ends))
