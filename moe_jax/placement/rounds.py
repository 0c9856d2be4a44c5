"""Rounds of (source, destination) pairs in which a device sends at most once and receives at most once.

Inputs: edges of a send graph (a device may appear many times). Outputs: a round for each edge. The exact colouring
needs max(in degree, out degree) rounds, the least possible; shift rounds need more but serve every plan that fits them.
"""

from __future__ import annotations

import numpy as np


def colour_edges(src: np.ndarray, dst: np.ndarray, devices: int) -> np.ndarray:
    """Colour a bipartite multigraph: edges src, dst int [n] -> round int32 [n], using max-degree rounds.

    Alternating paths (Koenig): give an edge a colour free at both ends; if there is none, swap two colours along the
    path that starts at the destination. Linear in practice, but plain Python: about 10 us an edge, so only the layers
    whose send graph changed should be coloured again.
    """
    n = len(src)
    if not n:
        return np.zeros(0, np.int32)
    degree = int(max(np.bincount(src, minlength=devices).max(), np.bincount(dst, minlength=devices).max()))
    sends = [[-1] * degree for _ in range(devices)]  # sends[d][colour]: the edge that d sends in this round
    receives = [[-1] * degree for _ in range(devices)]
    ends = list(zip(src.tolist(), dst.tolist(), strict=True))
    for edge, (a, b) in enumerate(ends):
        free_a, free_b = sends[a].index(-1), receives[b].index(-1)
        if free_a != free_b:
            _swap_path(sends, receives, ends, b, free_a, free_b)
        sends[a][free_a] = receives[b][free_a] = edge
    colour = np.full(n, -1, np.int32)
    for row in sends:
        for c, edge in enumerate(row):
            if edge >= 0:
                colour[edge] = c
    return colour


def _swap_path(sends: list, receives: list, ends: list, b: int, want: int, other: int) -> None:
    """Free colour `want` at destination b, whose colour `other` is free, by swapping both along their path."""
    path = []
    at_destination, node, colour = True, b, want
    while True:
        edge = (receives if at_destination else sends)[node][colour]
        if edge < 0:
            break
        path.append((edge, colour))
        node = ends[edge][0] if at_destination else ends[edge][1]
        at_destination = not at_destination
        colour = other if colour == want else want
    for edge, old in path:
        a, d = ends[edge]
        if sends[a][old] == edge:
            sends[a][old] = -1
        if receives[d][old] == edge:
            receives[d][old] = -1
    for edge, old in path:
        a, d = ends[edge]
        new = other if old == want else want
        sends[a][new] = receives[d][new] = edge


def shift_rounds(layer: np.ndarray, src: np.ndarray, dst: np.ndarray, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort edges into rounds i -> i + shift (mod devices), shared by all layers.

    Returns:
      need: int [devices], how many rounds each shift needs (0 for shift 0).
      nth: int [n], how many edges with its (layer, source, shift) precede an edge: its round among those of its shift.
    """
    shift = (dst - src) % devices
    key = (layer.astype(np.int64) * devices + src) * devices + shift
    order = np.argsort(key, kind="stable")
    ranked = key[order]
    first = np.r_[True, ranked[1:] != ranked[:-1]] if len(key) else np.zeros(0, bool)
    index = np.arange(len(key))
    nth = np.empty(len(key), np.int64)
    nth[order] = index - np.maximum.accumulate(np.where(first, index, 0))
    need = np.zeros(devices, np.int64)
    np.maximum.at(need, shift, nth + 1)
    return need, nth


def within_group(key: np.ndarray) -> np.ndarray:
    """Number the entries of each group: key int [n], sorted -> rank within the run of equal keys, int64 [n]."""
    if not len(key):
        return np.zeros(0, np.int64)
    index = np.arange(len(key))
    first = np.r_[True, key[1:] != key[:-1]]
    return index - np.maximum.accumulate(np.where(first, index, 0))
