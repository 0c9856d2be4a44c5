"""The files that a run writes: metrics, loads, progress, TensorBoard, pictures, a report. No jax in here."""

from moe_jax.observe.atomic import atomic_file, disk_errors_named, write_atomically
from moe_jax.observe.balance import dead_experts, device_load_max_over_mean, device_loads
from moe_jax.observe.environment import environment_record, git_state
from moe_jax.observe.load_trace import LoadsTrace, read_loads
from moe_jax.observe.loads import LoadsRecorder
from moe_jax.observe.loads_origin import LoadsOrigin
from moe_jax.observe.metrics_file import MetricsWriter, read_metrics
from moe_jax.observe.plots import draw_all
from moe_jax.observe.progress import Progress, short_time, with_prefix
from moe_jax.observe.report import write_report
from moe_jax.observe.run_folder import EVALUATIONS, METRICS, RunFolder
from moe_jax.observe.summary import RunSummary, summarize, summarize_run
from moe_jax.observe.tensorboard import TensorBoardWriter

__all__ = [
    "EVALUATIONS",
    "METRICS",
    "LoadsOrigin",
    "LoadsRecorder",
    "LoadsTrace",
    "MetricsWriter",
    "Progress",
    "RunFolder",
    "RunSummary",
    "TensorBoardWriter",
    "atomic_file",
    "dead_experts",
    "device_load_max_over_mean",
    "device_loads",
    "disk_errors_named",
    "draw_all",
    "environment_record",
    "git_state",
    "read_loads",
    "read_metrics",
    "short_time",
    "summarize",
    "summarize_run",
    "with_prefix",
    "write_atomically",
    "write_report",
]
