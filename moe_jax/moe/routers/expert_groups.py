"""Experts in groups, and tokens that choose inside a few groups: with groups on nodes a token visits few nodes.

Inputs: scores [t, E] by which experts are chosen. Outputs: bool [t, E], the experts that each token may choose. Groups
are consecutive experts. With even homes without replicas, and as many groups as nodes, a group is a node, and a
token's experts are on `kept_groups` nodes at most. It is a knob of the routers `topk` and `sigmoid_bias`, which name
how a group is scored; the router `group_limited` is `topk` that insists on groups (`group_limited.py`).
Source: DeepSeek-V2, section 2.1.3 (best expert of a group); DeepSeek-V3, section 2.1.2 (its two best).
Letters: docs/notation.md; n groups.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from moe_jax.errors import UserError
from moe_jax.moe.routers.contract import ROUTERS, find


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupKnobs:
    """Groups of experts.

    Attributes:
      expert_groups: equal groups of consecutive experts; 0 is none.
      kept_groups: groups inside which a token chooses its K experts.
    """

    expert_groups: int = 0
    kept_groups: int = 1

    def check(self):
        if self.expert_groups < 0 or self.expert_groups and self.num_experts % self.expert_groups:
            raise UserError(
                f"MoEConfig.expert_groups ({self.expert_groups}) must divide MoEConfig.num_experts "
                f"({self.num_experts}), or be 0 for no groups"
            )
        if not self.expert_groups:
            return
        if not 1 <= self.kept_groups <= self.expert_groups:
            raise UserError(
                f"MoEConfig.kept_groups ({self.kept_groups}) must lie between 1 and MoEConfig.expert_groups "
                f"({self.expert_groups})"
            )
        inside = self.kept_groups * self.num_experts // self.expert_groups
        if self.top_k > inside:
            raise UserError(
                f"MoEConfig.top_k ({self.top_k}) must be at most the {inside} experts of MoEConfig.kept_groups "
                f"({self.kept_groups}) groups; raise kept_groups or lower MoEConfig.expert_groups"
            )
        if GroupKnobs not in find(self.router).knobs:
            *others, last = (name for name, router in ROUTERS.items() if GroupKnobs in router.knobs)
            raise UserError(
                f"MoEConfig.expert_groups ({self.expert_groups}) works with the routers {', '.join(others)} and "
                f"{last}, not with {self.router!r}; set it to 0"
            )


def within_groups(scores, config, best: int):
    """Return bool [t, E]: the experts of each token's best groups; ties go to the lowest group.

    Args:
      scores: [t, E] by which experts are chosen.
      config: expert_groups and kept_groups are read.
      best: a group's score is that of its best expert (1), or the sum of its two best (2), or of its only one.
    """
    groups = config.expert_groups
    grouped = scores.reshape(scores.shape[0], groups, -1)
    inside = grouped.shape[-1]
    score = jnp.max(grouped, axis=-1) if best == 1 else jnp.sum(lax.top_k(grouped, min(best, inside))[0], axis=-1)
    kept = lax.top_k(score, config.kept_groups)[1]
    stays = jnp.any(kept[:, :, None] == jnp.arange(groups, dtype=kept.dtype)[None, None], axis=1)
    return jnp.repeat(stays, inside, axis=1)
