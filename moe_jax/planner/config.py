"""The options of planning, checked on creation."""

from __future__ import annotations

import dataclasses

from moe_jax.errors import UserError

NAMES = (
    "none",
    "fastermoe",
    "fastermoe_residual",
    "pro_prophet",
    "hecate",
    "smartmoe",
    "flexmoe",
    "eplb",
    "topk_all",
    "balanced",
)
AFTER_GATE = ("fastermoe", "fastermoe_residual", "hecate", "balanced")
TRANSFERS = ("auto", "shift", "permute", "gather", "broadcast")
PREDICTORS = ("last", "window", "exponential", "trend")
DEFAULT_INTERVAL = {"smartmoe": 25, "eplb": 10}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """Choose a planner and its knobs.

    Attributes:
      name: one of `NAMES`.
      when: `ahead`, on the host from predicted loads, or `after_gate`, from the step's own counts.
      replica_slots: mu, replicas that a device may hold in one layer.
      overlap_degree: tau, experts whose transfer hides behind attention; None: from the cluster and attention's time.
      interval: plan every so many steps; None: 25 for smartmoe, 10 for eplb, else 1.
      materialize, shard_every, calibrate: Hecate's parts: replicas on or off, steps between reshards (0: never), and
        the second decision, from the step's own counts.
      swap_after: a new skeleton is swapped in exactly so many steps after it was proposed; None: once it is compiled.
      skipped_devices, balance_threshold: Pro-Prophet's n, devices left out per expert (or 'search'), and its alpha.
        Loads whose spread is below this part of the mean are even.
      scheduler: cost model of Pro-Prophet with its scheduler (transfers hide behind computation).
      top_k: experts that topk_all replicates on every device.
      bounded: keep to the replica slots where the original has no such bound (fastermoe, pro_prophet, topk_all).
      groups: expert groups of eplb; more than one packs them node by node when nodes divide them.
      headroom: after the gate, replicas per device on average that balanced keeps so that shares can follow the counts.
      predictor, window, decay: how the next step's loads are predicted, from how many steps, with which weight.
      horizon: steps over which a gain must pay for a change that costs (homes, skeletons).
      swap_seconds: the cost of a new skeleton in that decision.
      cluster: file of the links and speeds that predictions use, such as 'configs/cluster/NAME.gin'; '' for none.
      split: which holder a token goes to: 'plan', as the planner says, near ones first; or 'even', in the same
        proportions from every source: the plan's device loads stay, and buckets of a padded exchange may be small.
      bucket_limit: rows of a planned bucket over their mean, at most: a bucket is as large as the fullest pair that is
        predicted, which under skewed loads and near holders can be all tokens of a device, for each of D destinations.
        What does not fit takes another pass.
      transfer: how replicas get parameters: 'shift', 'permute', 'gather', 'broadcast', or 'auto' for the fewest bytes.
      executables: how many compiled steps are kept at most, the running one included.
    """

    name: str = "none"
    when: str = "ahead"
    replica_slots: int = 4
    overlap_degree: int | None = None
    interval: int | None = None
    materialize: bool = True
    shard_every: int = 0
    calibrate: bool = False
    swap_after: int | None = None
    skipped_devices: int | str = 0
    balance_threshold: float = 0.5
    scheduler: bool = True
    top_k: int = 2
    bounded: bool = True
    groups: int = 1
    headroom: float = 2.0
    predictor: str = "last"
    window: int = 5
    decay: float = 0.5
    horizon: int = 100
    swap_seconds: float = 0.0
    cluster: str = ""
    split: str = "plan"
    bucket_limit: float = 4.0
    transfer: str = "auto"
    executables: int = 4

    def __post_init__(self):
        self._one_of("name", NAMES)
        self._one_of("when", ("ahead", "after_gate"))
        self._one_of("predictor", PREDICTORS)
        self._one_of("transfer", TRANSFERS)
        self._one_of("split", ("plan", "even"))
        for field, least in (("replica_slots", 0), ("shard_every", 0), ("top_k", 1), ("groups", 1), ("window", 1)):
            self._whole(field, least)
        self._whole("executables", 2)
        for field, least in (("overlap_degree", 0), ("interval", 1), ("swap_after", 1), ("horizon", 1)):
            if getattr(self, field) is not None:
                self._whole(field, least)
        if self.skipped_devices != "search":
            self._whole("skipped_devices", 0)
        if self.balance_threshold <= 0:
            raise UserError(
                f"PlannerConfig.balance_threshold ({self.balance_threshold}) must be above 0; 0.5 is the default"
            )
        if self.swap_seconds < 0:
            raise UserError(f"PlannerConfig.swap_seconds ({self.swap_seconds}) must be at least 0")
        if self.headroom < 0:
            raise UserError(f"PlannerConfig.headroom ({self.headroom}) must be at least 0 replicas per device")
        if not self.bucket_limit >= 1:
            raise UserError(
                f"PlannerConfig.bucket_limit ({self.bucket_limit}) must be at least 1, the mean; 4.0 is the default"
            )
        if not 0 < self.decay <= 1:
            raise UserError(f"PlannerConfig.decay ({self.decay}) must lie in (0, 1], the weight of the newest step")
        if self.when == "after_gate" and self.name not in AFTER_GATE:
            raise UserError(
                f"PlannerConfig.when = 'after_gate' works with {', '.join(AFTER_GATE)}, not with {self.name!r}; use "
                "'ahead'"
            )
        if self.split == "even" and (self.when == "after_gate" or (self.name == "hecate" and self.calibrate)):
            raise UserError(
                "PlannerConfig.split = 'even' splits tokens ahead of the gate, and this planner decides after it (when "
                "= 'after_gate' or calibrate = True); use split = 'plan'"
            )

    @property
    def steps_between_plans(self) -> int:
        """The interval, or the planner's own where none is given."""
        return self.interval or DEFAULT_INTERVAL.get(self.name, 1)

    def _one_of(self, field: str, known: tuple[str, ...]) -> None:
        if getattr(self, field) not in known:
            raise UserError(f"PlannerConfig.{field} ({getattr(self, field)!r}) must be one of {', '.join(known)}")

    def _whole(self, field: str, least: int) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"PlannerConfig.{field} ({value!r}) must be a whole number of at least {least}")
