"""The contract of a schedule: the order in which one MoE layer moves its bytes.

A schedule is built once, for static sizes, and called by the layer (`moe/layer.py`) inside `shard_map`, in this order:

    tokens, ids = schedule.enter(x [t, M], token_ids [t])      the tokens that this device gates, t of them or t / N_MP
    routed      = schedule.route(tokens, choice, tables)       where each choice goes, in every pass; number of passes
    y           = schedule.run_pass(routed, index, experts)    rows to their experts and back, each token's summed
    y           = schedule.leave(y)                            [t, M] again

`layer.py` has plain expert parallelism, whose pass is five steps around two exchanges, `schedules/` the others, a file
each; `choosers.py` has what chooses among them by sizes.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from moe_jax.cluster.layer_seconds import LayerShape
from moe_jax.errors import UserError
from moe_jax.kernels.float8 import bytes_to_rows, rows_to_bytes
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.passes import FirstPassOnly, most_of_all
from moe_jax.moe.routing import Choice, Grouping, Parcel, Routing, record
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.static_sizes import BucketLayout, BucketRows, bucket_layout, round_up
from moe_jax.parallel.varying import join_parts, own_part
from moe_jax.planning.buckets import expected_rows
from moe_jax.planning.plan_shape import Tables
from moe_jax.registry import SCHEDULES

MOST_ROWS = (1 << 31) - 1  # rows, choices and token ids are int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Static sizes of one MoE layer as one device sees it; `moe/build.py` makes them of a config and a plan.

    Attributes:
      config: the layer.
      tokens: t, tokens of this device's MP group.
      groups: G, experts that one device may compute in a layer.
      capacity: the most of `tokens` tokens gated together that an expert takes, or None when dropless.
      planned_rows: dropless: rows of the buckets as a plan predicts or a router bounds them; None takes the config's
        slack, or its chance of an overflow.
      sources: devices whose pairs that chance is of.
      row_bytes: bytes of a row of M elements; sent_bytes: those it is sent to experts in as float8, else 0.
      split_tokens: tokens enter and leave as this device's part [t / N_MP, M], not replicated in the MP group.
    """

    config: MoEConfig
    tokens: int
    groups: int
    capacity: int | None = None
    planned_rows: BucketRows | None = None
    sources: int = 1
    row_bytes: int = 0
    sent_bytes: int = 0
    split_tokens: bool = False

    def bucket_rows(self, destinations: int) -> BucketRows:
        """Return the rows of one (source, destination) bucket: to the own member, within the node, to other nodes.

        Dropless: as planned, own >= node >= far; without a plan all three are `even_rows`. Never more than the worst
        case.
        """
        if destinations == 1 or self.capacity is not None or self.planned_rows is None:
            return BucketRows.even(self.even_rows(destinations))
        worst = self.worst_rows()
        return self.planned_rows.raised().each(lambda rows: min(worst, rows))

    def even_rows(self, destinations: int) -> int:
        """Return C, rows of every bucket without a plan.

        Dropless: ceil(slack K t ceil(E / D) / E) or what even loads need at random, rounded up to 8, and never more
        than the worst case. With a capacity: what the destination's experts can take at most.
        """
        worst = self.worst_rows()
        if destinations == 1:
            return worst
        if self.capacity is not None:
            return min(worst, self.groups * self.capacity)
        experts = self.config.num_experts
        fullest = self.config.top_k * self.tokens * -(-experts // destinations) / experts
        return min(worst, self.rows_of(fullest, self.sources * destinations))

    def rows_of(self, mean: float, pairs: int) -> int:
        """Return the rows of buckets whose mean rows are `mean`, in multiples of 8; pairs: of them in an exchange."""
        config = self.config
        if not config.overflow_chance:
            return round_up(math.ceil(config.bucket_slack * mean), 8)
        return expected_rows([mean], config.top_k * self.tokens, config.overflow_chance / pairs)

    def worst_rows(self, shared: int = 1) -> int:
        """Return the most rows that this device can have for one destination: all its tokens, min(K, G) times.

        shared: choices of a token that share a row.
        """
        return self.tokens * math.ceil(min(self.config.top_k, self.groups) / shared)

    def most_passes(self, rows: int, shared: int = 1) -> int:
        """Return how many passes may be taken: one with a capacity, which bounds all.

        rows: of the shortest bucket; shared: as in `worst_rows`.
        """
        worst = self.worst_rows(shared)
        return math.ceil((worst if self.capacity is None else min(worst, self.groups * self.capacity)) / rows)

    def split(self, parts: int) -> LayerSizes:
        """Return the sizes where each device of an MP group of `parts` gates its own part of the tokens."""
        tokens, capacity, planned = self.tokens // parts, self.capacity, self.planned_rows
        if capacity is not None:
            # The gate computes its own capacity from fewer tokens; where `parts` does not scale floats exactly, it may
            # be higher by one.
            spare = 0 if parts & (parts - 1) == 0 else 1
            capacity = min(tokens, max(self.config.min_capacity, math.ceil(capacity / parts) + spare))
        planned = None if planned is None else planned.each(lambda rows: round_up(rows / parts, 8))
        return dataclasses.replace(self, tokens=tokens, capacity=capacity, planned_rows=planned)


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
class Sent:
    """How the rows of one pass were sent, by which they come home; integers.

    Attributes:
      parcel: which row is which choice's.
      grouping: how the rows that arrive form groups, and how many rows each has.
      second: a further parcel: of this device's part of each bucket (`s2`), or of what arrived (`deduplicated`).
    """

    parcel: Parcel
    grouping: Grouping
    second: Parcel | None = None


class Schedule(abc.ABC):
    """The order in which one layer moves its bytes; see the head of this file.

    A subclass has `route` and `run_pass`, and `leave` where results do not come home as `enter` lets tokens in. The
    first six attributes are of the class: they are asked before one is built.

    Attributes:
      name: by which `MoEConfig.schedule` selects it; options: the defaults of what it alone reads (`registry.py`).
      gates_group: each device gates all tokens of its MP group, not its own part [t / N_MP, M] of them.
      moves_tokens: rows travel to their experts; else every device computes all experts, replicated or gathered.
      one_piece: rows travel in one exchange to experts that run in one piece, and back in another, so block-wise
        schedules can run it.
      needs_results: its backward reads the rows that came home, which a backward that computes experts again has to
        bring home again.
      cuts_buckets: the devices of an MP group share every bucket, so that on several EP members lengths must agree.
      roles, sizes: the mesh, and the sizes of the tokens that a device gates.
      layout: where the rows of its buckets stand.
      most_passes: passes that a routing may need.
      reason: why a `Chooser` took it, a sentence; '' where a config names it.
    """

    name: ClassVar[str]
    options: Any = None
    gates_group: ClassVar[bool] = False
    moves_tokens: ClassVar[bool] = True
    one_piece: ClassVar[bool] = False
    needs_results: ClassVar[bool] = True
    cuts_buckets: ClassVar[bool] = False
    reason: str = ""

    def __init__(self, roles: Roles, sizes: LayerSizes):
        """Build it for a mesh and the sizes of a whole MP group; a UserError for a mesh that it cannot run on."""
        self.roles = roles
        self.sizes = sizes if self.gates_group else sizes.split(roles.size(roles.model))
        self.layout = layout_of(roles, self.bucket_rows())
        self.most_passes = self.sizes.most_passes(self.layout.rows.far)

    def bucket_rows(self) -> BucketRows:
        """Return the rows of its buckets."""
        return self.sizes.bucket_rows(self.roles.size(self.roles.expert))

    def buckets(self) -> list[tuple[str, BucketLayout, float]]:
        """Return (kind of row, '' for a choice; layout; rows of a bucket that even loads fill) of each kind of bucket.

        The last kind is what travels.
        """
        choices = self.sizes.config.top_k * self.sizes.tokens
        return [("", self.layout, choices / self.roles.size(self.roles.expert))]

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen and by which rule, sentences for the log."""
        return (self.reason,) if self.reason else ()

    @property
    def run_passes(self) -> int:
        """Passes that the program has; 1 leaves no branch in it."""
        return 1 if isinstance(self.sizes.config, FirstPassOnly) else self.most_passes

    def passes_needed(self, mine):
        """Return int32 [], the most passes that any device's buckets take, at least one; mine: int32 [], those here.

        Equal on all devices, whose branches hold collectives; in a program of the first pass alone, what this one
        needs.
        """
        if self.most_passes == 1:
            return jnp.ones((), jnp.int32)
        needed = jnp.maximum(mine, 1)
        return needed if isinstance(self.sizes.config, FirstPassOnly) else most_of_all(needed, self.roles.all)

    def enter(self, x, token_ids):
        """Return (tokens [t, M] or [t / N_MP, M], their ids): what this device gates.

        Under MP the t tokens of a group come replicated, or with `split_tokens` as parts; token_ids are all t.
        """
        model, split = self.roles.model, self.sizes.split_tokens
        if self.gates_group:
            return join_parts(x, model) if split else x, token_ids
        return x if split else own_part(x, model), own_part(token_ids, model)

    @abc.abstractmethod
    def route(self, tokens, choice: Choice, tables: Tables) -> Routed:
        """Return where the choices of these tokens go."""

    @abc.abstractmethod
    def run_pass(self, routed: Routed, index, experts: Callable):
        """Return what the experts computed in pass `index`, weighted and summed where `route` took the tokens.

        Args:
          index: 0, or an int32 [] from 1 on.
          experts: (rows [R, M] in group order, group_sizes int32 [G], and, where the results shall be weighted already,
            weights [R]) -> [R, M].
        """

    def leave(self, y):
        """Return the sum y of all passes, as x came."""
        model, split = self.roles.model, self.sizes.split_tokens
        if self.gates_group:
            return own_part(y, model) if split else y
        with jax.named_scope("combine"):
            return y if split else join_parts(y, model)


def send_as_float8(exchange: Callable, rows, sent: Sent):
    """Return exchange(rows, sent) of rows [R, M] that travel as bytes of float8 with a scale for each block of 128.

    All rows are quantised (`kernels/float8.py`), whether or not they leave the device, so results do not depend
    on the mesh. The gradient is straight through, in the compute dtype. Source: DeepSeek-V3 Technical Report (2024),
    section 3.3.3, which sends gradients in float8 too.
    """
    dim, dtype = rows.shape[-1], rows.dtype

    @jax.custom_vjp
    def narrow(rows, sent):
        return bytes_to_rows(exchange(rows_to_bytes(rows), sent), dim, dtype)

    def forward(rows, sent):
        like = jnp.zeros_like(rows, shape=(rows.shape[0], 0))  # carries R, a dtype and no bytes
        return narrow(rows, sent), (like, sent)

    def backward(residuals, d):
        like, sent = residuals
        zeros = jnp.zeros_like(like, shape=(like.shape[0], dim))
        (drows,) = jax.vjp(lambda rows: exchange(rows, sent), zeros)[1](d)
        return drows, None

    narrow.defvjp(forward, backward)
    return narrow(rows, sent)


class Chooser(abc.ABC):
    """What `MoEConfig.schedule` may name instead of a schedule: a rule that names one; `choosers.py` has them.

    Attributes:
      among: names of the schedules that it may name, in the order of tables.
    """

    among: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def choose(self, roles: Roles, sizes: LayerSizes) -> tuple[str, str]:
        """Return (the name of a schedule, why, as a sentence) for a mesh and the sizes of a whole MP group."""

    def possible(self, roles: Roles, config: MoEConfig) -> tuple[str, ...]:
        """Return those of `among` that it may name on a mesh."""
        return self.among


register = SCHEDULES.register
CHOOSERS: dict[str, Chooser] = {}


def schedules() -> tuple[str, ...]:
    """Return the names that `MoEConfig.schedule` takes, of schedules and choosers."""
    return tuple(sorted((*SCHEDULES, *CHOOSERS)))


def find_schedule(name: str) -> type[Schedule]:
    """Return the class of a schedule, or raise a UserError for an unknown name; before a chooser has chosen, of s1."""
    if name not in schedules():
        raise UserError(
            f"MoEConfig.schedule ({name!r}) is unknown; choose one of {', '.join(schedules())}, or "
            "name the --plugin that has it"
        )
    return SCHEDULES["s1" if name in CHOOSERS else name]


def schedule_on(name: str, mp_size: int, esp_size: int) -> type[Schedule]:
    """Return the class of a schedule where MP and ESP groups have so many devices: it may do there what s1 does."""
    if mp_size == 1 and (name == "s2" or (name == "deepspeed" and esp_size == 1)):
        name = "s1"
    return find_schedule(name)


def build_schedule(name: str, roles: Roles, sizes: LayerSizes) -> Schedule:
    """Return the schedule `name`, or the one that the chooser `name` takes; sizes: of a whole MP group.

    Raises:
      UserError: an unknown name, or a mesh that it cannot run on.
    """
    parts, top_k = roles.size(roles.model), sizes.config.top_k
    find_schedule(name)  # known, whatever the sizes
    if sizes.tokens % parts:
        raise UserError(
            f"the {sizes.tokens} tokens of a model-parallel group must be divisible by MeshConfig.model ({parts}); "
            f"make DataConfig.sequence_length a multiple of {parts}"
        )
    devices = max(roles.size(roles.expert + roles.expert_shard), roles.size(roles.dense))
    choices = devices * sizes.tokens * top_k
    if choices > MOST_ROWS:
        raise UserError(
            f"{devices} devices x {sizes.tokens} tokens x MoEConfig.top_k ({top_k}) = {choices} choices of "
            f"experts in a layer must be at most {MOST_ROWS}, so that int32 can number their rows; lower "
            "train.batch_size or DataConfig.sequence_length, or raise train.grad_accum_steps"
        )
    taken, reason = CHOOSERS[name].choose(roles, sizes) if name in CHOOSERS else (name, "")
    schedule = schedule_on(taken, parts, roles.size(roles.expert_shard))(roles, sizes)
    schedule.reason = reason
    return schedule


def layer_shape(name: str, roles: Roles, sizes: LayerSizes, groups: int = 1) -> LayerShape:
    """Return the cost formulas' inputs, in bytes, for a layer under a schedule ('pairwise' in `groups`).

    Raises:
      UserError: a mesh that the schedule cannot run on, or a schedule without a formula.
    """
    mp_size, ep_size, esp_size = (roles.size(axes) for axes in (roles.model, roles.expert, roles.expert_shard))
    schedule = schedule_on(name, mp_size, esp_size)(roles, sizes)
    layout = schedule.buckets()[-1][1]
    widths = {piece.kind: piece.width for piece in layout.pieces}
    return LayerShape(
        schedule=schedule.name,
        gates_group=schedule.gates_group,
        cuts_buckets=schedule.cuts_buckets,
        tokens=sizes.tokens,
        model_dim=sizes.row_bytes,
        rows=layout.rows.far,
        more_in_node=widths.get("node", 0),
        more_own=widths.get("own", 0),
        members_in_node=layout.near,
        ep_size=ep_size,
        esp_size=esp_size,
        mp_size=mp_size,
        top_k=sizes.config.top_k,
        experts=sizes.config.num_experts,
        split_tokens=sizes.split_tokens,
        groups=groups,
        sent_bytes=sizes.sent_bytes,
    )
