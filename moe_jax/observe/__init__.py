"""The files that a run writes: metrics, loads, progress, TensorBoard, pictures, a report. No jax in here."""

from moe_jax.observe.loads import LoadsOrigin, LoadsRecorder, LoadsTrace, device_load_max_over_mean, read_loads
from moe_jax.observe.metrics_file import MetricsWriter, TensorBoardWriter, read_metrics, summarize_run
from moe_jax.observe.progress import Progress, with_prefix
from moe_jax.observe.report import draw_all, write_report
from moe_jax.observe.run_folder import (
    EVALUATIONS,
    METRICS,
    RunFolder,
    atomic_file,
    disk_errors_named,
    environment_record,
    git_state,
    write_atomically,
)

__all__ = [
    "EVALUATIONS",
    "METRICS",
    "LoadsOrigin",
    "LoadsRecorder",
    "LoadsTrace",
    "MetricsWriter",
    "Progress",
    "RunFolder",
    "TensorBoardWriter",
    "atomic_file",
    "device_load_max_over_mean",
    "disk_errors_named",
    "draw_all",
    "environment_record",
    "git_state",
    "read_loads",
    "read_metrics",
    "summarize_run",
    "with_prefix",
    "write_atomically",
    "write_report",
]
