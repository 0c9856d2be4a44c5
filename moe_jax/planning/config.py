"""What planners have in common; what one planner alone reads are its own options, in its file."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from moe_jax.errors import UserError, check_bounds, check_choices
from moe_jax.planning.cost import FORMS, PRICES
from moe_jax.registry import PLANNERS, options_in, replaced

PREDICTORS = ("last", "window")
# of fields that are None where neither the user nor the planner says otherwise
DEFAULTS = {"interval": 1, "predictor": "last"}
CHOICES = {
    "when": ("ahead", "after_gate"),
    "price": PRICES,
    "predictor": (None, *PREDICTORS),
    "split": ("auto", "plan", "even"),
    "transfer": FORMS,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """Choose a planner, and when and within which bounds it plans.

    Attributes:
      name: of a planner, a file of `moe_jax/planning/`.
      when: `ahead`, on the host from predicted loads, or `after_gate`, from the step's own counts.
      replica_slots: mu, replicas that a device may hold in one layer; 'memory': as many as the memory of the cluster's
        devices leaves room for besides model, optimizer and activations.
      interval: plan every so many steps; None: the planner's own, else 1.
      swap_after: a new shape is swapped in so many steps after the one that it was proposed in; None: once compiled.
      must_pay: run replicas only where layers with their transfers are predicted to take less time (price 'executor').
      bounded: keep to the replica slots where the original has no such bound.
      price: of a plan: 'executor', what the program will do; or 'paper', by the papers' formulas and one bandwidth.
      predictor, window: the next step's loads are those of the newest one ('last') or the mean of so many ('window');
        None: the planner's own way, else 'last'.
      cluster: file of the links and speeds that predictions use, such as 'configs/cluster/NAME.gin'; '' for none.
      split: which holder a token goes to: 'plan', as the planner says, near ones first; 'even', in the same proportions
        from every source: the plan's device loads stay, and a padded exchange has no fullest pair; or 'auto', the one
        whose exchange is predicted to take less time ('plan' after the gate).
      transfer: how replicas get parameters: in slices over all devices ('flat'), over devices of a node and then nodes
        ('by_node'), or 'auto' for the cheaper one.
      options: of planners, those that are not the defaults; gin binds them by their own names (`registry.py`).
    """

    name: str = "none"
    when: str = "ahead"
    replica_slots: int | str = 4
    interval: int | None = None
    swap_after: int | None = None
    must_pay: bool = True
    bounded: bool = True
    price: str = "executor"
    predictor: str | None = None
    window: int = 5
    cluster: str = ""
    split: str = "auto"
    transfer: str = "auto"
    options: tuple[Any, ...] = ()

    def __post_init__(self):
        planner = PLANNERS.find(self.name)
        check_choices(self, CHOICES)
        check_bounds(self, {"replica_slots": 0, "interval": 1, "swap_after": 1, "window": 1})
        if isinstance(self.replica_slots, str) and self.replica_slots != "memory":
            raise UserError(
                f"PlannerConfig.replica_slots ({self.replica_slots!r}) must be a whole number of at least 0 or 'memory'"
            )
        if self.when == "after_gate" and not planner.after_gate:
            able = ", ".join(sorted(name for name, own in PLANNERS.items() if own.after_gate))
            raise UserError(f"PlannerConfig.when = 'after_gate' works with {able}, not with {self.name!r}; use 'ahead'")
        if self.split == "even" and self.decides_late:
            raise UserError(
                f"PlannerConfig.split = 'even' splits tokens ahead of the gate, and {self.name!r} decides after it as "
                "it is configured; use split = 'plan'"
            )

    @functools.cached_property
    def decides_late(self) -> bool:
        """Whether the planner decides again from the step's own loads."""
        planner = PLANNERS[self.name]
        own = options_in(self, planner.options)
        return self.when == "after_gate" or bool(planner.late_option and getattr(own, planner.late_option))

    def ahead_only(self, name: str, replica_slots: int) -> PlannerConfig:
        """Return the same for a planner of this name and so many slots, which decides nothing after the gate."""
        planner, options = PLANNERS[name], self.options
        if planner.late_option:
            own = dataclasses.replace(options_in(self, planner.options), **{planner.late_option: False})
            options = replaced(options, own)
        return dataclasses.replace(self, name=name, when="ahead", options=options, replica_slots=replica_slots)
