"""`group_limited`: `topk` inside each token's best groups of experts. Its knobs and the choice: `expert_groups.py`."""

from __future__ import annotations

from moe_jax.errors import UserError
from moe_jax.moe.routers.contract import register
from moe_jax.moe.routers.topk import TopK


@register("group_limited")
class GroupLimited(TopK):
    """Top-K of the softmax inside groups. Source: DeepSeek-V2, section 2.1.3."""

    @classmethod
    def check(cls, config):
        super().check(config)
        if not config.expert_groups:
            raise UserError(
                "MoEConfig.router ('group_limited') needs MoEConfig.expert_groups, and 0 is none; set it to a divisor "
                f"of MoEConfig.num_experts ({config.num_experts}), such as the number of nodes"
            )
