"""Configs from fields alone: those of a router's or planner's own options go into the config's `options`."""

import dataclasses

from moe_jax.moe import MoEConfig
from moe_jax.planning import PlannerConfig
from moe_jax.registry import OPTIONS, replaced


def configured(cls, fields):
    """Return a config of `cls`; a field that it lacks is of the options that have it."""
    options, common = (), {field.name for field in dataclasses.fields(cls)}
    left = fields.keys() - common
    for holder, defaults in OPTIONS.values():
        names = {field.name for field in dataclasses.fields(defaults)} - common if holder == cls.__name__ else set()
        options = replaced(options, dataclasses.replace(defaults, **{name: fields[name] for name in names & left}))
        left -= names
    assert not left, f"{cls.__name__} and its options lack {sorted(left)}"
    return cls(**{name: value for name, value in fields.items() if name in common}, options=options)


def planner_config(**fields):
    return configured(PlannerConfig, fields)


def layer_config(**fields):
    return configured(MoEConfig, fields)
