"""A schedule in three steps, so that something else can be placed beside the experts of its first pass.

Enters: two functions. Leaves: a `Schedule` that calls them one after the other, and that shows them to whoever wants to
stand between. Schedules whose experts run in many pieces (`pairwise`, `ring`) are not cut like this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from moe_jax.dispatch.route import record


@record
class Sent:
    """What stands between sending and finishing.

    Attributes:
      rows: float [R, M], rows of pass 0 in group order, on the device of their experts.
      group_sizes: int32 [G].
      context: pytree of arrays that the way home needs.
    """

    rows: jax.Array
    group_sizes: jax.Array
    context: Any


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
