"""The contract of a schedule, and what every schedule is built from.

A schedule is the order in which one MoE layer moves its bytes. It is built once, for static sizes, registered with a
record of what it is, and called by the layer (`moe/layer.py`) inside `shard_map`, in this order:

    tokens, ids = schedule.enter(x [t, M], token_ids [t])      the tokens that this device gates, t of them or t / N_MP
    (the layer: gate -> Choice; where experts are -> Tables)
    routed      = schedule.route(tokens, choice, tables)       where each choice goes, in every pass; number of passes
    sent        = schedule.dispatch(routed, index)             the rows of a pass on the devices of their experts
    (the layer: experts on rows [R, M] in compact group order, with this device's part of the hidden dim)
    y           = schedule.combine(done, sent.metadata, routed)
    (the layer: later passes, summed)
    y           = schedule.leave(y)                            [t, M] again

A `StagedSchedule` says in six methods what dispatch and combine are, so that each exchange stands alone and something
else can run beside it:

    packed      = schedule.pack(routed, index)                 rows in the order in which they leave; all index work
    received    = schedule.send(packed.rows, packed.metadata)  the exchange
    rows, sizes = schedule.arrive(received, metadata)          in group order
    back        = schedule.depart(done, metadata)              computed rows in the order in which they came
    returned    = schedule.send_back(back, metadata)           the exchange back
    y           = schedule.unpack(returned, metadata, routed)

Under MP the t tokens of the group enter and leave replicated; with `split_tokens` x and y are this device's part
[t / N_MP, M] (see `mp_tokens.py`), and `token_ids` are always all t. A schedule whose experts stand amid its
communication has no dispatch and combine: it is a `Schedule` with a `run_pass` of its own; all others are a
`StagedSchedule`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from moe_jax.cluster.layer_seconds import HalfWork
from moe_jax.errors import UserError
from moe_jax.moe.routing import Choice, Routing, record
from moe_jax.moe.tables import Tables
from moe_jax.parallel.bucket_rows import BucketLayout, BucketRows, bucket_layout, round_up
from moe_jax.parallel.exchange import TRANSPORTS
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.buckets import expected_rows

MOST_ROWS = (1 << 31) - 1  # rows, choices and token ids are int32


class Passes(NamedTuple):
    """Static bounds of one layer.

    Attributes:
      most: passes that a routing may need. run: that the program has; `most`, or only the first.
    """

    most: int
    run: int


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """Static sizes of one MoE layer as one device sees it.

    Attributes:
      tokens: t, tokens of this device's MP group.
      top_k: K.
      num_experts: E.
      groups: G, experts that one device may compute in a layer.
      capacity: the most of `tokens` tokens gated together that an expert takes, or None when dropless.
      bucket_slack: dropless: ratio of a bucket's rows to their mean.
      overflow_chance: dropless: chance that some pair of devices needs more rows, instead of the ratio; 0 takes that.
      sources: devices whose pairs the chance is of.
      planned_rows: dropless: rows of the buckets as a plan predicts or a router bounds them; None takes the slack.
      min_capacity: floor of the capacity.
      later_passes: whether the program has the passes after the first, for buckets that overflow.
    """

    tokens: int
    top_k: int
    num_experts: int
    groups: int
    capacity: int | None
    bucket_slack: float
    planned_rows: BucketRows | None = None
    overflow_chance: float = 0.0
    sources: int = 1
    min_capacity: int = 1
    later_passes: bool = True

    def bucket_rows(self, destinations: int) -> BucketRows:
        """Return the rows of one (source, destination) bucket: to the own member, within the node, to other nodes.

        Dropless: as planned, own >= node >= far; without a plan all three are `even_rows`. Never more than the worst
        case.
        """
        worst = self.worst_rows()
        if destinations == 1 or self.capacity is not None or self.planned_rows is None:
            return BucketRows.even(self.even_rows(destinations))
        return self.planned_rows.raised().each(lambda rows: min(worst, rows))

    def even_rows(self, destinations: int) -> int:
        """Return C, rows of every bucket without a plan.

        Dropless: ceil(slack K t / D) or what even loads need at random, rounded up to 8, and never more than the worst
        case. With a capacity: what the destination's experts can take at most.
        """
        worst = self.worst_rows()
        if destinations == 1:
            return worst
        if self.capacity is not None:
            return min(worst, self.groups * self.capacity)
        return min(worst, self.rows_of(self.top_k * self.tokens / destinations, self.sources * destinations))

    def rows_of(self, mean: float, pairs: int) -> int:
        """Return the rows of buckets whose mean rows are `mean`, in multiples of 8; pairs: of them in an exchange."""
        if not self.overflow_chance:
            return round_up(math.ceil(self.bucket_slack * mean), 8)
        return expected_rows([mean], self.top_k * self.tokens, self.overflow_chance / pairs)

    def worst_rows(self) -> int:
        """Return the most rows that this device can have for one destination: all its tokens, min(K, G) times."""
        return self.tokens * min(self.top_k, self.groups)

    def most_passes(self, rows: int) -> int:
        """Return how many passes may be taken: one with a capacity, which bounds all; rows: of the shortest."""
        worst = self.worst_rows()
        return math.ceil((worst if self.capacity is None else min(worst, self.groups * self.capacity)) / rows)

    def passes(self, rows: int) -> Passes:
        """Return the bounds on a layer's passes; rows: of the shortest bucket."""
        most = self.most_passes(rows)
        return Passes(most, most if self.later_passes else 1)

    def split(self, parts: int) -> LayerSizes:
        """Return the sizes where each device of an MP group of `parts` gates its own part of the tokens."""
        tokens, capacity, planned = self.tokens // parts, self.capacity, self.planned_rows
        if capacity is not None:
            # The gate computes its own capacity from fewer tokens; where `parts` does not scale floats exactly, it may
            # be higher by one.
            spare = 0 if parts & (parts - 1) == 0 else 1
            capacity = min(tokens, max(self.min_capacity, math.ceil(capacity / parts) + spare))
        planned = None if planned is None else planned.each(lambda rows: round_up(rows / parts, 8))
        return dataclasses.replace(self, tokens=tokens, capacity=capacity, planned_rows=planned)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Choices within a schedule; each schedule reads those that concern it.

    Attributes:
      transport: how an exchange travels; one of `moe_jax.parallel.exchange.TRANSPORTS`.
      pairwise_groups: Ng of `pairwise`; 0 makes one group of the EP members of each node.
      gather: how `s2` returns: 'saa' (all-to-all and all-gather at the same time), 'aas' (one after the other) or
        'auto' (the shorter one by `cluster`, without it 'aas').
      cluster: path of a cluster file for `parm` and 'auto', with fits or links alone; '' lets `parm` compare bytes.
      split_tokens: tokens enter and leave as this device's part [t / N_MP, M], not replicated in the MP group.
      beside: what a device computes of the other half beside the exchanges of one, whose tokens the sizes count; None
        where nothing computes beside them.
    """

    transport: str = "all_to_all"
    pairwise_groups: int = 0
    gather: str = "auto"
    cluster: str = ""
    split_tokens: bool = False
    beside: HalfWork | None = None

    def __post_init__(self):
        if self.gather not in ("auto", "saa", "aas"):
            raise UserError(f"MoEConfig.gather ({self.gather!r}) must be 'auto', 'saa' or 'aas'")
        if self.transport not in TRANSPORTS:
            raise UserError(f"MoEConfig.transport ({self.transport!r}) must be one of {', '.join(TRANSPORTS)}")
        if self.transport == "coordinated" and self.gather == "saa":
            raise UserError(
                "MoEConfig.gather ('saa') cannot be used with MoEConfig.transport = 'coordinated', which returns rows "
                "by a reduce-scatter before its exchange; set MoEConfig.gather = 'auto'"
            )
        if self.pairwise_groups < 0:
            raise UserError(f"MoEConfig.pairwise_groups ({self.pairwise_groups}) must be 0 (by topology) or positive")


def layout_of(roles: Roles, rows: BucketRows) -> BucketLayout:
    """Return how buckets of these rows stand and travel on this mesh."""
    return bucket_layout(rows, roles.size(roles.expert), roles.members_per_node)


@record
class Routed:
    """What the passes of one layer read.

    Attributes:
      tokens: float [T, M], from which the rows of all passes are taken: those gated here, or more after a gather.
      weights: float [t, K] of their choices; under `ring` [T, K].
      routing: where every choice goes.
      passes: int32 [], passes that are needed: those taken, equal on all devices; of a program that has the first alone
        what this device needs.
    """

    tokens: jax.Array | None
    weights: jax.Array
    routing: Routing | None
    passes: jax.Array


@record
class Packed:
    """What leaves a device in one pass.

    Attributes:
      rows: float [R, M] in the order of the exchange, or what `send` takes them from.
      metadata: pytree of integer arrays, what every later step of this pass needs.
    """

    rows: jax.Array
    metadata: Any


@record
class Sent:
    """The rows of one pass, on the device of their experts.

    Attributes:
      rows: float [R, M], in group order.
      group_sizes: int32 [G].
      metadata: pytree of arrays that `combine` needs of this pass.
    """

    rows: jax.Array
    group_sizes: jax.Array
    metadata: Any


class Schedule(abc.ABC):
    """The order in which one layer moves its bytes; see the head of this file.

    Attributes:
      passes: static bounds on the passes.
    """

    passes: Passes

    @property
    def most_passes(self) -> int:
        """Passes that the program has; 1 leaves no branch in it."""
        return self.passes.run

    def for_rows(self, row_bytes: int, sent_bytes: int = 0) -> Schedule:
        """Return the schedule for rows of so many bytes: itself."""
        del row_bytes, sent_bytes
        return self

    @abc.abstractmethod
    def enter(self, x, token_ids):
        """Return (tokens [t, M] or [t / N_MP, M], their ids): what this device gates."""

    @abc.abstractmethod
    def route(self, tokens, choice: Choice, tables: Tables) -> Routed:
        """Return where the choices of these tokens go."""

    @abc.abstractmethod
    def run_pass(self, routed: Routed, index, experts: Callable):
        """Return what the experts computed in pass `index`, weighted and summed where `route` took the tokens.

        Args:
          index: int or int32 [].
          experts: (rows [R, M] in group order, group_sizes int32 [G]) -> [R, M].
        """

    @abc.abstractmethod
    def leave(self, y):
        """Return the sum y of all passes, as x came."""


class StagedSchedule(Schedule):
    """A schedule whose experts run in one piece, so that a caller may place something beside them or its exchanges."""

    @abc.abstractmethod
    def pack(self, routed: Routed, index) -> Packed:
        """Return the rows of pass `index` as they leave, and all that is known of where they go."""

    @abc.abstractmethod
    def send(self, rows, metadata):
        """Exchange rows; of the metadata only sizes are read."""

    @abc.abstractmethod
    def arrive(self, received, metadata):
        """Return (received rows in group order [R, M], group_sizes int32 [G])."""

    @abc.abstractmethod
    def depart(self, done, metadata):
        """Return computed rows [R, M], in group order, in the order in which they came."""

    @abc.abstractmethod
    def send_back(self, rows, metadata):
        """Exchange computed rows the other way."""

    @abc.abstractmethod
    def unpack(self, returned, metadata, routed: Routed):
        """Return the sum of each token's rows, weighted; of `routed` only the weights are read."""

    def dispatch(self, routed: Routed, index) -> Sent:
        """Send the rows of pass `index` to their experts."""
        packed = self.pack(routed, index)
        rows, group_sizes = self.arrive(self.send(packed.rows, packed.metadata), packed.metadata)
        return Sent(rows, group_sizes, packed.metadata)

    def combine(self, done, metadata, routed: Routed):
        """Return computed rows [R, M] to their tokens, weighted."""
        return self.unpack(self.send_back(self.depart(done, metadata), metadata), metadata, routed)

    def run_pass(self, routed: Routed, index, experts: Callable):
        sent = self.dispatch(routed, index)
        done = experts(sent.rows, sent.group_sizes)
        return self.combine(done, sent.metadata, routed)

    def after_dispatch(self, routed: Routed) -> Routed:
        """Return what combine and later passes still need: without later ones the weights alone."""
        return routed if self.most_passes > 1 else dataclasses.replace(routed, tokens=None, routing=None)


class Chooser(Protocol):
    """What a builder returns: a schedule, which chooses itself, or a choice of schedules by the bytes of a row.

    `sent_bytes` are those of a row on its way to experts where it travels as float8, else 0 (`MoEConfig.sent_bytes`).
    """

    def for_rows(self, row_bytes: int, sent_bytes: int = 0) -> Schedule: ...


class ScheduleBuilder(Protocol):
    def __call__(self, roles: Roles, sizes: LayerSizes, options: ScheduleOptions) -> Chooser: ...


def own_bucket_rows(sizes: LayerSizes, roles: Roles) -> BucketRows:
    """Return the rows of buckets that a device fills from its own part of the MP group's tokens."""
    return sizes.split(roles.size(roles.model)).bucket_rows(roles.size(roles.expert))


def group_bucket_rows(sizes: LayerSizes, roles: Roles) -> BucketRows:
    """Return the rows of buckets that each device fills from all tokens of its MP group."""
    return sizes.bucket_rows(roles.size(roles.expert))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleRecord:
    """What is known of a schedule without building it; every question about a schedule by its name is asked here.

    Attributes:
      name: by which `MoEConfig.schedule` selects it.
      build: the builder.
      gates_group: each device gates all tokens of its MP group, not its own part [t / N_MP, M] of them.
      moves_tokens: rows travel to their experts; else every device computes all experts, replicated or gathered.
      one_piece: its experts run in one piece: it is a `StagedSchedule`, and block-wise schedules can run it.
      bucket_rows: (sizes, roles) -> the rows of its buckets.
      cuts_buckets: the devices of an MP group share every bucket, so that on several EP members lengths must agree.
      s1_without: roles; where each of them has one device the schedule is `s1`, and is built as that. () for never.
      formulas: name of its cost in `cluster/`; '' for one that takes the cost of what it chooses.
      chooses_from: names of the schedules that it chooses from, in the order of tables; () for one that is itself.
      sentences: (roles, sizes, options, bytes of a row, those it is sent as) -> what `--dry_run` says of its own
        choices; None for nothing.
    """

    name: str
    build: ScheduleBuilder
    gates_group: bool = False
    moves_tokens: bool = True
    one_piece: bool = True
    bucket_rows: Callable[[LayerSizes, Roles], BucketRows] = own_bucket_rows
    cuts_buckets: bool = False
    s1_without: tuple[str, ...] = ()
    formulas: str = ""
    chooses_from: tuple[str, ...] = ()
    sentences: Callable[..., list[str]] | None = None

    def on_mesh(self, mp_size: int, esp_size: int) -> ScheduleRecord:
        """Return the record of the schedule that this one is where MP and ESP groups have so many devices."""
        sizes = {"model": mp_size, "expert_shard": esp_size}
        alone = self.s1_without and all(sizes[role] == 1 for role in self.s1_without)
        return schedule_record("s1") if alone else self

    def may_gate_group(self) -> bool:
        """Whether it, or one that it may choose, has each device gate all tokens of its MP group."""
        return self.gates_group or any(schedule_record(name).gates_group for name in self.chooses_from)

    def may_cut_buckets(self) -> bool:
        """Whether it, or one that it may choose, has the devices of an MP group share every bucket."""
        return self.cuts_buckets or any(schedule_record(name).cuts_buckets for name in self.chooses_from)


_RECORDS: dict[str, ScheduleRecord] = {}
_DEFAULT_OPTIONS = ScheduleOptions()


def register(name: str, **facts) -> Callable[[ScheduleBuilder], ScheduleBuilder]:
    """Register a builder under the name that `MoEConfig.schedule` selects it by.

    Args:
      facts: fields of `ScheduleRecord`; `formulas` is `name` unless it chooses from others.
    """

    def add(builder):
        if name in _RECORDS:
            raise AssertionError(f"schedule {name!r} is registered twice")
        known = {"formulas": "" if facts.get("chooses_from") else name, **facts}
        _RECORDS[name] = ScheduleRecord(name=name, build=builder, **known)
        return builder

    return add


def schedules() -> tuple[str, ...]:
    """Return the names of all schedules."""
    return tuple(sorted(_RECORDS))


def schedule_record(name: str) -> ScheduleRecord:
    """Return what is known of a schedule.

    Raises:
      UserError: for an unknown name.
    """
    if name not in _RECORDS:
        raise UserError(f"MoEConfig.schedule ({name!r}) is unknown; choose one of {', '.join(schedules())}")
    return _RECORDS[name]


def build_schedule(name: str, roles: Roles, sizes: LayerSizes, options: ScheduleOptions = _DEFAULT_OPTIONS) -> Chooser:
    """Return the schedule `name` for this mesh and these sizes; `for_rows` of it is what a layer runs.

    Raises:
      UserError: for an unknown name, or a mesh that the schedule cannot run on.
    """
    chosen = schedule_record(name).on_mesh(roles.size(roles.model), roles.size(roles.expert_shard))
    parts = roles.size(roles.model)
    if sizes.tokens % parts:
        raise UserError(
            f"the {sizes.tokens} tokens of a model-parallel group must be divisible by MeshConfig.model ({parts}); "
            f"make DataConfig.sequence_length a multiple of {parts}"
        )
    _check_row_numbers(roles, sizes)
    return chosen.build(roles, sizes, options)


def _check_row_numbers(roles: Roles, sizes: LayerSizes) -> None:
    """Raise a UserError where rows, or choices of an expert by all tokens, are more than int32 counts."""
    devices = max(roles.size(roles.expert + roles.expert_shard), roles.size(roles.dense))
    choices = devices * sizes.tokens * sizes.top_k
    if choices > MOST_ROWS:
        raise UserError(
            f"{devices} devices x {sizes.tokens} tokens x MoEConfig.top_k ({sizes.top_k}) = {choices} choices of "
            f"experts in a layer must be at most {MOST_ROWS}, so that int32 can number their rows; lower "
            "train.batch_size or DataConfig.sequence_length, or raise train.grad_accum_steps"
        )
