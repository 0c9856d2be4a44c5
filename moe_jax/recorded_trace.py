"""Record some training steps with jax's profiler, and read which instruction ran on which device when.

Enters: a RunConfig and real devices, or a recorded trace. Leaves: spans for `moe_jax.inspection.measured`. Kernels are
found by the profiler's own fields (`hlo_op`, `hlo_module`), which it writes for CPUs and GPUs alike.
"""

from __future__ import annotations

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
    from jax.profiler import ProfileData

    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise UserError(f"{folder} holds no trace (*.xplane.pb); record one with --profile")
    spans = []
    for plane in ProfileData.from_file(str(files[-1])).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_op") and stats.get("hlo_module", "").split("(")[0] == module:
                    device = f"{plane.name} {stats.get('device_ordinal', '')}".strip()
                    begin = event.start_ns * 1e-9
                    spans.append(Span(device, str(stats["hlo_op"]), begin, begin + event.duration_ns * 1e-9))
    if not spans:
        raise UserError(f"the trace in {folder} has no execution of {module}; was another program running?")
    return spans
