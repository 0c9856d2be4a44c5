"""`s2`: MP pauses after the gate. Every device gates all tokens of its MP group and carries its part of each bucket.

Inputs: the t tokens of this device's MP group, equal on the group. Outputs: the same tokens, transformed. A bucket of C
rows is cut into N_MP parts of c rows; device r of the MP group sends part r to the experts. On the way back each part
that arrives is passed on to the whole MP group, at once (SAA) or in one all-gather at the end (AAS); which is chosen in
`gather_choice.py`. Source: Parm, sections III-B and III-D.

Sending (cut, then all-to-all) and collecting (all-to-all, then gather) are transposes of each other, so the gradient of
one is the other, and the backward overlaps in the same way.
Letters: docs/notation.md; C = N_MP c.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.permute import permute_tokens, unpermute_tokens
from moe_jax.moe.routing import Parcel, pack, passes_of, route, stack_rows, stacked_row
from moe_jax.moe.schedules.choose_group import choose_group
from moe_jax.moe.schedules.contract import LayerSizes, Packed, Routed, ScheduleOptions, layout_of, register
from moe_jax.moe.schedules.expert_group import ExpertGroup, GroupedSchedule, cut, grouping_of, join, member
from moe_jax.moe.schedules.gather_choice import choose_gather, read_cluster_of
from moe_jax.moe.schedules.mp_tokens import from_replicated, to_replicated
from moe_jax.moe.schedules.passes import passes_needed
from moe_jax.moe.tables import Tables, destinations
from moe_jax.parallel.bucket_rows import BucketLayout, BucketRows, round_up
from moe_jax.parallel.exchange import permute_apart, shift_pairs
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.replicated import declare_equal, join_parts
from moe_jax.parallel.varying import cast_varying, varying_axes

_LOG = logging.getLogger(__name__)


def gather_sentences(
    roles: Roles, sizes: LayerSizes, options: ScheduleOptions, row_bytes: int, sent_bytes: int = 0
) -> list[str]:
    """Say how s2 returns rows of so many bytes, and why; in how many they are sent does not matter there.

    Raises:
      UserError: the file that `options` name cannot be read or is of other devices.
    """
    del sent_bytes
    if roles.size(roles.model) == 1:
        return ["schedule 's2' is s1: with MeshConfig.model = 1 nothing is gathered"]
    layout = layout_of(roles, whole_bucket_rows(sizes, roles))
    return [_sentence(_gather_choice(roles, layout, options)(row_bytes))]


def _gather_choice(roles: Roles, layout: BucketLayout, options: ScheduleOptions):
    """Return function(bytes of a row) -> GatherChoice; a calibration is read once, and only where it is asked."""
    cluster = None
    if options.gather == "auto" and options.cluster:
        cluster = read_cluster_of(options.cluster, roles)
    return lambda row_bytes: choose_gather(
        options.gather, roles, layout.rows.far, row_bytes, cluster, options.transport
    )


def _gather_finder(roles: Roles, layout: BucketLayout, options: ScheduleOptions) -> Callable[[int], str]:
    """Return function(bytes of a row) -> 'saa' or 'aas', which says once what 'auto' is."""
    choose, said = _gather_choice(roles, layout, options), set()

    def find(row_bytes: int) -> str:
        choice = choose(row_bytes)
        if options.gather == "auto" and choice not in said:
            said.add(choice)
            _LOG.warning(_sentence(choice))
        return choice.gather

    return find


def _sentence(choice) -> str:
    return f"schedule 's2' returns by {choice.gather!r}: {choice.why}"


def whole_bucket_rows(sizes: LayerSizes, roles: Roles) -> BucketRows:
    """Return the rows of buckets that the devices of an MP group cut into equal parts.

    A part has one length on all devices of the group. Where they are several EP members, one's own is another's
    neighbour, and where they are on several nodes all buckets are alike.
    """
    rows, mp_size = sizes.bucket_rows(roles.size(roles.expert)).raised(), roles.size(roles.model)
    spanned = mp_size // roles.size(roles.expert_shard)
    if spanned > 1:
        rows = dataclasses.replace(rows, node=rows.own)
    if roles.members_per_node % max(1, spanned):
        rows = BucketRows.even(rows.own)
    return rows.each(lambda rows: round_up(rows, mp_size))


@register(
    "s2",
    gates_group=True,
    bucket_rows=whole_bucket_rows,
    cuts_buckets=True,
    s1_without=("model",),
    sentences=gather_sentences,
)
class PauseAfterGate(GroupedSchedule):
    """Parm's second schedule; its drop groups are the N tokens of an MP group. Without MP nothing pauses: it is s1."""

    def __init__(self, roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
        self.roles, self.sizes, self.options = roles, sizes, options
        self.mp_size = roles.size(roles.model)
        self.group = choose_group(roles, options.transport)
        self.layout = layout_of(roles, whole_bucket_rows(sizes, roles))
        self.passes = sizes.passes(self.layout.rows.far)
        self.move = _Move(self.group, roles, self.layout, _gather_finder(roles, self.layout, options))

    def enter(self, x, token_ids):
        return to_replicated(x, self.roles, self.options), token_ids

    def route(self, tokens, choice, tables):
        roles, groups = self.roles, self.sizes.groups
        with jax.named_scope("route"):
            device, expert = destinations(_lead_tables(tables, roles), choice, groups)
            routing = route(choice, device, expert, self.group.ep_size, groups)
            mine = passes_of(routing, self.layout, groups, _lead_member(roles))
            needed = passes_needed(mine, self.passes, roles.all)
        return Routed(tokens, choice.weights, routing, needed)

    def pack(self, routed, index):
        roles, sizes, layout, move = self.roles, self.sizes, self.layout, self.move
        with jax.named_scope("dispatch"):
            me = _lead_member(roles)
            # part r of a bucket is the bucket of a finer pass
            cut_part = functools.partial(
                pack, routed.routing, rows=move.part, top_k=sizes.top_k, num_groups=sizes.groups, me=me
            )
            mine = cut_part(index * self.mp_size + lax.axis_index(roles.model))
            if len(layout.pieces) == 1:
                whole = pack(routed.routing, index, layout, sizes.top_k, sizes.groups)
            else:
                whole = _whole([cut_part(index * self.mp_size + part) for part in range(self.mp_size)], move.part)
            arriving = self.group.send_counts(mine.counts)
            return Packed(routed.tokens, (whole, mine, grouping_of(arriving, move.part, member(roles))))

    def send(self, rows, metadata):
        whole, mine, _ = metadata
        with jax.named_scope("dispatch"):  # `rows` are the tokens: the way back takes other rows of them
            return _send_tokens(self.move, rows, mine, whole)

    def send_back(self, rows, metadata):
        with jax.named_scope("combine"):
            return _collect_rows(self.move, rows)

    def unpack(self, returned, metadata, routed):
        with jax.named_scope("combine"):
            return unpermute_tokens(returned, routed.weights, metadata[0])

    def leave(self, y):
        return from_replicated(y, self.roles, self.options)


def _lead_member(roles: Roles):
    """Return int32 [], the first EP member of this device's MP group, equal on the group."""
    axes = tuple(axis for axis in roles.model if axis in roles.expert)
    me, spanned = member(roles), roles.size(axes)
    return declare_equal(me // spanned * spanned, axes)


def _whole(parts: list[Parcel], layout: BucketLayout) -> Parcel:
    """Return the parcel of whole buckets, in each piece of the layout (destination, part, row)."""
    rows = [stacked_row(part.row_of_choice, i, len(parts), layout) for i, part in enumerate(parts)]
    return Parcel(
        choice_of_row=stack_rows(jnp.stack([part.choice_of_row for part in parts]), layout),
        row_of_choice=functools.reduce(jnp.minimum, rows),  # a choice is in one part at most
        counts=sum(part.counts for part in parts),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Move:
    """How the parts of buckets travel to the experts, and whole buckets come back.

    Attributes:
      group: of the experts; roles: of the mesh; layout: of whole buckets.
      gather: function(bytes of a row) -> 'saa' or 'aas'.
    """

    group: ExpertGroup
    roles: Roles
    layout: BucketLayout
    gather: Callable[[int], str]

    @property
    def part(self) -> BucketLayout:
        """Where the rows of this device's part of each bucket stand."""
        return self.layout.split(self.roles.size(self.roles.model))

    def send(self, rows):
        return self.group.send(rows, self.part)

    def collect(self, rows):
        gather = self.gather(rows.shape[-1] * rows.dtype.itemsize)
        return make_collect(self.roles, self.group, gather, self.part)(rows)


def _lead_tables(tables: Tables, roles: Roles) -> Tables:
    """Return tables by which a whole MP group sends its tokens: where it spans EP members, those of its first one."""
    axes = tuple(axis for axis in roles.model if axis in roles.expert)
    if not axes:
        return tables
    rules = (tables.dest_slot, tables.dest_num, tables.dest_den)
    flat = jnp.concatenate([lax.bitcast_convert_type(rule, jnp.int32).reshape(-1) for rule in rules])
    first = join_parts(flat[None], axes)[0]
    slot, num, den = jnp.split(first, [rules[0].size, rules[0].size + rules[1].size])
    return dataclasses.replace(
        tables,
        dest_slot=slot.reshape(rules[0].shape),
        dest_num=lax.bitcast_convert_type(num, jnp.uint32).reshape(rules[1].shape),
        dest_den=lax.bitcast_convert_type(den, jnp.uint32).reshape(rules[2].shape),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send_tokens(move: _Move, x, mine: Parcel, whole: Parcel):
    """Send this device's part of every bucket to the experts: [t, M] -> the rows that arrive [Ns R / N_MP, M]."""
    return move.send(permute_tokens(x, mine))


def _send_tokens_fwd(move, x, mine, whole):
    tokens = jnp.zeros((x.shape[0], 0), x.dtype)  # carries t and no bytes
    return _send_tokens(move, x, mine, whole), (tokens, whole)


def _send_tokens_bwd(move, residuals, d):
    tokens, whole = residuals
    rows = move.collect(d)
    like = cast_varying(jnp.zeros((tokens.shape[0], d.shape[-1]), d.dtype), varying_axes(rows))
    return jax.vjp(lambda x: permute_tokens(x, whole), like)[1](rows)[0], None, None


_send_tokens.defvjp(_send_tokens_fwd, _send_tokens_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _collect_rows(move: _Move, rows):
    """Bring computed rows to every device of their MP group: [Ns R / N_MP, M] -> [R, M]."""
    return move.collect(rows)


def _collect_rows_fwd(move, rows):
    return move.collect(rows), None


def _collect_rows_bwd(move, _, d):
    axes = move.roles.model

    def own_part_of(blocks):
        part = blocks.shape[1] // math.prod(lax.axis_size(axis) for axis in axes)
        return lax.dynamic_slice_in_dim(cast_varying(blocks, axes), lax.axis_index(axes) * part, part, axis=1)

    own = join(own_part_of(blocks) for _, blocks in cut(d, move.layout))
    return (move.send(own),)


_collect_rows.defvjp(_collect_rows_fwd, _collect_rows_bwd)


def make_collect(roles: Roles, group: ExpertGroup, gather: str, part: BucketLayout):
    """Return collect(rows [Ns R / N_MP, M]) -> [R, M], equal on the MP group.

    It has no gradient of its own.

    Args:
      gather: 'aas' or 'saa'; part: where the rows of this device's part of each bucket stand. Under 'saa' the piece
        that the whole group exchanges comes by phases, the others by an exchange and a gather.
    """

    def one_after_the_other(rows):
        home = group.send_back(rows, part)
        return join(join_parts(blocks, roles.model, dim=1) for _, blocks in cut(home, part))

    def at_the_same_time(rows):
        pieces = dict(cut(rows, part, group.esp_size))
        whole = [in_phases(roles, group, pieces.pop("far"))]
        for kind, blocks in pieces.items():
            home = group.sum_shards(group.exchanges[kind](blocks))
            whole.append(join_parts(home, roles.model, dim=1))
        return join(whole)

    return one_after_the_other if gather == "aas" else at_the_same_time


def in_phases(roles: Roles, group: ExpertGroup, rows):
    """Return every bucket [D, N_MP c, ...] of computed parts [P, c, ...], phase by phase, each beside a gather."""
    mp_size = roles.size(roles.model)
    blocks = rows.reshape((group.ep_size, group.esp_size) + rows.shape[1:])
    me = member(roles), lax.axis_index(roles.expert_shard)
    gathered, part = [], receive_part(group, rows_ahead(group, blocks, 0, me), 0, me)
    for j in range(1, group.ep_size):
        # gather j - 1 and phase j start together, when phase j - 1 and gather j - 2 are done
        ahead, part = lax.optimization_barrier((rows_ahead(group, blocks, j, me), part))
        following = receive_part(group, ahead, j, me)
        # XLA makes a transfer synchronous where only other transfers stand between its start and its end; this
        # barrier leaves a tuple there
        blocks, part = lax.optimization_barrier((blocks, part))
        whole = join_parts(part[None], roles.model)  # [N_MP, c, M]
        following, whole = lax.optimization_barrier((following, whole))
        gathered.append(declare_equal(whole, roles.model))  # optimization_barrier drops the replicated type
        part = following
    gathered.append(join_parts(part[None], roles.model))
    # rank r of the MP group got its part j from the EP member j places before its own, which differs among ranks
    first = lax.axis_index(roles.dense) * mp_size
    members = (first + jnp.arange(mp_size)) // group.esp_size % group.ep_size
    phase = (members[None] - jnp.arange(group.ep_size)[:, None]) % group.ep_size  # [D, N_MP]
    stacked = jnp.stack(gathered)  # [phase, N_MP, c, M]
    out = stacked[phase, jnp.arange(mp_size)[None]]  # [D, N_MP, c, M]
    return out.reshape((group.ep_size, -1) + out.shape[3:])


def rows_ahead(group: ExpertGroup, blocks, j: int, me):
    """Return what phase j sends, the rows of the EP member j places on, [Ns, c, M]; blocks [D, Ns, c, M] by source."""
    return lax.dynamic_index_in_dim(blocks, (me[0] + j) % group.ep_size, axis=0, keepdims=False)


def receive_part(group: ExpertGroup, ahead, j: int, me):
    """Phase j: return this device's part from the EP member j places back, summed over its shards, [c, M].

    Args:
      ahead: [Ns, c, M] of `rows_ahead`; me: index of this device's EP member and shard.
    """
    acc_dtype = jnp.promote_types(ahead.dtype, jnp.float32)
    pieces = []
    for i in range(group.esp_size):
        piece = lax.dynamic_index_in_dim(ahead, (me[1] + i) % group.esp_size, axis=0, keepdims=False)
        if i or j:
            piece = permute_apart(piece, group.axes, shift_pairs(group.ep_size, group.esp_size, j, i))
        pieces.append(piece.astype(acc_dtype))
    return sum(pieces[1:], pieces[0]).astype(ahead.dtype)
