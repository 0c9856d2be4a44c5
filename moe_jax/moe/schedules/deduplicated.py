"""`deduplicated`: two of a token's choices on one device share a row on the wire, both ways.

Inputs and outputs are those of `s1`. A token with K choices has several on most of its devices, where K is not small
beside D. A row goes there once for every two of them, and with it which groups they are of and how the gate weights
them; the experts' hidden rows are weighted before the last product, what the two experts made is added where it was
made, and one row comes home. A backward that computes experts again then needs neither the way home nor the last
product of the forward: the gradient of a gate's weight is a sum over hidden rows. With K = 8 of 128 experts on 8
devices 5.8 rows travel where 8 do under `s1`. Not more than two share a row, so that rows at their experts stay in
memory of a size known before: as many as `s1` has. What finds no place in the first pass is sent as in `s1`.

Source: the deduplication of DeepEP's dispatch (DeepSeek-V3 Technical Report, 2024, section 3.2.2), by device here.
Letters: docs/notation.md; D devices of the group, R shared rows of one source, P R of them received.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.layer import ExpertParallel
from moe_jax.moe.permute import permute_tokens, sum_choices, take_rows
from moe_jax.moe.routing import Choice, Grouping, Parcel, Routing, bucket_lengths, destinations, pack, record, route
from moe_jax.moe.schedule import LayerSizes, Routed, Sent, layout_of, register
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.static_sizes import BucketRows, bucket_layout, round_up

SHARED = 2  # choices of a token on one device that share a row


@record
class Shared:
    """Where the choices of t tokens go.

    Attributes:
      device, group: int32 [t, K], of each choice.
      parcel: the shared rows of the first pass; each is the row of the choice that leads it.
      follows: bool [t, K, K], [t, k, j]: choice j has the row of choice k.
      rest: bool [t, K], choices that wait for a later pass.
    """

    device: jax.Array
    group: jax.Array
    parcel: Parcel
    follows: jax.Array
    rest: jax.Array


@register("deduplicated")
class Deduplicated(ExpertParallel):
    """Plain expert parallelism whose rows serve two choices; its drop groups are the N / N_MP tokens of one device.

    Attributes:
      travelling: where shared rows stand; layout: how many choices each of their buckets may bring, those of `s1`.
      mean: shared rows that even loads fill of a bucket.
      plain: moves what waits for later passes.
    """

    needs_results = False

    def __init__(self, roles: Roles, sizes: LayerSizes):
        super().__init__(roles, sizes)
        self.plain = ExpertParallel(roles, sizes)
        rows, self.mean = shared_rows(self.sizes, roles.size(roles.expert))
        self.travelling = layout_of(roles, rows)
        if max(self.most_passes, self.sizes.most_passes(self.travelling.rows.far, SHARED)) > 1:
            self.most_passes = 1 + self.plain.most_passes

    def buckets(self):
        return [*super().buckets(), ("shared rows", self.travelling, self.mean)]

    def route(self, tokens, choice, tables):
        groups, me, members = self.sizes.groups, self.member(), self.roles.size(self.roles.expert)
        with jax.named_scope("route"):
            device, group = destinations(tables, choice, groups)
            leads, follows = share(choice.keep_mask, device)
            leading = dataclasses.replace(choice, keep_mask=leads)
            routing = route(leading, device, jnp.zeros_like(group), members, 1)
            parcel = pack(routing, 0, self.travelling, self.sizes.config.top_k, 1, me)
            rest, mine = jnp.zeros_like(leads), jnp.int32(1)
            if self.most_passes > 1:
                most = bucket_lengths(self.layout, me)
                parcel = limit(parcel, routing, 1 + jnp.any(follows, axis=2), most)
                travels = parcel.row_of_choice < self.travelling.total
                travels = travels | jnp.any(follows & travels[:, :, None], axis=1)
                rest = choice.keep_mask & ~travels
                waiting = rest[..., None] & (device[..., None] == lax.iota(jnp.int32, members)[None, None])
                mine = 1 + jnp.max(-(-jnp.sum(waiting, axis=(0, 1), dtype=jnp.int32) // most))
            passes = self.passes_needed(mine)
        return Routed(tokens, choice.weights, Shared(device, group, parcel, follows, rest), passes)

    def pack(self, routed, index):
        """Return ((rows [R, M], the weights [P R, 2] of the rows that will arrive), `Sent`) of the first pass."""
        del index  # 0: later ones are `plain`'s
        shared, weights = routed.routing, routed.weights
        follows, parcel = shared.follows, shared.parcel
        with jax.named_scope("dispatch"):
            group = (shared.group + 1).astype(weights.dtype)  # 0 is no choice
            own = jnp.stack([group, weights], axis=-1)  # [t, K, 2]
            other = jnp.sum(jnp.where(follows[..., None], own[:, None], 0), axis=2)
            ahead = jnp.concatenate([own, other], axis=-1).reshape(-1, 2 * SHARED)
            ahead = self.group.send(permute_tokens(ahead, one_choice(parcel)), self.travelling)  # [P R, 4]
            arrived = lax.stop_gradient(ahead[:, ::2]).astype(jnp.int32) - 1
            received = Choice(expert_ids=arrived, weights=arrived, keep_mask=arrived >= 0)
            order = route(received, jnp.zeros_like(arrived), arrived, 1, self.sizes.groups)
            rows = bucket_layout(self.layout.total * self.group.esp_size, 1)
            at_experts = pack(order, 0, rows, SHARED, self.sizes.groups)
            grouping = Grouping(None, None, at_experts.counts[0])
            rows = permute_tokens(routed.tokens, parcel)
            return (rows, ahead[:, 1::2]), Sent(parcel, grouping, second=at_experts)

    def send(self, rows, sent):
        rows, weights = rows
        return super().send(rows, sent), weights

    def compute(self, received, sent, experts):
        rows, weights = received
        with jax.named_scope("dispatch"):
            rows = permute_tokens(rows, sent.second)
            weights = permute_tokens(weights.reshape(-1, 1), one_choice(sent.second))
        done = experts(rows, sent.grouping.group_sizes, weights[:, 0])
        with jax.named_scope("combine"):
            return sum_choices(done, sent.second)

    def unpack(self, returned, sent, weights):
        with jax.named_scope("combine"):
            return sum_choices(returned, sent.parcel)

    def run_pass(self, routed, index, experts):
        if isinstance(index, int):  # the first pass; what waits for later ones, whose index is traced, is sent as by s1
            return super().run_pass(routed, index, experts)
        shared, members = routed.routing, self.roles.size(self.roles.expert)
        with jax.named_scope("route"):
            waiting = Choice(expert_ids=shared.group, weights=routed.weights, keep_mask=shared.rest)
            routing = route(waiting, shared.device, shared.group, members, self.sizes.groups)
        return self.plain.run_pass(dataclasses.replace(routed, routing=routing), index - 1, experts)


def share(keep_mask, device):
    """Pair the choices of each token that go to one device, best first.

    Args:
      keep_mask: bool [t, K]; device: int32 [t, K].

    Returns:
      (bool [t, K], choices that lead a row; bool [t, K, K], [t, k, j]: choice j has the row that k leads).
    """
    choices = lax.iota(jnp.int32, device.shape[1])
    earlier = (choices[None] < choices[:, None])[None]
    same = (device[:, :, None] == device[:, None]) & keep_mask[:, :, None] & keep_mask[:, None]
    rank = jnp.sum(same & earlier, axis=2, dtype=jnp.int32)  # among those of its device
    leads = keep_mask & (rank % SHARED == 0)
    return leads, same & leads[:, :, None] & (rank[:, None] == rank[:, :, None] + 1)


def limit(parcel: Parcel, routing: Routing, together, most):
    """Return the parcel without the rows of a bucket from the first on with which it brings more than `most` choices.

    Args:
      routing: of the choices that lead a row, by device.
      together: int32 [t, K], choices in the row that each leads.
      most: of all buckets, or int32 [D].
    """
    choices, last = together.size, jnp.append(jnp.broadcast_to(most, routing.start.shape[0] - 1), 0)
    so_far = jnp.cumsum(take_rows(together.reshape(-1), routing.choice_at))  # in the order of the routing
    before = jnp.append(jnp.zeros((1,), so_far.dtype), so_far)[routing.start]  # [D + 1]
    brings = so_far[routing.place_of] - before[routing.destination]
    fits = jnp.append(brings <= last[routing.destination], False)  # [A + 1]
    row = jnp.where(fits[:-1].reshape(together.shape), parcel.row_of_choice, parcel.choice_of_row.size)
    chosen = jnp.where(fits[parcel.choice_of_row], parcel.choice_of_row, choices)
    return dataclasses.replace(parcel, choice_of_row=chosen, row_of_choice=row)


def one_choice(parcel: Parcel) -> Parcel:
    """Return a parcel of tokens of K choices as one of choices."""
    return dataclasses.replace(parcel, row_of_choice=parcel.row_of_choice.reshape(-1, 1))


def shared_rows(sizes: LayerSizes, members: int) -> tuple[BucketRows, float]:
    """Return (rows of the buckets that travel, how many even loads fill); sizes: of the tokens that a device gates.

    A token has as many shared rows for a member as where all sets of K experts are alike.
    """
    experts, top_k = sizes.config.num_experts, sizes.config.top_k
    here = -(-experts // members)  # on the fullest
    chances = (
        math.comb(here, held) * math.comb(experts - here, top_k - held) / math.comb(experts, top_k)
        for held in range(min(here, top_k) + 1)
    )
    plain = sizes.bucket_rows(members)
    mean = sizes.tokens * sum(math.ceil(held / SHARED) * chance for held, chance in enumerate(chances))
    if sizes.capacity is None and members > 1:
        if sizes.planned_rows is None:
            plain = BucketRows.even(sizes.rows_of(mean, sizes.sources * members))
        else:  # loads as planned, with as many choices in a row as even ones have
            every = sizes.tokens * top_k / members
            plain = plain.each(lambda rows: round_up(rows * mean / every, 8))
    return plain.each(lambda rows: min(sizes.worst_rows(SHARED), rows)), mean
