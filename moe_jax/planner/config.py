"""The options of planning, checked on creation: those of every planner, and the knobs that planners' files declare.

Inputs: the balancers in `registry.py`. Outputs: `PlannerConfig`, one flat dataclass for gin. It is made once, after
every file of the package has declared its balancer: the package imports this one last.
"""

from __future__ import annotations

import dataclasses

from moe_jax.errors import UserError
from moe_jax.planner import registry
from moe_jax.planner.options import DEFAULTS, PlannerOptions

_KNOBS = tuple(dict.fromkeys(declared.knobs for declared in registry.BALANCERS.values() if declared.knobs is not None))
assert "none" in registry.BALANCERS, "import moe_jax.planner first: its files declare what this one collects"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerConfig(*_KNOBS, PlannerOptions):  # pyright: ignore[reportGeneralTypeIssues]
    """Choose a planner and its knobs: see `PlannerOptions` for those of all, and each planner's file for its own."""

    def __post_init__(self):
        found = registry.find(self.name)
        if found is None:
            raise UserError(f"PlannerConfig.name ({self.name!r}) must be one of {', '.join(registry.names())}")
        super().__post_init__()
        for knobs in _KNOBS:
            if "check" in vars(knobs):
                knobs.check(self)
        if self.when == "after_gate" and not found.after_gate:
            raise UserError(
                f"PlannerConfig.when = 'after_gate' works with {', '.join(registry.names_after_gate())}, not with "
                f"{self.name!r}; use 'ahead'"
            )
        if self.split == "even" and self.decides_late:
            raise UserError(
                "PlannerConfig.split = 'even' splits tokens ahead of the gate, and this planner decides after it "
                f"({found.planner.late_by}); use split = 'plan'"
            )

    @property
    def decides_late(self) -> bool:
        """Whether the planner decides again from the step's own loads."""
        return registry.find(self.name).planner.decides_late(self.settled())

    @property
    def steps_between_plans(self) -> int:
        """The interval, or the planner's own where none is given."""
        return self.settled().interval

    def settled(self) -> PlannerConfig:
        """Return the same, its alias spelled out, each field that was left at None at the planner's own default."""
        found = registry.find(self.name)
        own = {**DEFAULTS, **found.defaults}
        blank = {name: value for name, value in own.items() if getattr(self, name) is None}
        if not blank and self.name == found.name:
            return self
        return dataclasses.replace(self, name=found.name, **blank)
