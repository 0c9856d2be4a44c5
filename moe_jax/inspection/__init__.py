"""What the GPU compiler scheduled: reading a compiled program, and modelling what overlaps. See README.md."""

from moe_jax.inspection.buckets import Buckets, Variant
from moe_jax.inspection.constants import read_constants
from moe_jax.inspection.draw import draw_timeline, write_chrome_trace
from moe_jax.inspection.hlo import Module, parse_module
from moe_jax.inspection.instructions import compare_instructions, instructions_text
from moe_jax.inspection.measured import add_measured, measured_text
from moe_jax.inspection.profile import scheduler_profile, unguided_share
from moe_jax.inspection.report import build_report, report_text
from moe_jax.inspection.targets import Target, check_mesh, device_named, parse_target, read_device, target_names
from moe_jax.inspection.thunks import Thunks, count_thunks
from moe_jax.inspection.timeline import Model, Timeline, play
from moe_jax.inspection.what_if import cores_record, overflow_record, rows_record

__all__ = [
    "Buckets",
    "Model",
    "Module",
    "Target",
    "Thunks",
    "Timeline",
    "Variant",
    "add_measured",
    "build_report",
    "check_mesh",
    "compare_instructions",
    "cores_record",
    "count_thunks",
    "device_named",
    "draw_timeline",
    "instructions_text",
    "measured_text",
    "overflow_record",
    "parse_module",
    "parse_target",
    "play",
    "read_constants",
    "read_device",
    "report_text",
    "rows_record",
    "scheduler_profile",
    "target_names",
    "unguided_share",
    "write_chrome_trace",
]
