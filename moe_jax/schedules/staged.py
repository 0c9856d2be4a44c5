"""A schedule in three steps, so that something else can be placed beside the experts of its first pass.

Inputs: two functions. Outputs: a `Schedule` that calls them one after the other, and holds them for a caller that runs
something between. Schedules whose experts stand amid their communication (`pairwise`, `ring`) are not cut like this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from moe_jax.dispatch.route import record
from moe_jax.schedules.passes import add_later_passes


@record
class Sent:
    """The state between sending and finishing.

    Attributes:
      rows: float [R, M], rows of pass 0 in group order, on the device of their experts.
      group_sizes: int32 [G].
      context: pytree of arrays that the return of the rows needs.
    """

    rows: jax.Array
    group_sizes: jax.Array
    context: Any


def finish_passes(done, context, experts, deliver, bring_home, most: int):
    """Return the rows of pass 0 to their sources and run the later passes.

    Args:
      done: float [R, M], the experts' output of pass 0.
      context: (weights [t, K], way, later): `way` is what `deliver` returned for pass 0, `later` is None where one pass
        is enough, else (tokens [t, M], routing, passes needed, gate statistics).
      experts: (rows, group_sizes) -> rows.
      deliver: (tokens, routing, index) -> (rows, group_sizes, way).
      bring_home: (done, weights, way) -> [t, M].
      most: static bound on the passes.

    Returns:
      [t, M], the sum of all passes.
    """
    weights, way, later = context
    y = bring_home(done, weights, way)
    if later is None:
        return y
    tokens, routing, needed, stats = later

    def one_pass(index):
        rows, group_sizes, way = deliver(tokens, routing, index)
        with jax.named_scope("experts"):
            done = experts(rows, group_sizes)
        return bring_home(done, weights, way)

    return add_later_passes(y, one_pass, needed, most, before=stats)


@dataclasses.dataclass(frozen=True)
class StagedSchedule:
    """A schedule cut before and after the experts of pass 0.

    Attributes:
      send: (x [t, M], token_ids [t], gate, place) -> (Sent, GateStats, passes), with place(stats) -> tables.
      finish: (done [R, M], context, experts) -> y [t, M]; it runs the later passes, and calls `experts` for them.
    """

    send: Callable
    finish: Callable

    def __call__(self, x, token_ids, gate, placed):
        experts = None

        def place(stats):
            nonlocal experts
            experts, tables = placed(stats)
            return tables

        sent, stats, passes = self.send(x, token_ids, gate, place)
        with jax.named_scope("experts"):
            done = experts(sent.rows, sent.group_sizes)
        return self.finish(done, sent.context, experts), stats, passes
