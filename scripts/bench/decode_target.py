"""Compile one decode step for GPUs that are described only, and compare its modelled time with the floor.

What it says: a token cannot be decoded faster than the weights that its batch activates are read: the floor is the
bytes of them on the fullest device (blocks, output head, and the experts that can be chosen at most) over the memory
bandwidth. The rest is collectives, launches and attention. Needs the CUDA wheels (BUILD.md), no GPU. Run it as

    python scripts/bench/decode_target.py --target=h200:1x8 --gin_file=configs/model/mixtral_8x7b.gin \
        --gin_bindings='MeshConfig.expert_shard = 8' --gin_bindings='MeshConfig.model = 8'
"""

from __future__ import annotations

import json
import time

from absl import app, flags

_GIN_FILES = flags.DEFINE_multi_string("gin_file", ["configs/model/mixtral_8x7b.gin"], "Config file.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding.")
_TARGET = flags.DEFINE_string("target", "h200:1x8", "DEVICE:NODESxDEVICES.")
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences of each data-parallel group.")
_HELD = flags.DEFINE_integer("held", 4096, "Tokens that the cache has room for.")
_OUT = flags.DEFINE_string("out", "", "File for the compiled program.")


def abstract(tree, specs, mesh):
    """Return arrays or their shapes as ShapeDtypeStructs with places on the mesh."""
    import jax

    def one(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    return jax.tree.map(one, tree, specs)


def lower(config, devices):
    """Return (model, its parameters' shapes, the lowered decode step)."""
    import jax
    import numpy as np

    from moe_jax.inference.generator import build_model, is_matrix, reside
    from moe_jax.inference.programs import Serving, State, make_step, state_specs

    model = build_model(config, devices, None)
    mesh, specs, segments = model.roles.mesh, model.layout().params, model.expert_segments
    residence = {segment.name: reside(model.even_placements[segment.name]) for segment in segments}
    shapes = {name: shape for name, (shape, _, _) in residence.items()}
    serving = Serving(model, model.vocab_size, specs, shapes)
    decode = make_step(serving, _BATCH.value, 1, 0, greedy=True, top_k=0, cuts=False)
    rows = _BATCH.value * model.roles.size(model.roles.dense)

    def entry(segment):
        sizes = (segment.config.units, rows, segment.config.key_value_heads, _HELD.value, segment.config.head_size)
        array = jax.ShapeDtypeStruct(sizes, segment.config.dtype)
        return {name: (array, array) for name in state_specs(model).cache[segment.name]}

    ints = jax.ShapeDtypeStruct((rows,), np.int32)
    state = State(
        cache={segment.name: entry(segment) for segment in model.segments},
        ids=jax.ShapeDtypeStruct((rows, 1), np.int32), positions=ints, keys=jax.ShapeDtypeStruct((rows, 3), np.uint32),
    )  # fmt: skip
    none, by_row = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(model.roles.dense)
    scalar = jax.ShapeDtypeStruct((), np.float32)
    settings = jax.ShapeDtypeStruct((rows,), bool), scalar, scalar
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, config.model.dtype if is_matrix(path) else leaf.dtype),
        model.shapes(),
    )
    placed = {
        name: abstract(tables, jax.tree.map(lambda _, at=name: model.tables_specs[at], tables), mesh)
        for name, (_, tables, _) in residence.items()
    }
    arguments = abstract(params, specs, mesh), placed, abstract(state, state_specs(model), mesh)
    return model, params, decode.lower(*arguments, *abstract(settings, (by_row, none, none), mesh))


def floor_bytes(model, params) -> float:
    """Return the bytes of weights that one device reads at least for one token of a sequence of each of its rows."""
    import jax

    specs = model.layout().params
    roles, total = model.roles, 0.0

    def parts(spec):
        entries = ((entry,) if isinstance(entry, str) else entry for entry in spec if entry)
        return roles.size(tuple(axis for entry in entries for axis in entry))

    for (path, leaf), spec in zip(
        jax.tree.leaves_with_path(params),
        jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, jax.sharding.PartitionSpec)),
        strict=True,
    ):
        name, held = jax.tree_util.keystr(path), leaf.size * leaf.dtype.itemsize / parts(spec)
        if "embedding" in name:
            held = held / roles.size(roles.model) if "head" in name or model.config.tied_head else 0.0
        if "['bank']" in name:
            moe = model.expert_segments[0].moe
            here = moe.num_experts // roles.size(roles.expert)
            held *= min(here, moe.top_k * _BATCH.value) / here
        total += held
    return total


def main(_):
    from moe_jax.analysis import compile_ahead
    from moe_jax.cluster.hlo import parse_module
    from moe_jax.cluster.prices import Prices
    from moe_jax.cluster.targets import parse_target
    from moe_jax.cluster.timeline import play
    from moe_jax.config.gin_files import parse_run_config

    target = parse_target(_TARGET.value)
    config = parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value)[0]
    config = compile_ahead.on_target(config, target)
    model, params, lowered = lower(config, compile_ahead.described_devices(target))
    started = time.monotonic()
    text = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"}).as_text()
    if _OUT.value:
        with open(_OUT.value, "w", encoding="utf-8") as file:
            file.write(text)
    timeline = play(parse_module(text), Prices(target))
    read = floor_bytes(model, params)
    floor = read / target.memory_bandwidth
    record = {
        "target": _TARGET.value, "batch": _BATCH.value,
        "modelled_seconds": timeline.seconds, "floor_seconds": floor,
        "floor_bytes": read, "ratio": timeline.seconds / floor, "compile_seconds": time.monotonic() - started,
        "exposed_seconds": sum(flight.exposed_seconds for flight in timeline.flights.values()),
        "matmul_seconds": timeline.matmul_seconds, "compute_seconds": timeline.compute_seconds,
        "assumed_turns": timeline.assumed_turns, "unknown_calls": timeline.unknown_calls,
    }  # fmt: skip
    for (part, scope), seconds in sorted(timeline.by_scope.items(), key=lambda item: -item[1])[:12]:
        print(f"{seconds * 1e6:9.1f} us  {part}  {scope}")
    print(json.dumps(record))


if __name__ == "__main__":
    app.run(main)
