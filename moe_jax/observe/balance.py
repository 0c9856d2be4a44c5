"""How evenly a step's tokens fall on devices and experts.

Inputs: loads integers [L, S, E] of one step. Outputs: one number per layer. Every expert counts at its home; device
loads under replicas are computed in `placement/routing.py`.
Letters: docs/notation.md.
"""

from __future__ import annotations

import numpy as np


def device_loads(loads: np.ndarray, home: np.ndarray, devices: int) -> np.ndarray:
    """Sum the tokens that each device computes when every expert runs at its home.

    Args:
      loads: integers [L, S, E], tokens that source s routed to expert e.
      home: integers [L, E], the device_id that owns each expert, in 0 .. devices - 1.
      devices: D.

    Returns:
      int64 [L, D], tokens.
    """
    loads, home = np.asarray(loads), np.asarray(home)
    L, _, E = loads.shape
    if home.shape != (L, E):
        raise ValueError(f"home {list(home.shape)} must be [layers, experts] = [{L}, {E}], as in loads")
    if home.size and not 0 <= home.min() <= home.max() < devices:
        raise ValueError(f"home holds device_ids {home.min()} .. {home.max()}; they must be in 0 .. {devices - 1}")
    per_device = np.zeros((L, devices), np.int64)
    np.add.at(per_device, (np.arange(L)[:, None], home), loads.sum(axis=1, dtype=np.int64))
    return per_device


def device_load_max_over_mean(loads: np.ndarray, home: np.ndarray, devices: int) -> np.ndarray:
    """Divide the fullest device's tokens by the mean over devices: max_d H[d] / mean_d H[d].

    1 when balanced, D at worst. A step waits for its fullest device, so this is the factor by which expert compute
    exceeds the balanced one.

    Args:
      loads: integers [L, S, E].
      home: integers [L, E].
      devices: D.

    Returns:
      float64 [L]. A layer without any token is balanced: 1.
    """
    per_device = device_loads(loads, home, devices)
    mean = per_device.mean(axis=1)
    return np.where(mean > 0, per_device.max(axis=1) / np.where(mean > 0, mean, 1.0), 1.0)


def dead_experts(loads: np.ndarray) -> np.ndarray:
    """Count the experts of each layer that got no token in this step.

    Args:
      loads: integers [L, S, E].

    Returns:
      int64 [L], from 0 to E.
    """
    return np.count_nonzero(np.asarray(loads).sum(axis=1, dtype=np.int64) == 0, axis=1)
