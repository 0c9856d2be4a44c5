"""`topology`: at most a part of a device's tokens are computed on another node.

Inputs: as in `topk.py`, and this device's tables. Of the tokens whose best expert is remote the L with the highest
score keep it, ties to the lowest token; all others, and choices beyond the first, are local, that is of experts all of
whose destinations are on the device's node. Weights are the softmax of the chosen scores.
L = floor(T W_net / (M_w W_local)) of T tokens: W_net of a node's adapters and W_local of a device's link from
MoEConfig.cluster, M_w the node's devices (the paper prints the inverse); or floor(T remote_fraction).
Source: FasterMoE, section 4.3; a fraction of 0.14, and the weights, from its release. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.cluster import read_cluster
from moe_jax.errors import UserError
from moe_jax.moe.routers.contract import RouterPlace, register
from moe_jax.moe.routers.scores import gate_logits, keep_within_capacity, of_real
from moe_jax.moe.routers.topk import TopK
from moe_jax.moe.routing import Choice
from moe_jax.registry import options_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Options of the router `topology`.

    Attributes:
      remote_fraction: part of a device's tokens that may be computed on another node; None takes it from the bandwidths
        of MoEConfig.cluster.
    """

    remote_fraction: float | None = None

    def __post_init__(self):
        if self.remote_fraction is not None and not 0 <= self.remote_fraction <= 1:
            raise UserError(f"Topology.remote_fraction ({self.remote_fraction}) must lie between 0 and 1")


@register("topology")
class TopologyRouter(TopK):
    """Top-K, most of it on the own node."""

    options: Topology = Topology()
    ignores = ("routed_scale", "expert_groups", "kept_groups")
    replays = False
    by_token = False

    @classmethod
    def check(cls, config):
        super().check(config)
        if options_in(config, cls.options).remote_fraction is None and not config.cluster:
            raise UserError(
                "MoEConfig.router ('topology') needs MoEConfig.cluster, a file with the bandwidths of its nodes, or "
                "Topology.remote_fraction; FastMoE's release takes 0.14"
            )

    def __init__(self, config, place: RouterPlace | None = None):
        super().__init__(config, place)
        given = self.options.remote_fraction
        if given is None:  # a figure that the file lacks is a UserError
            cluster, asks = read_cluster(config.cluster), "MoEConfig.router = 'topology'"
            net, own = cluster.need("inter_bandwidth", asks), cluster.need("intra_bandwidth", asks)
            given = min(1.0, net / (cluster.need("devices_per_node", asks) * own))
        self.fraction = given
        if place is None:
            return
        roles = place.roles
        per_node, shards, members = roles.config.devices_per_node, roles.config.expert_shard, roles.size(roles.expert)
        inside = per_node // shards
        # where nodes cut an expert, or the expert-parallel group into unequal parts, L means nothing
        if per_node and (per_node % shards or (members % inside if inside < members else inside % members)):
            raise UserError(
                f"MeshConfig.devices_per_node ({per_node}) must cut {members} expert-parallel members of "
                f"MeshConfig.expert_shard ({shards}) devices into whole members and equal nodes with MoEConfig.router "
                "= 'topology'; change MeshConfig.expert, expert_shard or data"
            )
        nodes = members // roles.members_per_node
        inside = config.num_experts // nodes
        if config.top_k > inside:
            raise UserError(
                f"MoEConfig.top_k ({config.top_k}) must be at most the {inside} experts of a node with "
                f"MoEConfig.router = 'topology' ({config.num_experts} experts on {nodes} nodes); raise "
                "MoEConfig.num_experts or MeshConfig.devices_per_node"
            )
        if place.redirects and nodes > 1:
            raise UserError(
                "MoEConfig.router ('topology') chooses by where experts are, and this plan decides that after the "
                "gate; set PlannerConfig.when = 'ahead' and calibrate = False, or PlannerConfig.name = 'fastermoe'"
            )
        if roles.model and not place.splits_tokens and nodes > 1:
            raise UserError(
                "MoEConfig.router ('topology') counts the tokens of a device, and MoEConfig.schedule gates those of a "
                "whole model-parallel group; set MoEConfig.schedule = 's1', 'pairwise' or 'ring', or MeshConfig.model "
                "= 1"
            )

    def most_crossing(self, tokens):
        """Return L of each device that gates: one choice of at most so many of its tokens leaves the node."""
        if self.place is None:
            return None
        gating = self.place.roles.size(self.place.roles.model) if self.place.splits_tokens else 1
        return gating * self.most_remote(tokens // gating)

    def most_remote(self, tokens: int) -> int:
        """Return L of so many tokens, gated together."""
        return math.floor(tokens * self.fraction + 1e-9)

    def choose(self, x, params, inputs):
        config = self.config
        logits = gate_logits(x, params["w_gate"], config.router_dtype)
        noisy = self.with_noise(logits, x, params, inputs)
        scores, local = lax.stop_gradient(noisy), self.local_experts(inputs.tables)
        top_k, most = config.top_k, of_real(self.most_remote, x.shape[0], inputs.real)
        # remote experts come behind all local ones, in order, where a plan leaves fewer than K of these
        _, inside = lax.top_k(jnp.where(local[None], scores, -jnp.inf), top_k)
        value, first = lax.top_k(scores, top_k)
        remote = ~local[first[:, 0]] if inputs.real is None else ~local[first[:, 0]] & inputs.real
        order = jnp.argsort(-jnp.where(remote, value[:, 0], -jnp.inf), stable=True)
        index = jnp.arange(order.shape[0], dtype=jnp.int32)
        rank = jnp.zeros_like(order, jnp.int32).at[order].set(index, unique_indices=True)  # ties to the lowest index
        crossing = jnp.concatenate([first[:, :1], inside[:, : top_k - 1]], axis=1)
        expert_ids = jnp.where((remote & (rank < most))[:, None], crossing, inside)
        chosen = jnp.take_along_axis(noisy, expert_ids, axis=-1)
        weights = jax.nn.softmax(chosen, axis=-1)
        keep_mask = keep_within_capacity(expert_ids, chosen, config, inputs.real)
        if not config.renormalize:  # the chosen experts' probabilities among all
            weights = jnp.take_along_axis(jax.nn.softmax(noisy, axis=-1), expert_ids, axis=-1)
        choice = Choice(expert_ids=expert_ids, weights=weights, keep_mask=keep_mask)
        log_probs = jax.nn.log_softmax(noisy, axis=-1)
        return choice, self.statistics(
            choice, jnp.exp(log_probs), log_probs, jax.scipy.special.logsumexp(logits, axis=-1), inputs.real
        )

    def local_experts(self, tables):
        """Return bool [E]: the experts all of whose destinations in this device's tables are on its node."""
        if self.place is None or self.place.roles.members_per_node >= self.place.roles.size(self.place.roles.expert):
            return jnp.ones((self.config.num_experts,), bool)
        roles, inside = self.place.roles, self.place.roles.members_per_node
        # a candidate with no more than the one before it gets no token
        before = jnp.concatenate([jnp.zeros_like(tables.dest_num[:, :1]), tables.dest_num[:, :-1]], axis=1)
        node = tables.dest_slot // self.place.slots // inside
        me = lax.axis_index(roles.expert) // inside
        return jnp.all((tables.dest_num <= before) | (node == me), axis=1)
