"""Reading ahead changes when a batch is read, never which one comes next."""

import threading
import time

import pytest

from moe_jax.data.stream import prefetch


def test_prefetch_keeps_the_order_whatever_a_read_takes():
    def read(step):
        time.sleep(0.01 if step % 3 == 0 else 0)
        return step * 10

    assert list(prefetch(read, 4, 20)) == [(step, step * 10) for step in range(4, 20)]
    assert list(prefetch(read, 4, 4)) == []


def test_prefetch_reads_no_further_ahead_than_depth():
    started = []
    batches = prefetch(lambda step: started.append(step) or step, 0, depth=2)
    for step in range(5):
        assert next(batches) == (step, step)
        assert max(started) <= step + 2
    batches.close()


def test_prefetch_raises_where_the_batch_would_have_come():
    def read(step):
        if step == 2:
            raise KeyError("the disk is gone")
        return step

    batches = prefetch(read, 0)
    assert [next(batches), next(batches)] == [(0, 0), (1, 1)]
    with pytest.raises(KeyError, match="the disk is gone"):
        next(batches)


def test_prefetch_closed_leaves_no_thread():
    batches = prefetch(lambda step: step, 0)
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
