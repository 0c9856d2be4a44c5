"""Parallelism-coordinated EP&ESP exchange: rows travel among devices of equal place, then are gathered in the group.

Inputs and outputs as of `ExpertGroup`, which sends every row to all Ns shards of its expert, P = D Ns partners. After
tensor slicing's all-reduce the L devices of a group hold the same tokens; a schedule gives each 1 / L of them. Here a
device exchanges its part among the D / L devices of the same place in their groups only, where an MP group holds
several EP members then inside it, and an all-gather over the Ns shards brings each the rows of all. On the way back a
reduce-scatter over the shards precedes the exchange, so no row crosses a slow link once per shard: O(D / L) + O(L)
partners instead of O(D), at the same rows received. Sums over shards, neighbours in a node, are carried in float32.
Source: DeepSpeed-MoE (Rajbhandari et al. 2022), section 5.3, parallelism coordinated communication.
Letters: docs/notation.md; L devices of an MP group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax import lax

from moe_jax.moe.schedules.expert_group import ExpertGroup, cut, gather_shards, join, scatter_sum
from moe_jax.parallel.bucket_rows import BucketLayout
from moe_jax.parallel.exchange import make_exchange
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.varying import cast_varying


@dataclasses.dataclass(frozen=True, eq=False)
class CoordinatedGroup(ExpertGroup):
    """The product of EP and ESP groups; `exchanges` are among EP members of equal place.

    Attributes:
      shard_axes: mesh axes of the ESP group.
    """

    shard_axes: tuple[str, ...]

    def send(self, rows, layout: BucketLayout):
        return join(self._to_shards(self.exchanges[kind](blocks)) for kind, blocks in cut(rows, layout))

    def send_counts(self, counts):
        return self._to_shards(self.exchanges["far"](counts))

    def send_back(self, rows, layout: BucketLayout):
        pieces = cut(rows, layout, self.esp_size)
        return join(self.exchanges[kind](self._sum_of_shards(blocks)) for kind, blocks in pieces)

    def _to_shards(self, blocks):
        """Return [n Ns, ...], each shard's [n, ...], sources (member, shard) in order."""
        if self.esp_size == 1:
            return blocks
        every = gather_shards(cast_varying(blocks, self.shard_axes), self.shard_axes, 1)
        return every.reshape((-1,) + blocks.shape[1:])

    def _sum_of_shards(self, blocks):
        """Return [n, ...], the sum over the shards of what they computed of this device's rows; blocks [n Ns, ...]."""
        if self.esp_size == 1:
            return blocks
        split = blocks.reshape((-1, self.esp_size) + blocks.shape[1:])
        return scatter_sum(split, self.shard_axes, 1)


def build_coordinated_group(roles: Roles) -> CoordinatedGroup:
    """Return the group of this mesh."""
    ep_size, esp_size = roles.size(roles.expert), roles.size(roles.expert_shard)
    exchanges = {"far": _by_place(roles), "own": lambda blocks: blocks}
    exchanges["node"] = make_exchange(roles.expert, ep_size, "all_to_all", 1, inside=roles.members_per_node)
    if roles.members_per_node >= ep_size:
        exchanges["node"] = exchanges["far"]
    return CoordinatedGroup(
        axes=roles.expert + roles.expert_shard,
        ep_size=ep_size,
        esp_size=esp_size,
        exchanges=exchanges,
        shard_axes=roles.expert_shard,
    )


def _by_place(roles: Roles) -> Callable:
    """Return exchange(x [D, ...]) -> [D, ...]: across MP groups among equal places, then inside the MP group."""
    inside = tuple(axis for axis in roles.expert if axis in roles.model)
    across = tuple(axis for axis in roles.expert if axis not in roles.model)
    inner, outer = roles.size(inside), roles.size(across)

    def exchange(blocks):
        x = blocks.reshape((outer, inner) + blocks.shape[1:])
        for axes, size, dim in ((across, outer, 0), (inside, inner, 1)):
            if size > 1:
                x = lax.all_to_all(cast_varying(x, axes), axes, split_axis=dim, concat_axis=dim, tiled=True)
        return x.reshape(blocks.shape)

    return exchange
