"""The options of planning, checked on creation: one flat dataclass for gin.

It is made once, after every file of the package has declared its balancer: the package imports this one last.
"""

from __future__ import annotations

import dataclasses

from moe_jax.errors import UserError
from moe_jax.planning.balancer import BALANCERS, knob, names
from moe_jax.planning.cost import FORMS, PRICES

PREDICTORS = ("last", "window")
# of fields that are None where neither the user nor the planner says otherwise
DEFAULTS = {"interval": 1, "predictor": "last"}

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
        devices leaves room for besides model, optimizer and activations.
      overlap_degree: tau, experts that may get replicas; None: of 0, 1, 2, 4, .. that which gives layers the least
        predicted time; 'paper': those whose transfer hides behind attention, by the formula of Hecate's section 4.2.
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
    """

    name: str = "none"
    when: str = knob("ahead", values=("ahead", "after_gate"))
    replica_slots: int | str = knob(4, least=0, word="memory")
    overlap_degree: int | str | None = knob(None, least=0, word="paper")
    interval: int | None = knob(None, least=1)
    swap_after: int | None = knob(None, least=1)
    must_pay: bool = True
    bounded: bool = True
    price: str = knob("executor", values=tuple(PRICES))
    predictor: str | None = knob(None, values=(None, *PREDICTORS))
    window: int = knob(5, least=1)
    cluster: str = ""
    split: str = knob("auto", values=("auto", "plan", "even"))
    transfer: str = knob("auto", values=FORMS)

    def __post_init__(self):
        if self.name not in BALANCERS:
            raise UserError(
                f"PlannerConfig.name ({self.name!r}) must be one of {', '.join(names())}, or "
                "name the --plugin that has it"
            )
        for field in dataclasses.fields(self):
            value, default, bound = getattr(self, field.name), field.default, field.metadata
            if not bound or value == default or value == bound["word"]:
                continue
            least, above, values, word = (bound[name] for name in ("least", "above", "values", "word"))
            if values and value not in values:
                self.refuse(field.name, f"must be one of {', '.join(filter(None, values))}")
            elif isinstance(least, int):
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    self.refuse(
                        field.name, f"must be a whole number of at least {least}{f' or {word!r}' if word else ''}"
                    )
            elif least is not None and not value >= least:
                self.refuse(field.name, f"must be at least {least:g}; {default} is the default")
            elif above is not None and not value > above:
                self.refuse(field.name, f"must be above {above:g}; {default} is the default")
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

    def check_knobs(self) -> None:
        """Raise a UserError for a knob that was set and that only other planners read.

        'auto' reads those of all, and 'none' switches planning off, whatever is set.
        """
        for field in _KNOBS.keys() - BALANCERS[self.name].knobs.keys() if self.name not in ("auto", "none") else ():
            if getattr(self, field) != _KNOBS[field][1].default:
                readers = [planner.name for planner in BALANCERS.values() if field in planner.knobs]
                self.refuse(field, f"is read by {', '.join(readers)}, not by {self.name!r}; leave it out, or choose it")

    def settled(self) -> PlannerConfig:
        """Return the same, each field that was left at None at the planner's own default."""
        own = {**DEFAULTS, **BALANCERS[self.name].defaults}
        blank = {name: value for name, value in own.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **blank) if blank else self


# A knob must not have the name of an option: one would replace the other.
assert not _KNOBS.keys() & vars(PlannerConfig)["__annotations__"].keys()
