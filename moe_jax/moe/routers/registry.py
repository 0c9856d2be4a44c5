"""The routers that there are: each router's file declares its own, and nothing else names them.

Inputs: the decorator `router` over a router's class. Outputs: `ROUTERS`, what was declared by name, and `build_router`.
The package imports every file in its folder, so a new file is a new router (docs/adding_a_router.md).
"""

from __future__ import annotations

import dataclasses
import typing

from moe_jax.errors import UserError
from moe_jax.moe.routers.contract import Router, RouterInputs, RouterPlace
from moe_jax.moe.routers.options import RouterOptions


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a router's file says about itself: its class, and the dataclass of the fields of `MoEConfig` it brings."""

    router: type
    knobs: type | None


ROUTERS: dict[str, Declared] = {}

Class = typing.TypeVar("Class", bound=type)


def router(name: str, *, knobs: type | None = None) -> typing.Callable[[Class], Class]:
    """Declare the decorated class as the router `name` of `MoEConfig.router`."""

    def declare(cls: Class) -> Class:
        assert name not in ROUTERS, f"two routers are called {name}"
        ROUTERS[name] = Declared(cls, knobs)
        return cls

    return declare


def routers() -> tuple[str, ...]:
    """Return the names of all routers."""
    return tuple(sorted(ROUTERS))


def find(name: str) -> Declared:
    """Return what was declared under a name.

    Raises:
      UserError: nothing was.
    """
    if name not in ROUTERS:
        raise UserError(f"MoEConfig.router ({name!r}) is unknown; choose one of {', '.join(routers())}")
    return ROUTERS[name]


def check_knobs(config: RouterOptions, used: set[str]) -> None:
    """Raise a UserError for an option of routing that is bound and that none of the routers `used` reads.

    Args:
      config: of the model's layers; used: names of their routers, which may differ from layer to layer.
    """
    classes = [find(name).router for name in used]
    routers_used = " or ".join(map(repr, sorted(used)))
    for field in dataclasses.fields(config):
        if all(field.name in cls.ignores for cls in classes) and getattr(config, field.name) != field.default:
            raise UserError(
                f"MoEConfig.{field.name} ({getattr(config, field.name)!r}) is not read by MoEConfig.router = "
                f"{routers_used}; leave it at {field.default!r}, or choose another router"
            )
    grouped = any(cls.in_groups for cls in classes)
    for name in routers():
        owner = find(name)
        read = name in used or name == "group_limited" and grouped
        for field in () if owner.knobs is None or read else dataclasses.fields(owner.knobs):
            value = getattr(config, field.name)
            if value != field.default and field.name != "routed_scale":  # which several read: see `ignores`
                raise UserError(
                    f"MoEConfig.{field.name} ({value!r}) is a knob of MoEConfig.router = {name!r}, and the router is "
                    f"{routers_used}; leave it at {field.default!r}, or set MoEConfig.router"
                )


def build_router(config: RouterOptions, place: RouterPlace | None = None) -> Router:
    """Return the router that `MoEConfig.router` names.

    Args:
      place: where it runs; None is one device without a mesh.

    Raises:
      UserError: a place in which this router cannot work.
    """
    return find(config.router).router(config, place)


def choose_experts(x, w_gate, config: RouterOptions, *, noise_key=None, token_ids=None):
    """Score all experts and choose those of each token, by a router that needs no more than a gate weight.

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
