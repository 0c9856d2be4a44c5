"""The options of planning, checked on creation: one flat dataclass for gin.

It is made once, after every file of the package has declared its balancer: the package imports this one last.
"""

from __future__ import annotations

import dataclasses

from moe_jax.errors import UserError
from moe_jax.planning.balancer import BALANCERS, names
from moe_jax.planning.cost import FORMS, PRICES

PREDICTORS = ("last", "window", "exponential", "trend")
# of fields that are None where neither the user nor the planner says otherwise
DEFAULTS = {"interval": 1, "predictor": "last"}
VALUES = {
    "when": ("ahead", "after_gate"),
    "predictor": (None, *PREDICTORS),
    "transfer": FORMS,
    "price": PRICES,
    "split": ("auto", "plan", "even"),
}
# the smallest value, of whole numbers where it is one
LEAST = {"replica_slots": 0, "overlap_degree": 0, "interval": 1, "swap_after": 1, "window": 1, "horizon": 1,
         "executables": 2, "swap_seconds": 0.0, "bucket_limit": 1.0}  # fmt: skip
WORDS = {"replica_slots": "memory", "overlap_degree": "executor"}  # instead of a number

_KNOBS = {field: found for planner in reversed(BALANCERS.values()) for field, found in planner.knobs.items()}
_Knobs = dataclasses.make_dataclass(
    "_Knobs", [(field, *found) for field, found in _KNOBS.items()], frozen=True, kw_only=True
)
assert len(BALANCERS) > 1, "import moe_jax.planning first: its files declare what this one collects"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerConfig(_Knobs):  # pyright: ignore[reportGeneralTypeIssues]
    """Choose a planner: the options of all are here, the knobs of one in its file (`balancer.py` collects them).

    Attributes:
      name: of a balancer.
      when: `ahead`, on the host from predicted loads, or `after_gate`, from the step's own counts.
      replica_slots: mu, replicas that a device may hold in one layer; 'memory': as many as the memory of the cluster's
        devices leaves room for beside model, optimizer and activations.
      overlap_degree: tau, experts that may get replicas, as their transfer hides behind attention; None: by the formula
        of Hecate's section 4.2 from attention's time and the links' bandwidth; 'executor': by what the program sends.
      interval: plan every so many steps; None: the planner's own, else 1.
      swap_after: a new shape is swapped in exactly so many steps after it was proposed; None: once it is compiled.
      bounded: keep to the replica slots where the original has no such bound.
      price: of a plan: 'executor', what the program will do; or 'paper', by the papers' formulas and one bandwidth.
      predictor, window, decay: how the next step's loads are predicted (None: the planner's own, else 'last'), from how
        many steps, with which weight.
      horizon: steps over which a gain must pay for a change that costs (homes, shapes).
      swap_seconds: the cost of a new shape in that decision.
      cluster: file of the links and speeds that predictions use, such as 'configs/cluster/NAME.gin'; '' for none.
      split: which holder a token goes to: 'plan', as the planner says, near ones first; 'even', in the same proportions
        from every source: the plan's device loads stay, and a padded exchange has no fullest pair; or 'auto', the one
        whose exchange is predicted to take less time ('plan' after the gate).
      bucket_limit: rows of a planned bucket for another device over their mean, at most: such a bucket is as large as
        the fullest pair of its kind that is predicted (same node, other nodes), which under skewed loads can be all
        tokens of a device, for each destination. What does not fit takes another pass.
      transfer: how replicas get parameters: in slices over all devices ('flat'), over devices of a node and then nodes
        ('by_node'), or 'auto' for the cheaper one.
      executables: how many compiled steps are kept at most, the running one included.
    """

    name: str = "none"
    when: str = "ahead"
    replica_slots: int | str = 4
    overlap_degree: int | str | None = None
    interval: int | None = None
    swap_after: int | None = None
    bounded: bool = True
    price: str = "executor"
    predictor: str | None = None
    window: int = 5
    decay: float = 0.5
    horizon: int = 100
    swap_seconds: float = 0.0
    cluster: str = ""
    split: str = "auto"
    bucket_limit: float = 4.0
    transfer: str = "auto"
    executables: int = 4

    def __post_init__(self):
        if self.name not in BALANCERS:
            raise UserError(f"PlannerConfig.name ({self.name!r}) must be one of {', '.join(names())}")
        for field, values in VALUES.items():
            if getattr(self, field) not in values:
                self.refuse(field, f"must be one of {', '.join(filter(None, values))}")
        bounds = {field: found.metadata for field, (_, found) in _KNOBS.items()}
        bounds |= {field: {"least": least, "above": None} for field, least in LEAST.items()}
        for field, bound in bounds.items():
            value, default = getattr(self, field), type(self).__dataclass_fields__[field].default
            if value == default or value == WORDS.get(field):
                continue
            least, above = bound["least"], bound["above"]
            if isinstance(least, int):
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    words = f" or {WORDS[field]!r}" if field in WORDS else ""
                    self.refuse(field, f"must be a whole number of at least {least}{words}")
            elif least is not None and not value >= least:
                self.refuse(field, f"must be at least {least:g}; {default} is the default")
            elif above is not None and not value > above:
                self.refuse(field, f"must be above {above:g}; {default} is the default")
        if not 0 < self.decay <= 1:
            self.refuse("decay", "must lie in (0, 1], the weight of the newest step")
        planner = BALANCERS[self.name]
        if self.when == "after_gate" and not planner.after_gate:
            raise UserError(
                f"PlannerConfig.when = 'after_gate' works with {', '.join(names(after_gate=True))}, not with "
                f"{self.name!r}; use 'ahead'"
            )
        if self.split == "even" and self.decides_late:
            again = f" or {planner.decides_again} = True" if planner.decides_again else ""
            raise UserError(
                "PlannerConfig.split = 'even' splits tokens ahead of the gate, and this planner decides after it "
                f"(when = 'after_gate'{again}); use split = 'plan'"
            )

    def refuse(self, field: str, rule: str) -> None:
        """Raise a UserError that names a field, its value and the rule."""
        raise UserError(f"PlannerConfig.{field} ({getattr(self, field)!r}) {rule}")

    @property
    def decides_late(self) -> bool:
        """Whether the planner decides again from the step's own loads."""
        knob = BALANCERS[self.name].decides_again
        return self.when == "after_gate" or (knob is not None and bool(getattr(self.settled(), knob)))

    def settled(self) -> PlannerConfig:
        """Return the same, each field that was left at None at the planner's own default."""
        own = {**DEFAULTS, **BALANCERS[self.name].defaults}
        blank = {name: value for name, value in own.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **blank) if blank else self


# A knob must not have the name of an option: one would replace the other.
assert not _KNOBS.keys() & vars(PlannerConfig)["__annotations__"].keys()
