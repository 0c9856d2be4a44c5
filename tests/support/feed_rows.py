"""One of two processes that feed one mesh, for test_feed.py: each checks that it reads the rows of its own devices.

For every mesh the rows read are counted at the corpus, and what lies on each device is compared with the same place of
the whole batch, bit for bit. The last lines are the held-out losses, which test_feed.py compares with those of one
process.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from support.tiny_run import bindings_of, join_job

from moe_jax.config.gin_files import parse_run_config
from moe_jax.data.cache import TokenSpan
from moe_jax.training.loop import evaluate
from moe_jax.training.program import build_session

BERT = ("ModelConfig.kind = 'bert'",)
# name: (order of the eight devices, rows of a microbatch of 8 that each process holds, bindings)
MESHES = {
    "expert": (range(8), [range(4), range(4, 8)], ()),
    "data_in_turn": ([0, 4, 1, 5, 2, 6, 3, 7], [range(0, 8, 2), range(1, 8, 2)], ("MeshConfig.data = 2", *BERT)),
    "mp_within": (range(8), [range(4), range(4, 8)], ("MeshConfig.model = 2", "MeshConfig.expert_shard = 2")),
    "mp_across": ([0, 4, 1, 5, 2, 6, 3, 7], [range(8), range(8)], ("MeshConfig.model = 2",)),
    "backwards": (
        range(7, -1, -1),
        [range(4, 8), range(4)],
        ("train.grad_accum_steps = 2", "train.batch_size = 16", "ModelConfig.document_mask = True"),
    ),
}
EVALUATED = ("data_in_turn", "mp_across")


def session_of(folder, name):
    """Return the session of one of the meshes."""
    order, _, bindings = MESHES[name]
    config, _ = parse_run_config((), bindings_of(folder, *bindings))
    devices = jax.devices()
    return build_session(config, [devices[index] for index in order])


def assert_own_rows(session, process, want, read):
    """A step's batch and every held-out one: right on each device, and no more read than `want` says."""
    feed, microbatches = session.feed, session.config.train.grad_accum_steps
    assert feed.local_rows.tolist() == list(want)
    for step in (0, 3):
        whole = feed.read(step)
        read.clear()
        arrays = feed.to_devices(feed.read(step, feed.local_rows))
        assert len(read) == microbatches * len(want), (process, len(read))
        for array, values in zip(jax.tree.leaves(arrays), jax.tree.leaves(whole), strict=True):
            assert array.shape == values.shape and array.dtype == values.dtype
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
    read.clear()
    batches = len([feed.to_devices(batch) for batch in feed.held_out()])
    assert 0 < len(read) <= batches * len(want)


def main():
    """Check every mesh, then evaluate fresh parameters on two of them."""
    folder, hosts = join_job(devices=4)
    read, read_span = [], TokenSpan.read

    def counted(self, start, stop):
        read.append((start, stop))
        return read_span(self, start, stop)

    TokenSpan.read = counted
    with hosts:
        for name, (_, rows, _) in MESHES.items():
            session = session_of(Path(folder), name)
            assert_own_rows(session, hosts.process_index, rows[hosts.process_index], read)
            if name in EVALUATED:
                loss = evaluate(session, session.evaluation_step(), session.fresh_state()["params"])
                print(f"{name} {loss!r}", flush=True)
        hosts.close()


if __name__ == "__main__":
    sys.exit(main())
