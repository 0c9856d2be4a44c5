"""The model of useful time against a job that is played step by step."""

import random

import pytest
from ettr import Job


@pytest.mark.parametrize(("step", "between"), [(1.0, 600.0), (5.0, 600.0), (15.0, 3600.0)])
def test_useful_time_is_that_of_a_job_played_step_by_step(step, between):
    job = Job(host_bytes=64e9, every=10, program=20.0)
    waits, copying = 2e9 / job.device_rate, 2e9 / job.file_rate  # 64 GB are 16 of the host, 2 of each device
    back = 0.1 + 0.4 + 0.7 + 16e9 / job.network_rate + 2e9 / job.device_rate + 20.0
    rng, now, done, copied, whole = random.Random(1), 0.0, 0, 0, 0
    fails = between
    made = None  # when the copy of `copied` is whole
    while now < 3000 * between:
        now += step
        if now > fails:
            now = fails + back
            done = copied = copied if made is not None and made <= fails else whole
            whole, made, fails = done, None, fails + rng.uniform(0, 2 * between) + back
            continue
        done += 1
        if done % job.every == 0:
            now += waits
            whole = copied if made is not None else whole
            copied, made = done, now + copying
    assert job.useful_share(step, between) == pytest.approx(done * step / now, rel=0.02)
