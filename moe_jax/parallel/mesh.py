"""The device mesh, and the axes that span each kind of group of an MoE model.

Inputs: a `MeshConfig` (group sizes) and a list of devices. Outputs: `Roles`, that is one named `jax.sharding.Mesh` and,
for each kind of group, the tuple of mesh axes that spans it. Nothing here moves data.

    device index = (data_index * EP + expert_index) * ESP + shard_index

            data = 2                      axes, slowest first
      +----------+----------+
      | EP = 2   | EP = 2   |             data           data-parallel groups            (N_EDP)
      | +--+--+  | +--+--+  |             expert         experts split over devices      (N_EP)
      | |01|23|  | |45|67|  |             expert_shard   hidden dim of each expert split (N_ESP)
      | +--+--+  | +--+--+  |
      +----------+----------+             model = 4: devices 0-3 and 4-7 (MP groups lie innermost)

A model-parallel (MP) group is the `model` innermost devices, however they cut across the other groups. Where its edge
falls inside one of the three axes, that axis is split in two, and the inner part is called `<axis>_mp`. So every role
is a tuple of axes, and N_MP and N_ESP are independent. Dense data parallelism = all devices / model.

Layers may have fewer experts than the expert axis has devices D. Where E divides D, the innermost E devices of the axis
are those layers' expert-parallel group, and the others hold replicas of it, as `data` does. So that one mesh serves all
layers the axis is cut where such a group ends, and the part inside is called `expert_of_<E>`; `Roles.for_experts` gives
the roles of a layer. Any other E is spread over the whole axis, floor or ceil(E / D) experts on a device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from moe_jax.errors import UserError

AXES = ("data", "expert", "expert_shard")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the groups; devices = data x expert x expert_shard, and model divides that.

    Attributes:
      data: data-parallel groups, each with all experts (N_EDP).
      expert: expert-parallel devices (N_EP); -1 takes the devices that are left.
      expert_shard: devices among which each expert's hidden dim is split (N_ESP).
      model: model-parallel devices (N_MP): attention heads and dense hidden dim split.
      devices_per_node: where the fast links end. 0 is the devices that share a host, which a run on several hosts fills
        in when it starts (`node_size`), and all devices where it is still 0 here.
    """

    data: int = 1
    expert: int = -1
    expert_shard: int = 1
    model: int = 1
    devices_per_node: int = 0

    def __post_init__(self):
        for name in ("data", "expert_shard", "model"):
            if getattr(self, name) < 1:
                raise UserError(f"MeshConfig.{name} ({getattr(self, name)}) must be at least 1")
        if self.expert < 1 and self.expert != -1:
            raise UserError(
                f"MeshConfig.expert ({self.expert}) must be at least 1, or -1 for the devices that are left"
            )
        if self.devices_per_node < 0:
            raise UserError(
                f"MeshConfig.devices_per_node ({self.devices_per_node}) must be 0 (those of a host) or positive"
            )

    def resolve(self, num_devices: int) -> MeshConfig:
        """Return the same config with `expert` filled in; raise UserError where the sizes do not make `num_devices`."""
        rest = self.data * self.expert_shard
        expert = self.expert
        if expert == -1:
            if num_devices % rest:
                raise UserError(
                    f"{num_devices} devices cannot be split into MeshConfig.data ({self.data}) x expert_shard "
                    f"({self.expert_shard}) = {rest} groups; choose sizes whose product divides {num_devices}"
                )
            expert = num_devices // rest
        if rest * expert != num_devices:
            raise UserError(
                f"MeshConfig.data ({self.data}) x expert ({expert}) x expert_shard ({self.expert_shard}) = "
                f"{rest * expert}, but there are {num_devices} devices; change one of the sizes, or run on "
                f"{rest * expert} devices (--host_devices={rest * expert} on a CPU)"
            )
        if num_devices % self.model:
            raise UserError(
                f"MeshConfig.model ({self.model}) must divide the {num_devices} devices; set it to a divisor"
            )
        per_node = self.devices_per_node or num_devices
        if num_devices % per_node:
            raise UserError(
                f"MeshConfig.devices_per_node ({per_node}) must divide the {num_devices} devices; set it to a divisor"
            )
        return dataclasses.replace(self, expert=expert, devices_per_node=per_node)


@dataclasses.dataclass(frozen=True)
class Roles:
    """A mesh and the axes that span each kind of group.

    Attributes:
      config: the resolved MeshConfig.
      mesh: the named mesh; all axes are Auto.
      data, expert, expert_shard, model: axes of one group of that kind, slowest first; () for model = 1.
      dense: axes of dense data parallelism, that is all that are not in `model`.
      device_kind: what a device calls itself, '' where the mesh is abstract and nobody said.
    """

    config: MeshConfig
    mesh: Mesh
    data: tuple[str, ...]
    expert: tuple[str, ...]
    expert_shard: tuple[str, ...]
    model: tuple[str, ...]
    dense: tuple[str, ...]
    device_kind: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """All axes of the mesh, slowest first."""
        return tuple(self.mesh.axis_names)

    def size(self, axes: tuple[str, ...]) -> int:
        """Return the number of devices in a group that spans `axes`."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def members_per_node(self) -> int:
        """EP members that share a node: all of them where nodes would cut them into unequal parts, one at least."""
        members = self.size(self.expert)
        inside = max(1, self.config.devices_per_node // self.config.expert_shard)
        return inside if members % inside == 0 else members

    def most_homes(self, experts: int) -> int:
        """Return ceil(E / D), the most of E experts of a layer that are at home on one device, where homes are even."""
        return -(-experts // self.size(self.expert))

    def for_experts(self, experts: int) -> Roles:
        """Return the roles of a layer with this many experts: the same, or a part of the expert axis counts as data.

        Raises:
          UserError: a mesh that was built without knowing of these experts.
        """
        members = ep_degree(experts, self.size(self.expert))
        if members == self.size(self.expert):
            return self
        for cut in range(len(self.expert) + 1):
            outer, inner = self.expert[:cut], self.expert[cut:]
            if inner and self.size(inner) == members:
                sizes = {"data": self.config.data * self.size(outer), "expert": members}
                config = dataclasses.replace(self.config, **sizes)
                return dataclasses.replace(self, config=config, data=self.data + outer, expert=inner)
        raise UserError(
            f"this mesh has no group of {members} expert-parallel devices for layers with {experts} experts; name "
            f"{experts} among the `experts` that it is built for"
        )

    def sharding(self, *spec) -> NamedSharding:
        """Return the NamedSharding of this mesh for a partition spec given entry by entry."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))


def ep_degree(experts: int, devices: int) -> int:
    """Return the EP devices of a layer with E experts on an expert axis of D devices: E where that divides D."""
    return devices if devices % experts else experts


def mesh_axes(
    config: MeshConfig, num_devices: int, experts: Collection[int] = ()
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the mesh's axes with their sizes, slowest first, and the axes of the MP group.

    Args:
      config: a MeshConfig that `resolve` has filled in.
      num_devices: product of data, expert and expert_shard.
      experts: E of the layers that are to lie on the mesh; the expert axis is cut where fewer than its devices do.

    Raises:
      UserError: if the MP group does not cut an axis into equal parts, or groups do not lie inside one another.
    """
    cuts = {"expert": {ep_degree(number, config.expert) for number in experts}}
    sizes = {"data": config.data, "expert": config.expert, "expert_shard": config.expert_shard}
    axes: list[tuple[str, int]] = []
    inside: list[str] = []
    begin = 1  # devices in one block of the axes already placed, from the innermost outwards
    for name in reversed(AXES):
        inner, outer = begin, begin * sizes[name]
        if max(outer, config.model) % min(outer, config.model):
            product = " x ".join(AXES[AXES.index(name) :])
            raise UserError(
                f"MeshConfig.model ({config.model}) must be a multiple or a divisor of {product} ({outer}) of the "
                f"{num_devices} devices; make model, expert and expert_shard powers of two"
            )
        # where the parts of this axis end, innermost first: the one inside the MP group, and each cut's
        shared = min(outer, config.model)
        ends = {outer, shared if shared > inner else outer, *(inner * cut for cut in cuts.get(name, ()))}
        for end in sorted(ends):
            if end % begin:
                raise UserError(
                    f"expert-parallel groups of {begin // inner} and of {end // inner} devices do not lie inside one "
                    f"another on an expert axis of {sizes[name]} (layers with fewer experts have a group of so many "
                    "devices, and MeshConfig.model cuts the axis too); make the numbers of experts divide one another"
                )
            in_model = shared > inner and end <= shared
            axis = f"{name}_mp" if in_model else name
            axis = axis if end == (shared if in_model else outer) else f"{axis}_of_{end // inner}"
            axes.append((axis, end // begin))
            inside += [axis] if in_model else []
            begin = end
    return dict(reversed(axes)), tuple(reversed(inside))


def build_mesh(config: MeshConfig, devices: Sequence | int, experts: Collection[int] = (), kind: str = "") -> Roles:
    """Lay `devices` out as the config says.

    Args:
      config: group sizes; `expert` may be -1.
      devices: JAX devices, in the order of the device index (neighbours should share a node), or a number of devices
        that need not exist: then the mesh is abstract, and no backend is started.
      experts: E of each kind of layer that is to lie on the mesh; only those below the expert axis matter.
      kind: of devices that are a number only, see `Roles.device_kind`.

    Returns:
      Roles over one mesh of all the devices.

    Raises:
      UserError: if the sizes do not fit the number of devices, or the groups not into one another.
    """
    count = devices if isinstance(devices, int) else len(devices)
    config = config.resolve(count)
    sizes, model = mesh_axes(config, count, experts)
    shape, types = tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
    if isinstance(devices, int):
        mesh: typing.Any = AbstractMesh(shape, tuple(sizes), axis_types=types)
    else:
        mesh = Mesh(np.asarray(devices, dtype=object).reshape(shape), tuple(sizes), axis_types=types)
    parts = {name: tuple(axis for axis in sizes if re.fullmatch(rf"{name}(_mp)?(_of_\d+)?", axis)) for name in AXES}
    dense = tuple(axis for axis in sizes if axis not in model)
    kind = kind if isinstance(devices, int) else devices[0].device_kind
    return Roles(config=config, mesh=mesh, model=model, dense=dense, device_kind=kind, **parts)


def machine_id(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text that is equal on two processes exactly if they share a machine.

    That is if host name, boot and network namespace are equal, or NCCL_HOSTID, where it is set: nearly NCCL's rule.
    """
    if environment.get("NCCL_HOSTID"):
        return f"NCCL_HOSTID {environment['NCCL_HOSTID']}"
    parts = [os.uname().nodename]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    except OSError:  # not Linux
        pass
    return " ".join(parts)


def node_size(devices: Sequence, machines: Sequence[str]) -> int:
    """Return how many of a job's devices, in the order of their index, a node has: those on one machine.

    Args:
      machines: by the index of a process, what `machine_id` returns there.

    Raises:
      UserError: the machines have different numbers of devices, or a machine's devices do not follow one another.
    """
    if len(set(machines)) <= 1:
        return len(devices)
    runs = [(name, len(list(run))) for name, run in itertools.groupby(machines[d.process_index] for d in devices)]
    counts = [count for _, count in runs]
    remedy = f"or set MeshConfig.devices_per_node to a divisor of the {len(devices)} devices"
    if len(runs) > len({name for name, _ in runs}):
        raise UserError(
            f"the {len(machines)} processes are not numbered host by host (devices in a row on one host: {counts}), "
            "so devices that share a node are not neighbours in the mesh; give the processes of one host "
            f"neighbouring --process_id, as srun --distribution=block does, {remedy}"
        )
    if len(set(counts)) > 1:
        raise UserError(
            f"the {len(runs)} hosts of this job have different numbers of devices ({counts}), and the nodes of a "
            f"mesh must be alike; start as many devices on each host, {remedy}"
        )
    return counts[0]


def set_up_devices(count: int | None) -> None:
    """Split the CPU into `count` devices; must come before jax looks for devices."""
    if count is None:
        return
    if count < 1:
        raise UserError(f"--host_devices ({count}) must be at least 1")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    # With several CPU devices a program from a warm cache hangs between two collectives (jax 0.10.2).
    jax.config.update("jax_enable_compilation_cache", False)


def replace_leaf(change, leaf, shardings):
    """Return change(leaf), on the devices as `shardings` say, and delete the leaf: never are two banks held at once."""
    changed = jax.block_until_ready(jax.jit(change, out_shardings=shardings)(leaf))
    leaf.delete()
    return changed


def to_devices(arrays, shardings):
    """Return NumPy arrays as global arrays; every process gives the same arrays and places its own part.

    Args:
      arrays: pytree of NumPy arrays.
      shardings: matching pytree, or one that ends sooner: a sharding for all arrays below its place.
    """
    make = jax.make_array_from_callback

    def below(sharding, part):
        return jax.tree.map(lambda array: make(np.shape(array), sharding, np.asarray(array).__getitem__), part)

    return jax.tree.map(below, shardings, arrays)
