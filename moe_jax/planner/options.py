"""The options of planning that every planner reads; `PlannerConfig` adds the knobs that planners' files declare."""

from __future__ import annotations

import dataclasses

from moe_jax.errors import UserError

TRANSFERS = ("auto", "flat", "by_node")
FORMER_TRANSFERS = ("shift", "permute", "gather", "broadcast")
PREDICTORS = ("last", "window", "exponential", "trend")
# of fields that are None where neither the user nor the planner says otherwise
DEFAULTS = {"interval": 1, "predictor": "last"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """What all planners have in common.

    Attributes:
      name: of a balancer.
      when: `ahead`, on the host from predicted loads, or `after_gate`, from the step's own counts.
      replica_slots: mu, replicas that a device may hold in one layer; 'memory': as many as the memory of the cluster's
        devices leaves room for beside model, optimizer and activations.
      overlap_degree: tau, experts whose transfer hides behind attention; None: from the cluster and attention's time.
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
        whose exchange is predicted to take less time ('plan' after the gate, and where rows are not padded).
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
    overlap_degree: int | None = None
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
        self.one_of("when", ("ahead", "after_gate"))
        if self.predictor is not None:
            self.one_of("predictor", PREDICTORS)
        if self.transfer in FORMER_TRANSFERS:
            raise UserError(
                f"PlannerConfig.transfer ({self.transfer!r}) was replaced: replicas travel in slices; use 'auto', "
                "'flat' or 'by_node'"
            )
        self.one_of("transfer", TRANSFERS)
        self.one_of("price", ("executor", "paper"))
        self.one_of("split", ("auto", "plan", "even"))
        if self.replica_slots != "memory":
            self.whole("replica_slots", 0)
        for field, least in (
            ("window", 1),
            ("executables", 2),
            ("horizon", 1),
        ):
            self.whole(field, least)
        for field, least in (("overlap_degree", 0), ("interval", 1), ("swap_after", 1)):
            if getattr(self, field) is not None:
                self.whole(field, least)
        if self.swap_seconds < 0:
            raise UserError(f"PlannerConfig.swap_seconds ({self.swap_seconds}) must be at least 0")
        if not self.bucket_limit >= 1:
            raise UserError(
                f"PlannerConfig.bucket_limit ({self.bucket_limit}) must be at least 1, the mean; 4.0 is the default"
            )
        if not 0 < self.decay <= 1:
            raise UserError(f"PlannerConfig.decay ({self.decay}) must lie in (0, 1], the weight of the newest step")

    def settled(self) -> PlannerOptions:
        """Return the same with every default filled in; `PlannerConfig` knows those of planners."""
        raise NotImplementedError

    def one_of(self, field: str, known: tuple[str, ...]) -> None:
        """Refuse a field whose value is not among those known."""
        if getattr(self, field) not in known:
            raise UserError(f"PlannerConfig.{field} ({getattr(self, field)!r}) must be one of {', '.join(known)}")

    def whole(self, field: str, least: int) -> None:
        """Refuse a field that is no whole number of at least `least`."""
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"PlannerConfig.{field} ({value!r}) must be a whole number of at least {least}")
