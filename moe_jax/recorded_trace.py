"""Record some training steps with jax's profiler, and read which instruction ran on which device when.

Enters: a RunConfig and real devices, or a recorded trace. Leaves: spans for `moe_jax.inspection.measured`. Kernels are
found by the profiler's own fields (`hlo_op`, `hlo_module`) in the JSON that it writes; its binary file ends the process
of jax 0.12.0.1 when `ProfileData` reads the fields of an event.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from moe_jax.errors import UserError
from moe_jax.inspection.measured import Span
from moe_jax.run_config import RunConfig

WARM_UP = 2


def record_steps(config: RunConfig, devices: list, executable, skeleton, folder: Path, steps: int) -> None:
    """Run the compiled step on real data, `WARM_UP` times and then `steps` times under the profiler.

    Args:
      executable: of the training step, for this config on these devices.
      skeleton: that it was compiled for, or None.
      folder: the trace goes there.
    """
    import jax

    from moe_jax.training.feed import to_devices
    from moe_jax.training.plan import table_shapes
    from moe_jax.training.session import build_session

    session = build_session(config, devices)
    state, tables, wishes = session.fresh_state(), session.tables, session.wishes(0)
    if skeleton is not None:
        import numpy as np

        tables = to_devices(table_shapes(skeleton), session.placing.tables)
        wishes = to_devices(np.zeros((session.roles.num_devices, 3), np.int32), session.placing.wishes)
    batches = [to_devices(session.feed.read(step), session.placing.batch) for step in range(WARM_UP + steps)]
    for batch in batches[:WARM_UP]:
        state, metrics = executable(state, batch, tables, wishes)
    jax.block_until_ready(metrics)
    with jax.profiler.trace(str(folder)):
        for batch in batches[WARM_UP:]:
            state, metrics = executable(state, batch, tables, wishes)
        jax.block_until_ready(metrics)


def read_spans(folder: Path, module: str) -> list[Span]:
    """Return every span of a program in the newest trace below a folder.

    Args:
      module: name of the HLO module.

    Raises:
      UserError: no trace there, or none of this program.
    """
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise UserError(f"{folder} holds no trace (*.trace.json.gz); record one with --profile")
    events = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == "process_name"}
    spans = []
    for event in events:
        fields = event.get("args") or {}
        if event.get("ph") != "X" or "hlo_op" not in fields:
            continue
        if str(fields.get("hlo_module", "")).split("(")[0] == module:
            device = f"{processes.get(event['pid'], '')} {fields.get('device_ordinal', '')}".strip()
            begin = event["ts"] * 1e-6
            spans.append(Span(device, str(fields["hlo_op"]), begin, begin + event["dur"] * 1e-6))
    if not spans:
        raise UserError(f"the trace in {folder} has no execution of {module}; was another program running?")
    return spans
