"""Record some training steps with jax's profiler, and read which instruction ran on which device when.

Inputs: a RunConfig and real devices, or a recorded trace. Outputs: spans for `moe_jax.inspection`. Kernels are found by
the profiler's own fields (`hlo_op`, `hlo_module`) in the JSON that it writes; its binary file ends the process of jax
0.12.0.1 when `ProfileData` reads the fields of an event.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import time
from pathlib import Path

from moe_jax.compile_ahead import Compiled
from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.inspection.measured import Span

WARM_UP = 2


def record_steps(
    config: RunConfig, devices: list, compiled: Compiled, folder: Path, steps: int, plain_steps: int = 0
) -> float | None:
    """Run the compiled step on real data: to warm up, then without the profiler, then under it.

    Args:
      compiled: the training step, for this config on these devices.
      folder: the trace goes there.
      steps: under the profiler.
      plain_steps: without it, each waited for.

    Returns:
      seconds of a step without the profiler, the median; None without such steps. Under the profiler XLA launches each
      kernel by itself, where it would launch command buffers of many, so a step takes longer there.
    """
    import jax
    import numpy as np

    from moe_jax.mesh.global_arrays import to_devices
    from moe_jax.training.program import empty_tables
    from moe_jax.training.session import build_session
    from moe_jax.training.step import of_each_table

    session = build_session(config, devices)
    state, tables, host_signals = session.fresh_state(), session.tables, session.host_signals(0)
    shape = compiled.plan
    if shape is not None:
        tables = empty_tables(shape)
        tables = to_devices(tables, of_each_table(session.state_shardings.tables, tables))
        host_signals = to_devices(
            np.zeros((session.roles.num_devices, 3), np.int32), session.state_shardings.host_signals
        )
    total = WARM_UP + plain_steps + steps
    batches = [to_devices(session.feed.read(step), session.state_shardings.batch) for step in range(total)]
    step = compiled.executable
    if compiled.common:  # what a bucket that overflows costs here is the same: the step computes, and keeps nothing
        halted = to_devices(np.zeros((), np.bool_), session.state_shardings.replicated)

        def step(state, *inputs):
            return compiled.executable(state, halted, *inputs)

    seconds = []
    for place, batch in enumerate(batches[: WARM_UP + plain_steps]):
        started = time.perf_counter()
        state, metrics = step(state, batch, tables, host_signals)
        jax.block_until_ready((state, metrics))
        if place >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # its events would fill the trace, which holds a million
    with jax.profiler.trace(str(folder), profiler_options=options):
        for batch in batches[WARM_UP + plain_steps :]:
            state, metrics = step(state, batch, tables, host_signals)
        jax.block_until_ready((state, metrics))
    return statistics.median(seconds) if seconds else None


def read_spans(folder: Path, module: str) -> list[Span]:
    """Return every span of a program in the newest trace below a folder.

    On a GPU the kernels stand on threads named 'Stream #...'; other threads of the device repeat them joined, and are
    left out. `hlo_op` names the instruction, behind those that it runs inside of, joined by '::'.

    Args:
      module: name of the HLO module.

    Raises:
      UserError: no trace there, or none of this program.
    """
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise UserError(f"{folder} holds no trace (*.trace.json.gz); record one with --profile")
    events = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("ph") == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e.get("tid")): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    streams = {key for key, name in threads.items() if name.startswith("Stream #")}
    with_streams = {pid for pid, _ in streams}
    spans = []
    for event in events:
        fields = event.get("args") or {}
        if event.get("ph") != "X" or "hlo_op" not in fields:
            continue
        if event["pid"] in with_streams and (event["pid"], event.get("tid")) not in streams:
            continue
        if str(fields.get("hlo_module", "")).split("(")[0] == module:
            device = f"{processes.get(event['pid'], '')} {fields.get('device_ordinal', '')}".strip()
            begin = event["ts"] * 1e-6
            name = re.split(r"::|/", str(fields["hlo_op"]))[-1]
            spans.append(Span(device, name, begin, begin + event.get("dur", 0.0) * 1e-6))
    if not spans:
        raise UserError(f"the trace in {folder} has no execution of {module}; was another program running?")
    return spans
