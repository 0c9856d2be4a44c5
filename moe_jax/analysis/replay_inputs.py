"""The inputs of a replay: from the flags, else from the trace, else a default.

Inputs: the flags that were given, and the path of a trace or of a run folder. Outputs: `ReplayInputs`, the trace's
samples of one mesh with the model's sizes and a cluster of as many devices; `messages` tell the user where each figure
comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.cluster import UNNAMED, Cluster, read_cluster
from moe_jax.cluster.layer_seconds import matrices_of, preceding_seconds
from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsOrigin, LoadsTrace, read_loads
from moe_jax.planning.cost import Cost, LayerPrices
from moe_jax.storage.run_folder import RunFolder

# of a layer, and of what precedes it, where neither a flag nor the trace says; a dense FFN then has 4 M
LAYER = {"model_dim": 1024, "hidden_dim": 2048, "dtype_bytes": 4, "activation": "gelu", "expert_shards": 1}
LAYER |= {"moe_every": 1, "dense_hidden_dim": None, "sequence_length": 1024}
TOP_K = 2  # of a trace that does not say
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


Given = Mapping[str, Any]  # {flag: value} of `moe_jax.replay`, None or absent where a flag was not given


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayInputs:
    """Everything about the trace, the model and the machines."""

    path: Path  # of the trace file
    trace: LoadsTrace  # samples of one mesh, loads int64 [Nt, L, S, E]
    cluster: Cluster  # of S devices, which have their part of links that expert shards share
    model_dim: int  # M
    hidden_dim: int  # F of an expert
    dtype_bytes: int  # of one number
    activation: str  # of an expert
    expert_shards: int  # N_ESP, devices over which F is split
    moe_every: int  # this and the next two: of what precedes an MoE layer
    dense_hidden_dim: int
    sequence_length: int
    top_k: int | None  # K of the run, None where the trace does not say
    messages: tuple[str, ...]  # for the user


def build_inputs(given: Given) -> ReplayInputs:
    """Return what a replay runs with.

    Raises:
      UserError: a flag is missing whose value the trace does not have, or what is given does not fit together.
    """
    if (named := given.get("trace")) is None:
        raise UserError("--trace is missing; give a run folder, or the path of an npz file with loads")
    path = Path(named).expanduser()
    if path.is_dir():
        path = RunFolder(path, create=False).loads
        if not path.exists():
            raise UserError(
                f"{path.parent} has no {path.name}, so --trace must name another run folder or an npz file; a run "
                f"writes {path.name} when it ends or is stopped"
            )
    recorded = read_loads(path)
    if not recorded.loads.size:
        raise UserError(f"{path}: loads {list(recorded.loads.shape)} is empty; give a trace with samples")
    trace, messages = one_mesh(recorded, given)
    origin = trace.origins[-1] if trace.origins else None
    trace, origin = one_segment(trace, origin, given.get("segment"), path)
    ran = {}  # sizes of the layer that ran, and of what precedes it
    if origin is None:
        if given.get("cluster") is None:
            raise UserError(f"--cluster is missing; give a path, for {path.name} does not say which run it is of")
    else:
        if origin.dtype not in BYTES and given.get("dtype_bytes") is None:
            raise UserError(f"{path}: dtype {origin.dtype!r} is unknown; give --dtype_bytes, the bytes of one number")
        ran = {**vars(origin), "dtype_bytes": BYTES.get(origin.dtype), "expert_shards": origin.expert_shards}
        mesh = " x ".join(f"{axis} {size}" for axis, size in origin.mesh)
        messages.append(
            f"trace: M {origin.model_dim}, F {origin.hidden_dim}, K {origin.top_k}, {origin.dtype}, mesh "
            f"{mesh}, {origin.devices_per_node} devices of an expert-parallel group on a node"
        )
    cluster = find_cluster(given, origin, trace.loads.shape[2], path, messages)
    layer = {}
    for name, default in LAYER.items():
        flag = given.get(name)
        layer[name] = flag if flag is not None else ran.get(name) or default or 4 * layer["model_dim"]
        if name != "activation" and layer[name] < 1:
            raise UserError(f"--{name} ({layer[name]}) must be at least 1")
    return ReplayInputs(
        path=path,
        trace=trace,
        cluster=cluster.part_of(layer["expert_shards"]),
        **layer,
        top_k=None if origin is None else origin.top_k,
        messages=tuple(messages),
    )


def layer_cost(given: ReplayInputs, prices: type[LayerPrices], form: str, replica_slots: int) -> tuple[Cost, str]:
    """Return what the layer that ran costs on its links, and what to say of the attention before it.

    That is the modelled forward seconds of what precedes an MoE layer, for one device's tokens.

    Args:
      prices: one of `cost.PRICES`; form: of the transfer of replicas; replica_slots: mu.
    """
    matrices, item = matrices_of(given.activation), given.dtype_bytes
    top_k, loads = given.top_k or TOP_K, given.trace.loads
    tokens = loads.sum(axis=(2, 3)).mean() / loads.shape[2] / top_k / given.expert_shards
    block = {"moe_every": given.moe_every, "matrices": matrices, "dense_hidden_dim": given.dense_hidden_dim}
    sizes = {"model_dim": given.model_dim, "length": given.sequence_length}
    seconds = preceding_seconds(given.cluster, float(tokens), item, **sizes, **block)
    more = given.moe_every > 1
    blocks = f" of {given.moe_every} blocks and the dense FFN of F {given.dense_hidden_dim}" if more else ""
    layer = prices(
        cluster=given.cluster,
        model_dim=given.model_dim,
        hidden_dim=given.hidden_dim,
        matrices=matrices,
        shards=given.expert_shards,
        dtype_bytes=item,
        param_bytes=max(4, item),  # parameters at home are float32 at least
        form=form,
    )
    return Cost(prices=layer, replica_slots=replica_slots, attention_seconds=seconds), (
        f"attention: {seconds:.4g} s forward{blocks}, modelled from {tokens:.0f} tokens a device (top-{top_k}), M "
        f"{given.model_dim} and --sequence_length {given.sequence_length}"
    )


def one_mesh(recorded: LoadsTrace, given: Given) -> tuple[LoadsTrace, list[str]]:
    """Return the samples of one mesh, without the zeros that fill them up, and what there is to say of it.

    A run that was resumed on other meshes has samples of several: those with as many sources as the flags ask devices
    for are taken, else those of the newest mesh.
    """
    loads, sources, origins = recorded.loads.astype(np.int64), recorded.sources, recorded.origins
    if sources is None:
        sources = np.full(len(loads), loads.shape[2])
    meshes = [(int(S), o.mesh if o else None) for S, o in zip(sources, origins or [None] * len(loads), strict=True)]
    wanted = meshes[-1]
    nodes, per_node = given.get("nodes"), given.get("devices_per_node")
    if nodes is not None and per_node is not None:
        devices = nodes * per_node
        wanted = next((mesh for mesh in reversed(meshes) if mesh[0] == devices), wanted)
    taken = np.flatnonzero([mesh == wanted for mesh in meshes])
    messages = []
    if len(taken) < len(loads):
        messages.append(
            f"trace: {len(taken)} of {len(loads)} samples, those of one mesh with {wanted[0]} sources; --nodes and "
            "--devices_per_node choose another of the run's meshes"
        )
    trace = LoadsTrace(
        loads[taken][:, :, : wanted[0]],
        recorded.iterations[taken],
        sources[taken],
        tuple(origins[index] for index in taken) if origins else (),
    )
    return trace, messages


def one_segment(
    trace: LoadsTrace, origin: LoadsOrigin | None, wanted: int | None, path: Path
) -> tuple[LoadsTrace, LoadsOrigin | None]:
    """Return the samples of one segment of the model, and the run as if its layers were all those of the segment.

    Args:
      wanted: its number, from 0; None where the trace has one.

    Raises:
      UserError: a trace of several segments of which none was named, or one that is not there.
    """
    segments = origin.segments if origin is not None else ()
    if wanted is not None and not 0 <= wanted < max(len(segments), 1):
        raise UserError(f"--segment ({wanted}) must lie in 0..{max(len(segments), 1) - 1}, the segments of {path}")
    if origin is None or not segments:
        return trace, origin
    if wanted is None and len(segments) > 1:
        listed = "; ".join(f"{index}: {own[0]} MoE layers of {own[1]} experts" for index, own in enumerate(segments))
        raise UserError(f"{path} is of a model with {len(segments)} segments ({listed}); name one by --segment=0")
    index = wanted or 0
    layers, experts, hidden_dim, top_k = segments[index]
    first = sum(own[0] for own in segments[:index])
    moe_every, dense_hidden_dim = origin.preceding[index]
    own_origin = dataclasses.replace(
        origin,
        hidden_dim=hidden_dim,
        top_k=top_k,
        moe_every=moe_every,
        dense_hidden_dim=dense_hidden_dim,
        segments=(segments[index],),
        preceding=(origin.preceding[index],),
    )
    sources = min(own_origin.sources, trace.loads.shape[2])
    if sources % origin.devices_per_node:
        own_origin = dataclasses.replace(own_origin, devices_per_node=sources)
    loads = trace.loads[:, first : first + layers, :sources, :experts]
    return trace._replace(loads=loads), own_origin


def find_cluster(given: Given, origin: LoadsOrigin | None, sources: int, path: Path, messages: list[str]) -> Cluster:
    """Return the cluster of the flag, of the run, or the default one, with as many devices as the trace has sources.

    Sizes come from the flags, then from the file that --cluster names, then from the trace.
    """
    named, nodes, per_node = (given.get(flag) for flag in ("cluster", "nodes", "devices_per_node"))
    if named is not None:
        cluster = read_cluster(named).sized(nodes, per_node)
    else:
        cluster = UNNAMED
        if origin is not None and origin.cluster:
            try:
                cluster = read_cluster(origin.cluster)
            except UserError as error:
                raise UserError(f"{path}: the run's cluster cannot be read ({error}); give --cluster") from error
            messages.append(f"cluster: {cluster.name}, which the run named")
        else:
            messages.append(
                f"cluster: {cluster.name} (every device on a link of {cluster.intra_bandwidth:g} bytes/s, "
                f"{cluster.flops:g} FLOP/s), assumed because the run named none; --cluster names one"
            )
        cluster = dataclasses.replace(cluster, nodes=nodes, devices_per_node=per_node)
    nodes, per_node = cluster.nodes, cluster.devices_per_node
    if origin is not None:
        if per_node is None and nodes is not None:
            per_node = sources // nodes or None
        elif per_node is None:
            per_node = origin.devices_per_node
        if nodes is None and per_node is not None:
            nodes = sources // per_node or 1
        cluster = cluster.sized(nodes, per_node)
    for field in ("nodes", "devices_per_node"):
        cluster.need(field, f"replay (or set --{field})")
    cluster.check_devices(sources, f"trace {path.name}")
    cluster.check_priced("replay")
    return cluster
