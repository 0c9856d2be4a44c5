"""`s2`: MP pauses after the gate. Every device gates all tokens of its MP group and carries its part of each bucket.

Inputs: the t tokens of this device's MP group, equal on the group. Outputs: the same tokens, transformed. A bucket of C
rows is cut into N_MP parts of c rows; device r of the MP group sends part r to the experts. On the way back each part
that arrives is passed on to the whole MP group, at once (SAA) or in one all-gather at the end (AAS). Source: Parm,
sections III-B and III-D.

Sending (cut, then all-to-all) and collecting (all-to-all, then gather) are transposes of each other, so the gradient of
one is the other, and the backward overlaps in the same way.
Letters: docs/notation.md; C = N_MP c.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.exchange import permute_apart, shift_pairs
from moe_jax.collectives.replicated import declare_equal, join_parts
from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.dispatch import Parcel, Tables, destinations, largest_bucket, pack, permute_tokens, route, unpermute_tokens
from moe_jax.mesh.roles import Roles
from moe_jax.schedules.contract import LayerSizes, ScheduleOptions, register
from moe_jax.schedules.expert_group import ExpertGroup, build_expert_group, from_groups, to_groups
from moe_jax.schedules.expert_parallel import build_s1
from moe_jax.schedules.mp_tokens import from_replicated, to_replicated
from moe_jax.schedules.passes import passes_needed
from moe_jax.schedules.staged import Sent, StagedSchedule, finish_passes


@register("s2")
def build_s2(roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
    """Build Parm's second schedule; its drop groups are the N tokens of an MP group."""
    mp_size = roles.size(roles.model)
    if mp_size == 1:
        return build_s1(roles, sizes, options)  # nothing to pause
    group = build_expert_group(roles, options.transport)
    rows = whole_bucket_rows(sizes, group.ep_size, mp_size)
    most = sizes.most_passes(rows)
    collect = make_collect(roles, group, options.gather)

    def send(x, token_ids, gate, place):
        x = to_replicated(x, roles, options)
        with jax.named_scope("gate"):
            choice, stats = gate(x, token_ids)
        with jax.named_scope("route"):
            device, expert = destinations(_lead_tables(place(stats), roles), choice, sizes.groups)
            routing = route(choice, device, expert, group.ep_size, sizes.groups)
            needed = passes_needed(largest_bucket(routing, sizes.groups), rows, most, roles.all)
        sorted_rows, group_sizes, way = deliver(x, routing, 0)
        later = (x, routing, needed, lax.stop_gradient(stats)) if most > 1 else None
        return Sent(sorted_rows, group_sizes, (choice.weights, way, later)), stats, needed

    def deliver(x, routing, index):
        with jax.named_scope("dispatch"):
            whole = pack(routing, index, rows, sizes.top_k, sizes.groups)
            # part r of a bucket is the bucket of a finer pass
            part = index * mp_size + lax.axis_index(roles.model)
            mine = pack(routing, part, rows // mp_size, sizes.top_k, sizes.groups)
            arriving = group.send_counts(mine.counts)
            received = _send_tokens(group, collect, roles.model, x, mine, whole, arriving)
            sorted_rows, group_sizes, grouping = to_groups(received, arriving)
        return sorted_rows, group_sizes, (whole, mine.counts, arriving, grouping)

    def bring_home(done, weights, way):
        whole, counts, arriving, grouping = way
        with jax.named_scope("combine"):
            home = _collect_rows(group, collect, roles.model, from_groups(done, grouping), counts, arriving)
            return unpermute_tokens(home, weights, whole)

    def finish(done, context, experts):
        return from_replicated(finish_passes(done, context, experts, deliver, bring_home, most), roles, options)

    return StagedSchedule(send, finish)


def whole_bucket_rows(sizes: LayerSizes, ep_size: int, mp_size: int) -> int:
    """Return C, rows of a bucket that the `mp_size` devices of an MP group cut into equal parts."""
    return mp_size * math.ceil(sizes.bucket_rows(ep_size) / mp_size)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _send_tokens(group, collect, axes, x, mine: Parcel, whole: Parcel, arriving):
    """Send this device's part of every bucket to the experts: [t, M] -> [P c, M]."""
    return group.send(permute_tokens(x, mine), mine.counts, arriving)


def _send_tokens_fwd(group, collect, axes, x, mine, whole, arriving):
    tokens = jnp.zeros((x.shape[0], 0), x.dtype)  # carries t and no bytes
    return _send_tokens(group, collect, axes, x, mine, whole, arriving), (tokens, mine.counts, whole, arriving)


def _send_tokens_bwd(group, collect, axes, residuals, d):
    tokens, counts, whole, arriving = residuals
    rows = collect(d, counts, arriving)
    like = cast_varying(jnp.zeros((tokens.shape[0], d.shape[-1]), d.dtype), varying_axes(rows))
    return jax.vjp(lambda x: permute_tokens(x, whole), like)[1](rows)[0], None, None, None


_send_tokens.defvjp(_send_tokens_fwd, _send_tokens_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _collect_rows(group, collect, axes, rows, counts, arriving):
    """Bring computed rows to every device of their MP group: [P c, M] -> [D C, M]."""
    return collect(rows, counts, arriving)


def _collect_rows_fwd(group, collect, axes, rows, counts, arriving):
    return collect(rows, counts, arriving), (counts, arriving)


def _collect_rows_bwd(group, collect, axes, residuals, d):
    counts, arriving = residuals
    blocks = d.reshape(group.ep_size, -1, d.shape[-1])
    part = blocks.shape[1] // math.prod(lax.axis_size(axis) for axis in axes)
    own = lax.dynamic_slice_in_dim(cast_varying(blocks, axes), lax.axis_index(axes) * part, part, axis=1)
    return group.send(own.reshape(-1, d.shape[-1]), counts, arriving), None, None


_collect_rows.defvjp(_collect_rows_fwd, _collect_rows_bwd)


def make_collect(roles: Roles, group: ExpertGroup, gather: str):
    """Return collect(rows [P c, M], counts [D, G], arriving [P, G]) -> [D C, M], equal on the MP group; no gradient.

    Args:
      gather: 'aas' or 'saa'.
    """
    mp_size = roles.size(roles.model)

    def one_after_the_other(rows, counts, arriving):
        home = group.send_back(rows, counts, arriving).reshape(group.ep_size, -1, rows.shape[-1])
        return join_parts(home, roles.model, dim=1).reshape(-1, rows.shape[-1])

    def at_the_same_time(rows, counts, arriving):
        del counts, arriving
        blocks = rows.reshape(group.ep_size, group.esp_size, -1, rows.shape[-1])
        me = lax.axis_index(roles.expert), lax.axis_index(roles.expert_shard)
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
        member = (first + jnp.arange(mp_size)) // group.esp_size % group.ep_size
        phase = (member[None] - jnp.arange(group.ep_size)[:, None]) % group.ep_size  # [D, N_MP]
        stacked = jnp.stack(gathered)  # [phase, N_MP, c, M]
        return stacked[phase, jnp.arange(mp_size)[None]].reshape(-1, rows.shape[-1])

    return one_after_the_other if gather == "aas" else at_the_same_time


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
