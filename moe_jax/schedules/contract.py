"""The contract of a schedule, and what every schedule is built from.

A schedule is the order in which one MoE layer moves its bytes. It is built once, for static sizes, and called inside
`shard_map`:

    schedule(x [t, M], token_ids [t], gate, placed) -> (y [t, M], GateStats, passes)

`gate(x, token_ids) -> (Choice, GateStats)` chooses experts; it is an argument because a schedule may split the tokens
before it: under MP the t tokens of the group enter and leave replicated, and a schedule that splits them gates t / N_MP
on each device. With `split_tokens` x and y are this device's part [t / N_MP, M] (see `mp_tokens.py`); `token_ids` are
always all t. `placed(stats) -> (experts, tables)` returns where experts are, after the gate has counted: a plan may
decide that from the counts. `experts(rows [R, M], group_sizes [G]) -> [R, M]` computes rows in compact group order,
with this device's part of the hidden dim; `tables` is this layer's `Tables`. Statistics are returned as the gate gave
them; `passes` is the int32 number of passes taken, equal on all devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import jax

from moe_jax.collectives.bucket_rows import BucketLayout, BucketRows, bucket_layout, round_up
from moe_jax.collectives.exchange import TRANSPORTS
from moe_jax.errors import UserError
from moe_jax.mesh.roles import Roles

MOST_ROWS = (1 << 31) - 1  # rows, choices and token ids are int32


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
      planned_rows: dropless: rows of the buckets as a plan predicts them; None takes the slack.
      min_capacity: floor of the capacity.
    """

    tokens: int
    top_k: int
    num_experts: int
    groups: int
    capacity: int | None
    bucket_slack: float
    planned_rows: BucketRows | None = None
    min_capacity: int = 1

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

        Dropless: ceil(slack K t / D), rounded up to 8, and never more than the worst case. With a capacity: what the
        destination's experts can take at most.
        """
        worst = self.worst_rows()
        if destinations == 1:
            return worst
        if self.capacity is not None:
            return min(worst, self.groups * self.capacity)
        return min(worst, round_up(math.ceil(self.bucket_slack * self.top_k * self.tokens / destinations), 8))

    def worst_rows(self) -> int:
        """Return the most rows that this device can have for one destination: all its tokens, min(K, G) times."""
        return self.tokens * min(self.top_k, self.groups)

    def most_passes(self, rows: int) -> int:
        """Return how many passes may be taken: one with a capacity, which bounds all; rows: of the shortest."""
        worst = self.worst_rows()
        return math.ceil((worst if self.capacity is None else min(worst, self.groups * self.capacity)) / rows)

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
      transport: how an exchange travels; one of `moe_jax.collectives.exchange.TRANSPORTS`.
      pairwise_groups: Ng of `pairwise`; 0 makes one group of the EP members of each node.
      gather: how `s2` returns: 'saa' (all-to-all and all-gather at the same time), 'aas' (one after the other) or
        'auto' (the shorter one by `cluster`, without it 'aas').
      cluster: path of a calibration file for `parm` and 'auto'; '' lets `parm` compare bytes.
      split_tokens: tokens enter and leave as this device's part [t / N_MP, M], not replicated in the MP group.
    """

    transport: str = "all_to_all"
    pairwise_groups: int = 0
    gather: str = "auto"
    cluster: str = ""
    split_tokens: bool = False

    def __post_init__(self):
        if self.gather not in ("auto", "saa", "aas"):
            raise UserError(f"MoEConfig.gather ({self.gather!r}) must be 'auto', 'saa' or 'aas'")
        if self.transport not in TRANSPORTS:
            raise UserError(f"MoEConfig.transport ({self.transport!r}) must be one of {', '.join(TRANSPORTS)}")
        if self.pairwise_groups < 0:
            raise UserError(f"MoEConfig.pairwise_groups ({self.pairwise_groups}) must be 0 (by topology) or positive")


def layout_of(roles: Roles, rows: BucketRows, transport: str = "all_to_all") -> BucketLayout:
    """Return how buckets of these rows stand and travel on this mesh; under `ragged` all are as long as the longest."""
    if transport == "ragged":
        rows = BucketRows.even(rows.most)
    return bucket_layout(rows, roles.size(roles.expert), roles.members_per_node)


class Schedule(Protocol):
    """See the docstring of this file."""

    def __call__(self, x: jax.Array, token_ids: jax.Array, gate, placed): ...


class ScheduleBuilder(Protocol):
    def __call__(self, roles: Roles, sizes: LayerSizes, options: ScheduleOptions) -> Schedule: ...


_BUILDERS: dict[str, ScheduleBuilder] = {}
_DEFAULT_OPTIONS = ScheduleOptions()


def register(name: str) -> Callable[[ScheduleBuilder], ScheduleBuilder]:
    """Register a builder under the name that `MoEConfig.schedule` selects it by."""

    def add(builder):
        if name in _BUILDERS:
            raise AssertionError(f"schedule {name!r} is registered twice")
        _BUILDERS[name] = builder
        return builder

    return add


def schedules() -> tuple[str, ...]:
    """Return the names of all schedules."""
    return tuple(sorted(_BUILDERS))


def build_schedule(name: str, roles: Roles, sizes: LayerSizes, options: ScheduleOptions = _DEFAULT_OPTIONS) -> Schedule:
    """Return the schedule `name` for this mesh and these sizes.

    Raises:
      UserError: for an unknown name, or a mesh that the schedule cannot run on.
    """
    if name not in _BUILDERS:
        raise UserError(f"MoEConfig.schedule ({name!r}) is unknown; choose one of {', '.join(schedules())}")
    parts = roles.size(roles.model)
    if sizes.tokens % parts:
        raise UserError(
            f"the {sizes.tokens} tokens of a model-parallel group must be divisible by MeshConfig.model ({parts}); "
            f"make DataConfig.sequence_length a multiple of {parts}"
        )
    _check_row_numbers(roles, sizes)
    platform = roles.mesh.devices.flat[0].platform if isinstance(roles.mesh, jax.sharding.Mesh) else None
    if options.transport == "ragged" and platform == "cpu":
        raise UserError(
            "MoEConfig.transport ('ragged') needs GPUs; XLA has no such exchange on cpu; set MoEConfig.transport = "
            "'all_to_all', 'ppermute' or 'two_level'"
        )
    return _BUILDERS[name](roles, sizes, options)


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
