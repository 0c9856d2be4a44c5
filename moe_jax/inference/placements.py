"""Where the experts are while a model generates: homes of parameters, and the tables that a program reads.

Inputs: a model on its mesh. Outputs: homes int [L, E] and `Tables`, of several segments with experts {segment: that}.
Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np

from moe_jax.dispatch import even_tables as _even_tables
from moe_jax.models import LanguageModel
from moe_jax.models.segments import joined


def even_homes(model: LanguageModel):
    """Return int32 [L, E], the home device of every expert: neighbours in order, as many on each device."""
    found = {}
    for segment in model.expert_segments:
        experts, devices = segment.moe.num_experts, _devices(model, segment)
        own = np.repeat(np.arange(devices, dtype=np.int32), experts // devices)
        found[segment.name] = own[None].repeat(segment.config.moe_layers, axis=0)
    return joined(found)


def even_tables(model: LanguageModel):
    """Return the tables of even homes without replicas, as NumPy arrays."""
    return joined(
        {
            segment.name: _even_tables(segment.config.moe_layers, segment.moe.num_experts, _devices(model, segment))
            for segment in model.expert_segments
        }
    )


def _devices(model: LanguageModel, segment) -> int:
    roles = model.roles_of(segment)
    return roles.size(roles.expert)
