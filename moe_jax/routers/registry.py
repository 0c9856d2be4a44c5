"""The routers by name. A new router is a file with a class, and its line here."""

from __future__ import annotations

from moe_jax.errors import UserError
from moe_jax.routers.config import RouterConfig
from moe_jax.routers.contract import Router, RouterInputs
from moe_jax.routers.topk import TopK

ROUTERS: dict[str, type] = {"topk": TopK}


def routers() -> tuple[str, ...]:
    """Return the names of all routers."""
    return tuple(sorted(ROUTERS))


def build_router(config: RouterConfig) -> Router:
    """Return the router that `MoEConfig.router` names.

    Raises:
      UserError: an unknown name, or a configuration that this router cannot serve.
    """
    if config.router not in ROUTERS:
        raise UserError(f"MoEConfig.router ({config.router!r}) is unknown; choose one of {', '.join(routers())}")
    return ROUTERS[config.router](config)


def choose_experts(x, w_gate, config: RouterConfig, *, noise_key=None, token_ids=None):
    """Score all experts and choose those of each token, by the router that the config names.

    Computed in promote(x.dtype, float32), so a float64 run stays float64.

    Args:
      x: [t, M] tokens.
      w_gate: [M, E].
      config: the router.
      noise_key: PRNG key of this step and layer, or None for no noise (evaluation).
      token_ids: int32 [t], global index of each token; needed with a key.

    Returns:
      Choice and GateStats of these tokens; tokens are one drop group.
    """
    return build_router(config).choose(x, {"w_gate": w_gate}, RouterInputs(noise_key, token_ids))
