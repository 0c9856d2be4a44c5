"""When the watchdog of a process reports it as stuck; lost processes are in test_hosts.py."""

import types

import pytest

from moe_jax.training import watchdog


class Judge(watchdog.Hosts):
    """Called instead of running, and records how it would end the process."""

    ended = ""

    def _end(self, line):
        self.ended = line


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_the_stall_clock_rests_before_the_first_step_and_on_request(clock):
    judge = Judge(stall_seconds=10)
    clock[0] = 100.0
    judge._judge_silence()
    assert not judge.ended, "the first compilation is no step"
    judge.touch(0)
    clock[0] = 110.0
    judge._judge_silence()
    assert not judge.ended
    judge.rest()
    clock[0] = 1000.0
    judge._judge_silence()
    assert not judge.ended
    judge.touch(7)
    clock[0] = 1011.0
    judge._judge_silence()
    assert "is stuck: no step for 11 s after step 7" in judge.ended
    judge = Judge(stall_seconds=0)
    judge.touch(0)
    clock[0] = 1e9
    judge._judge_silence()
    assert not judge.ended, "0 is never"
