"""States whose every bit is known, for test_checkpoint.py; as a program, one of two processes that share a checkpoint.

Contents depend on a leaf's name only: random bits, so that NaNs, denormals and negative zeros are among the floats. The
bank is laid out by loops here, as the oracle of what the checkpointer does on the devices.
"""

import os
import sys
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from support.tiny_run import join_job

from moe_jax.config.train_config import TrainConfig
from moe_jax.models import LanguageModel, ModelConfig
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.placement import Placement
from moe_jax.storage.checkpoint import Checkpointer
from moe_jax.training.optimizer import build_optimizer
from moe_jax.training.step import abstract_state, build_state_shardings

LAYERS, EXPERTS = 2, 8
HOST = {"config": "train.steps = 9", "data": {"position": 12345678901}, "window": [[1, 2.5], [3, 4.0]]}


def abstract(data, expert, *, zero=1, schedule="deepspeed", **model_changes):
    """The state of a small model on data x expert devices, as ShapeDtypeStructs with shardings."""
    sizes = {"layers": LAYERS, "model_dim": 16, "heads": 2, "hidden_dim": 32, "max_length": 8, **model_changes}
    model = LanguageModel(
        config=ModelConfig(**sizes),
        moe=MoEConfig(num_experts=EXPERTS, schedule=schedule),
        vocab_size=64,
        roles=build_mesh(MeshConfig(data=data, expert=expert), jax.devices()[: data * expert]),
        zero_stage=zero,
        expert_zero_stage=zero,
    )
    optimizer = build_optimizer(TrainConfig())
    return abstract_state(model, optimizer, build_state_shardings(model, optimizer))


def homes(devices, seed=None):
    """{segment: homes [L, E]}: plain expert parallelism, or spread at random over all layers, evenly in memory."""
    cells = Placement.even(LAYERS, EXPERTS, devices).home.ravel()
    cells = cells if seed is None else np.random.default_rng(seed).permutation(cells)
    return {"segment_0": cells.reshape(LAYERS, EXPERTS)}


def content(name, shape, dtype):
    """The bits of one leaf, in the order of the file."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)


def leaf_content(path, leaf, home):
    """The bits of one leaf, as it lies on the mesh."""
    name = jax.tree_util.keystr(path)
    if "['bank']" not in name:
        return content(name, leaf.shape, leaf.dtype)
    stored = content(name, (LAYERS, EXPERTS, *leaf.shape[1:]), leaf.dtype)
    home = home["segment_0"]
    devices = leaf.sharding.mesh.shape.get("expert", 1)
    bank, filled = np.zeros(leaf.shape, leaf.dtype), [0] * devices
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            device = home[layer, expert]
            bank[device * (leaf.shape[0] // devices) + filled[device]] = stored[layer, expert]
            filled[device] += 1
    return bank


def state(abstract_tree, home):
    """The state on its mesh."""

    def make(path, leaf):
        values = leaf_content(path, leaf, home)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])

    return jax.tree_util.tree_map_with_path(make, abstract_tree)


def assert_state(got, abstract_tree, home):
    """Every bit, dtype and sharding is as `state` would make it."""
    assert jax.tree.structure(got) == jax.tree.structure(abstract_tree)
    for (path, array), leaf in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(abstract_tree), strict=True):
        name = jax.tree_util.keystr(path)
        assert isinstance(array.sharding, NamedSharding) and array.sharding == leaf.sharding, name
        assert array.dtype == leaf.dtype, name
        values = leaf_content(path, leaf, home)
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes(), name


def main():
    """Restore step 1 on two processes, save steps 2 to 4, keep two."""
    folder, hosts = join_job(devices=2)

    def untimed(name):
        raise AssertionError(f"a barrier without a time limit: {name}")

    multihost_utils.sync_global_devices = untimed
    with hosts:
        here, home = abstract(2, 2, zero=3), homes(2, seed=5)
        checkpointer = Checkpointer(folder, keep=2)
        assert checkpointer.latest() == 1
        restored, host = checkpointer.restore(1, here, home), checkpointer.read_host(1)
        assert host == HOST
        assert_state(restored, here, home)
        spoil = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)
        for step in (2, 3, 4):
            host = {**HOST}
            checkpointer.save(step, restored, home, host)
            host.clear()
            spoil(restored)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(restored)), "save still held a buffer"
            restored = state(here, home)
        checkpointer.wait()
        assert checkpointer.latest() == 4
        checkpointer.close()
        print(f"process {hosts.process_index}: {sorted(os.listdir(folder))}", flush=True)
        hosts.close()


if __name__ == "__main__":
    sys.exit(main())
