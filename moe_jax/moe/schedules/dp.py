"""`dp`: experts replicated or gathered, tokens stay; the ZeRO / FSDP baseline.

Source: the baselines of FasterMoE (ZeRO 2 and 3) and Hecate (FSDP).
"""

from __future__ import annotations

from moe_jax.errors import UserError
from moe_jax.moe.layer import ExpertParallel
from moe_jax.moe.schedule import LayerSizes, register
from moe_jax.parallel.mesh import Roles


@register("dp")
class DataParallel(ExpertParallel):
    """Plain expert parallelism of one member: every device computes all experts."""

    moves_tokens = False
    one_piece = False

    def __init__(self, roles: Roles, sizes: LayerSizes):
        for name in ("expert", "expert_shard", "model"):
            size = roles.size(getattr(roles, name))
            if size > 1:
                raise UserError(
                    f"MoEConfig.schedule ('dp') needs MeshConfig.{name} = 1, not {size}: every device computes all "
                    f"experts; set MeshConfig.{name} = 1 and MeshConfig.data = {roles.mesh.size}"
                )
        super().__init__(roles, sizes)
