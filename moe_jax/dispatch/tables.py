"""What the device knows of a placement: where each expert of a layer computes. Arrays only, all step inputs.

The host builds these from a `Placement`; a new plan with the same shapes runs in the same executable.
Letters: L MoE layers, E experts, D devices of one expert-parallel group, G groups (experts held in a layer) per device,
S bank slots per device.
"""

from __future__ import annotations

import jax
import numpy as np

from moe_jax.dispatch.route import record


@record
class Tables:
    """Tables of all layers. With a leading L they are a scan's input; without it they serve one layer.

    Attributes:
      device_of: int32 [L, E], device that computes each expert.
      group_of: int32 [L, E], the expert's group on that device.
      slots: int32 [D, L, G], bank slot behind each group of each device; inside `shard_map` the D is this device's 1.
    """

    device_of: jax.Array
    group_of: jax.Array
    slots: jax.Array


def even_tables(layers: int, experts: int, devices: int) -> Tables:
    """Return NumPy tables of plain expert parallelism: device d holds experts [d E/D, (d+1) E/D) of every layer.

    Bank slots are layer-major: slot l E/D + j is the j-th expert of layer l on this device.
    """
    held = experts // devices
    expert = np.broadcast_to(np.arange(experts, dtype=np.int32), (layers, experts))
    slots = np.arange(layers * held, dtype=np.int32).reshape(1, layers, held)
    return Tables(
        device_of=expert // held, group_of=expert % held, slots=np.broadcast_to(slots, (devices, layers, held))
    )
