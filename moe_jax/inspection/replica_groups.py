"""Which devices a collective joins, in every way that HLO text writes it.

    replica_groups={{0,1},{2,3}}                            the lists themselves
    replica_groups=[2,4]<=[8]  or  [4,2]<=[2,4]T(1,0)       iota, reshaped and transposed, rows are groups
    replica_groups=mesh['a'=2,'b'=4] {'b'}                  a mesh and the axes that a group spans
    replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}    likewise, of ids in another order
    source_target_pairs={{0,1},{1,2}}                       of a permute

Inputs: the attributes of an instruction. Outputs: tuples of device ids, or of (source, target) pairs.
"""

from __future__ import annotations

import re

import numpy as np

from moe_jax.errors import UserError

Groups = tuple[tuple[int, ...], ...]


def replica_groups(attributes: str, devices: int) -> Groups:
    """Return the groups of a collective; one of all devices where none are written.

    Raises:
      UserError: groups written in a way that is not known here.
    """
    _, found, text = attributes.partition("replica_groups=")
    if text.startswith("mesh["):
        return _mesh_groups(text, devices)
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota_groups(*iota.groups())
    if not found or text.startswith("{}"):
        return (tuple(range(devices)),)
    if lists := re.match(r"\{((?:\{[\d,]+\},?)+)\}", text):
        return tuple(tuple(_ints(one)) for one in re.findall(r"\{([\d,]+)\}", lists.group(1)))
    raise UserError(f"replica groups written as {text[:60]!r} are not known here")


def _iota_groups(shape: str, dims: str, turn: str | None) -> Groups:
    ids = np.arange(np.prod(_ints(dims))).reshape(_ints(dims))
    if turn:
        ids = ids.transpose(_ints(turn))
    return tuple(map(tuple, ids.reshape(_ints(shape)).tolist()))


def _mesh_groups(text: str, devices: int) -> Groups:
    found = re.match(
        r"mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? ?\{([^}]*)\}", text
    )
    if not found:
        raise UserError(f"replica groups written as {text[:160]!r} are not known here")
    mesh, shape, turn, listed, spanned = found.groups()
    axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'\s*=\s*(\d+)", mesh)]
    wanted = re.findall(r"'([^']+)'", spanned)
    if ":" in spanned or not set(wanted) <= set(dict(axes)):
        raise UserError(f"replica groups written as {text[:160]!r} are not known here: a part of an axis, or no axis")
    sizes, names = [size for _, size in axes], [name for name, _ in axes]
    ids = np.array(_ints(listed)) if listed else np.arange(np.prod(sizes))
    if shape:
        ids = ids.reshape(_ints(shape))
        ids = ids.transpose(_ints(turn)) if turn else ids
    if ids.size != devices:
        raise UserError(f"the mesh of {text[:60]!r} has {ids.size} devices and the program {devices}")
    inner = [names.index(name) for name in wanted]
    outer = [place for place in range(len(axes)) if place not in inner]
    grid = ids.reshape(sizes).transpose(outer + inner)
    return tuple(map(tuple, grid.reshape(-1, int(np.prod([sizes[i] for i in inner], dtype=int))).tolist()))


def source_target_pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """Return the (source, target) pairs of a permute."""
    found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    pairs = re.findall(r"\{(\d+),(\d+)\}", found.group(1)) if found else []
    return tuple((int(a), int(b)) for a, b in pairs)


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
