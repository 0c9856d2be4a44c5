"""The transfers that a run of these plans would be compiled for, and what they send.

Inputs: plans, sample by sample. Outputs: `Transfers`: what the busiest device sends under the shape in force, under the
smallest shape of each plan, and under each layer's own; how long it takes; how often the shape changes. The shape grows
as a run's does (`placement.grow`). Units: one expert's bytes.

Letters: docs/notation.md; n samples; X offers, m slots, Cp crossing.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.cluster import AbsentFigureError
from moe_jax.parallel.transfer_shape import TransferShape, sent_by_collective
from moe_jax.planning.cost import Cost, forms_of
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import build_shape, fits, grow
from moe_jax.planning.sizes import SIZES, TransferSizes, late_size, placement_sizes, transfer_sizes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """Hold what the transfers of a replay send and take.

    Attributes:
      form: of the transfer ahead that is in force in the end, 'flat' or 'by_node'.
      needed: sizes that each layer's replicas ahead need, [n, L].
      in_force: {form: experts sent inside and across nodes under the shape in force, [n, 2]}, for both forms.
      least: the same under the smallest shape of each plan, in the form that runs, [n, 2]; own: under the sizes of
        each layer alone, [n, L, 2].
      late: experts sent after the gate, [n, L, 2].
      seconds: of one Trans ahead, [n]; late_seconds: of one after the gate, [n, L]. NaN where a figure is absent.
      changed: places in n at which a plan did not fit the compiled sizes.
    """

    form: str
    needed: TransferSizes
    in_force: dict[str, np.ndarray]
    least: np.ndarray
    own: np.ndarray
    late: np.ndarray
    seconds: np.ndarray
    late_seconds: np.ndarray
    changed: tuple[int, ...]


class TransferLog:
    """Follow the shape in force through a replay."""

    def __init__(
        self, start: Placement, cost: Cost, late: TransferShape | None = None, most: TransferSizes | None = None
    ):
        """Start with even homes.

        Args:
          late: the largest transfer after the gate, None where it may be any.
          most: the largest that the planner ever needs ahead, None where that is not known.
        """
        self.most = most
        self.cost, self.forms = cost, forms_of("auto", start.devices, start.devices_per_node)
        self.form: str | None = None
        self.shapes = dict.fromkeys(self.forms, build_shape(start))
        self.late, self.bounded = late, late is not None
        self.changed: list[int] = []
        self.rows: list[tuple] = []

    def take(self, ahead: Placement, plan: Placement) -> None:
        """Add one sample: the plan ahead, and what the step made of it after the gate."""
        need = build_shape(ahead, by_node=len(self.forms) > 1).ahead
        if self.form is None and need is not None:
            self.form = self._cheaper(need)
        form = self.form or "flat"
        if self.rows and not fits(self.shapes[form], ahead):
            self.changed.append(len(self.rows))
        for name, shape in self.shapes.items():
            if not fits(shape, ahead):
                room = {"replica_slots": self.cost.replica_slots, "most": self.most}
                self.shapes[name] = grow(shape, ahead, by_node=name == "by_node", **room)
        least = build_shape(ahead, by_node=form == "by_node").ahead
        sizes = placement_sizes(ahead)
        group = {"devices": ahead.devices, "devices_per_node": ahead.devices_per_node}
        parts = sent_by_collective(*sizes[:3], **group, by_node=form == "by_node")
        inside, across = (sum(np.asarray(part[at], float) for part in parts) for at in (0, 1))
        own = np.stack(np.broadcast_arrays(inside, across), axis=-1)  # by each layer
        shapes = [shape.ahead for shape in self.shapes.values()]
        *in_force, least = [(0.0, 0.0) if shape is None else tuple(shape.sent()) for shape in (*shapes, least)]
        seconds = self._seconds(self.shapes[form].ahead)
        self.rows.append((sizes, in_force, least, own, *self._after_gate(ahead, plan), seconds))

    def result(self) -> Transfers:
        """Return all samples so far."""
        sizes, in_force, least, own, late, late_seconds, seconds = zip(*self.rows, strict=True)
        stacked = np.array(in_force)
        return Transfers(
            form=self.form or "flat",
            needed=TransferSizes(*(np.stack(column) for column in zip(*sizes, strict=True))),
            in_force={form: stacked[:, at] for at, form in enumerate(self.forms)},
            least=np.array(least),
            own=np.stack(own),
            late=np.stack(late),
            seconds=np.array(seconds),
            late_seconds=np.stack(late_seconds),
            changed=tuple(self.changed),
        )

    def _cheaper(self, need: TransferShape) -> str:
        if self.cost.transfer != "auto" and len(self.forms) > 1:
            return self.cost.transfer
        return self.cost.cheapest_form(need) or "flat"

    def _seconds(self, shape: TransferShape | None) -> float:
        try:
            return 0.0 if shape is None else self.cost.shape_seconds(shape, "replay")
        except AbsentFigureError:
            return float("nan")

    def _after_gate(self, ahead: Placement, plan: Placement) -> tuple[np.ndarray, np.ndarray]:
        """Return experts sent [L, 2] and seconds [L] of what came late: the smallest half of the largest that holds it.

        Where nothing bounds it, the largest holds all that came so far, in the cheaper form.
        """
        sent, seconds = np.zeros((plan.layers, 2)), np.zeros(plan.layers)
        if len(plan.replicas) == len(ahead.replicas):
            return sent, seconds
        added, late = plan.holds & ~ahead.holds, self.late
        if not self.bounded:
            sizes = transfer_sizes(plan.home, added, plan.devices_per_node)
            late = sizes.shape(plan.devices, plan.devices_per_node, len(self.forms) > 1)
            if self.late is not None:
                most = {name: max(getattr(late, name), getattr(self.late, name)) for name in SIZES}
                late = dataclasses.replace(late, **most)
            self.late = late
            if self._cheaper(late) != "by_node":
                late = dataclasses.replace(late, by_node=False, crossing=0)
        size_of_layer = late_size(transfer_sizes(plan.home, added, late.inside), late)
        for number, size in enumerate(late.halves(), 1):
            sent[size_of_layer == number] = size.sent()
            seconds[size_of_layer == number] = self._seconds(size)
        return sent, seconds
