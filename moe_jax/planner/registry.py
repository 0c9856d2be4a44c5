"""The balancers that there are: each planner's file declares its own, and nothing else names them.

Inputs: the decorator `balancer` over a planner's class. Outputs: `BALANCERS`, what was declared by name, and
`build_planner`. The package imports every file in its folder, so a new file is a new balancer. `PlannerConfig` takes
its knobs from here (config.py).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping

from moe_jax.planner.options import PlannerOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balancer:
    """What a planner's file says about itself.

    Attributes:
      name: as in `PlannerConfig.name`; aliases: further names for the same, left out where all are listed.
      planner: the class that searches; its `original` and `original_costs` are the system that it comes from.
      knobs: dataclass of the fields of `PlannerConfig` that this planner brings, None for none.
      defaults: value of a field of `PlannerConfig` that was left at None, where this planner has one of its own.
      after_gate: whether `when = 'after_gate'` works.
    """

    name: str
    planner: type
    aliases: tuple[str, ...] = ()
    knobs: type | None = None
    defaults: Mapping[str, typing.Any] = dataclasses.field(default_factory=dict)
    after_gate: bool = False


BALANCERS: dict[str, Balancer] = {}
_ALIASES: dict[str, str] = {}

Class = typing.TypeVar("Class", bound=type)


def balancer(name: str, *, aliases: tuple[str, ...] = (), **declared) -> typing.Callable[[Class], Class]:
    """Declare the decorated planner class under `name`; the other arguments are those of `Balancer`."""

    def declare(planner: Class) -> Class:
        taken = {*BALANCERS, *_ALIASES} & {name, *aliases}
        assert not taken, f"two planners are called {', '.join(sorted(taken))}"
        _check_knobs(name, declared.get("knobs"))
        BALANCERS[name] = Balancer(name=name, planner=planner, aliases=aliases, **declared)
        _ALIASES.update(dict.fromkeys(aliases, name))
        return planner

    return declare


def _check_knobs(name: str, knobs: type | None) -> None:
    """Refuse a knob that another planner has too: all are fields of one `PlannerConfig`, where one would replace it.

    Planners may share a class of knobs.
    """
    own = _fields(knobs) - _fields(PlannerOptions)
    assert len(own) == len(_fields(knobs)), f"planner {name!r} has knobs that are options of all planners"
    for other in BALANCERS.values():
        both = own & _fields(other.knobs) if other.knobs is not knobs else set()
        assert not both, f"planners {other.name!r} and {name!r} both have a knob {', '.join(sorted(both))}; rename one"


def _fields(knobs: type | None) -> set[str]:
    return set() if knobs is None else {field.name for field in dataclasses.fields(knobs)}


def knob(default: typing.Any, doc: str) -> typing.Any:
    """Return a dataclass field with its meaning, for the knobs of a balancer; None: see `Balancer.defaults`."""
    return dataclasses.field(default=default, metadata={"doc": doc})


def find(name: str) -> Balancer | None:
    """Return what was declared under a name or an alias, None where nothing was."""
    return BALANCERS.get(_ALIASES.get(name, name))


def names() -> tuple[str, ...]:
    """Return the names of all balancers: 'none', which plans nothing, then by the alphabet."""
    return tuple(sorted(BALANCERS, key=lambda name: (name != "none", name)))


def names_after_gate() -> tuple[str, ...]:
    """Return the names of those that can decide after the gate."""
    return tuple(name for name in names() if BALANCERS[name].after_gate)


def build_planner(config):
    """Return the planner that `config.name` names, with that planner's own defaults filled in."""
    found = find(config.name)
    assert found is not None, config.name
    return found.planner(config.settled())
