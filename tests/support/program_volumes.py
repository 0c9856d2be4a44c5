"""The collectives of a lowered program: kind, group, elements, number of calls."""

import collections
import re

import numpy as np

KINDS = {
    "stablehlo.all_to_all": "all_to_all",
    "stablehlo.all_gather": "all_gather",
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.collective_permute": "permute",
}


def operations(op):
    """Yield all operations inside `op`."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from operations(inner.operation)


def groups_of(roles, axes):
    """Return the device groups that span `axes`, as a set of sets of device indices."""
    mesh = roles.mesh
    index = np.arange(mesh.size).reshape(mesh.devices.shape)
    kept = [i for i, axis in enumerate(mesh.axis_names) if axis not in axes]
    inside = [i for i, axis in enumerate(mesh.axis_names) if axis in axes]
    table = np.transpose(index, kept + inside).reshape(-1, roles.size(axes))
    return frozenset(map(frozenset, table.tolist()))


def replica_groups(attribute, roles):
    """Return the device groups of a collective; newer jax names their mesh axes, older ones list the devices."""
    if axes := re.findall(r'axis_ref<name = "(\w+)">', str(attribute)):
        return groups_of(roles, axes)
    return frozenset(map(frozenset, np.array(attribute).tolist()))


def collectives(lowered, roles, permutes):
    """Count the collectives of a lowered program that span more than one device.

    Args:
      lowered: of `jax.jit(...).lower(...)`.
      roles: the mesh.
      permutes: names of the groups that rounds of messages may be of, of which there must be one.

    Returns:
      Counter of (is_float, kind, group, elements): the group as a set of sets of devices, of a permute as its name;
      elements handed in, of an all-gather those that come out.
    """
    found = collections.Counter()
    for op in operations(lowered.compiler_ir().operation):
        kind = KINDS.get(op.name)
        if kind is None:
            continue
        (value,) = op.results if kind == "all_gather" else op.operands
        is_float = "f" in str(value.type.element_type)
        if kind == "permute":
            (group,) = permutes
        else:
            group = replica_groups(op.attributes["replica_groups"], roles)
            if len(group) == roles.mesh.size:
                continue
        found[is_float, kind, group, int(np.prod(value.type.shape))] += 1
    return found
