"""Checks of a placement and its loads, with one-line errors.

Inputs: raw user values. Outputs: int32 arrays of a known shape, or a UserError that names layer, expert, device and
rule.
"""

from __future__ import annotations

import numpy as np

from moe_jax.errors import UserError


def whole_array(name: str, value, ndim: int) -> np.ndarray:
    """Return a fresh int32 array of `ndim` dims; anything but whole numbers is an error."""
    array = np.asarray(value)
    if array.ndim != ndim or array.size == 0:
        raise UserError(f"{name} must have {ndim} dims and at least one entry, not shape {array.shape}")
    return _whole(name, array).astype(np.int32)


def rows(name: str, value, width: int) -> np.ndarray:
    """Return int32 rows [n, width]; None or an empty list is no rows."""
    array = np.zeros((0, width), np.int32) if value is None else np.asarray(value)
    if array.size == 0:
        return np.zeros((0, width), np.int32)
    if array.ndim != 2 or array.shape[1] != width:
        raise UserError(f"{name} must be rows of {width} integers, not an array of shape {array.shape}")
    return _whole(name, array).astype(np.int32)


def share_rows(value) -> np.ndarray:
    """Return shares as [m, 5] (layer, expert, device, share, source node); node -1 where none was given."""
    array = np.zeros((0, 5), np.int32) if value is None else np.asarray(value)
    if array.ndim == 2 and array.shape[1] == 4:
        array = np.concatenate([array, np.full((len(array), 1), -1, array.dtype)], axis=1)
    return rows("shares", array, 5)


def loads_array(loads) -> np.ndarray:
    """Return loads as int64 [L, S, E]; negative or fractional ones are an error that names the first of them."""
    loads = np.asarray(loads)
    if loads.ndim != 3:
        raise UserError(f"loads must have dims [layers, sources, experts], not shape {loads.shape}")
    if loads.dtype.kind not in "iuf":
        raise UserError(f"loads must be whole numbers of tokens, not {loads.dtype}")
    wrong = loads < 0
    if loads.dtype.kind == "f":
        wrong |= ~np.isfinite(loads) | (loads != np.floor(loads))
    if wrong.any():
        layer, source, expert = np.argwhere(wrong)[0]
        raise UserError(
            f"layer {layer}, source {source}, expert {expert}: load {loads[layer, source, expert]} is not a whole "
            "number of tokens >= 0; loads count routed tokens"
        )
    return loads.astype(np.int64)


def check_sizes(home: np.ndarray, devices: int, per_node: int, rule: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Check device and node counts and the name of every layer's rule."""
    if devices < 1 or per_node < 1 or devices % per_node:
        raise UserError(f"devices ({devices}) must be a positive multiple of devices_per_node ({per_node})")
    if len(rule) != home.shape[0]:
        raise UserError(f"rule has {len(rule)} entries for {home.shape[0]} layers; give one name, or one per layer")
    for layer, name in enumerate(rule):
        if name not in known:
            raise UserError(f"layer {layer}: rule {name!r} is not one of {', '.join(known)}")


def check_home(home: np.ndarray, devices: int) -> None:
    """Check that every expert has a home on an existing device."""
    wrong = np.argwhere((home < 0) | (home >= devices))
    if len(wrong):
        layer, expert = wrong[0]
        raise UserError(
            f"layer {layer}, expert {expert}: home device {home[layer, expert]} does not exist (rule: exactly one home "
            f"in 0..{devices - 1}); an expert without a home loses its parameters"
        )


def check_replicas(home: np.ndarray, replicas: np.ndarray, devices: int, replica_slots: int | None) -> None:
    """Check ids, repeated rows, replicas on the home itself, and the replica slots."""
    if not len(replicas):
        return
    _check_ids("replicas", replicas, *home.shape)
    _check_device("replica", replicas, devices)
    repeated = (replicas[1:] == replicas[:-1]).all(axis=1)
    if repeated.any():
        layer, expert, device = replicas[np.argmax(repeated)]
        raise UserError(
            f"layer {layer}, expert {expert}, device {device}: replica listed twice (rule: a device holds an expert "
            f"once); drop one row"
        )
    at_home = home[replicas[:, 0], replicas[:, 1]] == replicas[:, 2]
    if at_home.any():
        layer, expert, device = replicas[np.argmax(at_home)]
        raise UserError(
            f"layer {layer}, expert {expert}, device {device}: a replica on its own home would home it twice (rule: "
            "replicas lie on other devices); drop the row"
        )
    if replica_slots is not None:
        key = replicas[:, 0] * devices + replicas[:, 2]
        held = np.bincount(key, minlength=home.shape[0] * devices)
        if held.max() > replica_slots:
            layer, device = divmod(int(np.argmax(held > replica_slots)), devices)
            experts = replicas[key == layer * devices + device, 1].tolist()
            raise UserError(
                f"layer {layer}, device {device}: {len(experts)} replicas (experts {experts}) exceed replica_slots "
                f"({replica_slots}) (rule: at most replica_slots replicas per device and layer); replicate fewer "
                "experts or raise replica_slots"
            )


def check_shares(
    home: np.ndarray,
    replicas: np.ndarray,
    shares: np.ndarray,
    rule: tuple[str, ...],
    nodes: int,
    devices: int,
    one: int,
) -> None:
    """Check that share rows name holders, belong to layers that use them, and sum to one.

    Args:
      shares: int32 [m, 5] of `share_rows`, sorted by layer, expert, source node and device.
    """
    if not len(shares):
        return
    _check_ids("shares", shares, *home.shape)
    _check_device("share", shares, devices)
    layer, expert, device, share, node = shares.T
    where = "layer {}, expert {}, device {}: "
    unused = np.array([name != "shares" for name in rule])[layer]
    if unused.any():
        i = np.argmax(unused)
        raise UserError(
            where.format(*shares[i, :3]) + f"share rows in a layer whose rule is {rule[layer[i]]!r}, not 'shares'"
        )
    outside = (node < -1) | (node >= nodes) | (share < 0) | (share > one)
    if outside.any():
        i = np.argmax(outside)
        raise UserError(
            where.format(*shares[i, :3])
            + f"share {share[i]} must lie in 0..{one} and source node {node[i]} in 0..{nodes - 1} (-1: every node)"
        )
    expert_key = layer.astype(np.int64) * home.shape[1] + expert
    holds = np.zeros(home.size * devices, bool)
    holds[np.arange(home.size) * devices + home.ravel()] = True
    holds[_key(replicas, home.shape[1], devices)] = True
    not_held = ~holds[expert_key * devices + device]
    if not_held.any():
        raise UserError(
            where.format(*shares[np.argmax(not_held), :3]) + "share for a device that does not hold the expert"
        )
    group = expert_key * (nodes + 1) + node + 1
    repeated = np.diff(group * devices + device) == 0  # rows are sorted
    if repeated.any():
        raise UserError(where.format(*shares[np.argmax(repeated), :3]) + "share listed twice; add the two rows")
    start = np.flatnonzero(np.r_[True, np.diff(group) != 0])
    sums = np.add.reduceat(share.astype(np.int64), start)
    if (sums != one).any():
        i = int(np.argmax(sums != one))
        raise UserError(
            where.format(*shares[start[i], :3]) + f"shares of source node {node[start[i]]} sum to {sums[i]}, not {one} "
            "(rule: units of 2^-16 that sum to one)"
        )


def _whole(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "f" and np.isfinite(array).all() and (array == np.floor(array)).all():
        return array
    if array.dtype.kind not in "iu":
        raise UserError(f"{name} must hold whole numbers, not {array.dtype}")
    return array


def _check_ids(name: str, table: np.ndarray, layers: int, experts: int) -> None:
    wrong = (table[:, 0] < 0) | (table[:, 0] >= layers) | (table[:, 1] < 0) | (table[:, 1] >= experts)
    if wrong.any():
        layer, expert = table[np.argmax(wrong), :2]
        raise UserError(f"{name}: layer {layer}, expert {expert} does not exist ({layers} layers, {experts} experts)")


def _check_device(what: str, table: np.ndarray, devices: int) -> None:
    wrong = (table[:, 2] < 0) | (table[:, 2] >= devices)
    if wrong.any():
        layer, expert, device = table[np.argmax(wrong), :3]
        raise UserError(f"layer {layer}, expert {expert}, device {device}: {what} on a device outside 0..{devices - 1}")


def _key(replicas: np.ndarray, experts: int, devices: int) -> np.ndarray:
    return (replicas[:, 0].astype(np.int64) * experts + replicas[:, 1]) * devices + replicas[:, 2]
