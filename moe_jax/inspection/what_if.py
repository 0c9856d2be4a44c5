"""The same program under other assumptions: buckets without empty rows, fewer cores beside a transfer, overflows.

Inputs: a program, its target and model, its buckets. Outputs: records for a report, and their lines. A transfer's
kernels occupy cores of the device; how many depends on NCCL and its channels, so the step is shown for several numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_jax.inspection.buckets import Buckets, Rows, Variant, overflow_chance
from moe_jax.inspection.hlo import Module
from moe_jax.inspection.targets import Target
from moe_jax.inspection.timeline import Model, Timeline, play

TAKEN_CORES = (0, 16, 32)


def rows_record(module: Module, target: Target, model: Model, buckets: Sequence[Buckets]) -> dict:
    """Return rows by shape beside those expected.

    Args:
      buckets: of the program, at least one.

    Returns:
      A record for JSON: buckets, each with its share of rows used; step_seconds, exposed_seconds and flops as if the
      experts' matmuls and the exchanges had the expected rows alone (padding skipped, not sent); instructions: of each
      part and scope executions, rows, expected_rows, bytes of exchanges, and seconds and flops both ways.
    """
    by_shape = play(module, target, model, Variant(buckets=tuple(buckets)))
    expected = play(module, target, model, Variant(buckets=tuple(buckets), expected_rows=True))
    return {
        "buckets": [
            {
                "segment": own.segment,
                "rows": own.by_shape,
                "expected_rows": own.expected,
                "used": own.used,
                "exchanges_of_a_step": own.exchanges,
            }
            for own in buckets
        ],
        "step_seconds": expected.seconds,
        "exposed_seconds": sum(flight.exposed for flight in expected.flights.values()),
        "flops": sum(expected.flops.values()),
        "instructions": [_both(*key, rows, expected.rows[key]) for key, rows in sorted(by_shape.rows.items())],
    }


def _both(part: str, scope: str, shape: Rows, expected: Rows) -> dict:
    return {
        "part": part,
        "scope": scope,
        "executions": shape.executions,
        "rows": shape.rows,
        "expected_rows": shape.expected,
        "bytes": shape.bytes,
        "expected_bytes": expected.bytes,
        "flops": shape.flops,
        "expected_flops": expected.flops,
        "seconds": shape.seconds,
        "expected_seconds": expected.seconds,
    }


def cores_record(module: Module, target: Target, model: Model, buckets: Sequence[Buckets] = ()) -> list[dict]:
    """Return the step with `TAKEN_CORES` less for compute beside transfers; [] for a target of unknown cores.

    Each has taken, cores (of the device), step_seconds and exposed_seconds, and where the buckets are known
    expected_rows_step_seconds: both assumptions together.
    """
    if not target.cores:
        return []
    found = []
    for taken in TAKEN_CORES:
        share = taken / target.cores
        line = play(module, target, model, Variant(taken=share))
        record = {
            "taken": taken,
            "cores": target.cores,
            "step_seconds": line.seconds,
            "exposed_seconds": sum(flight.exposed for flight in line.flights.values()),
        }
        if buckets:
            both = Variant(taken=share, buckets=tuple(buckets), expected_rows=True)
            record["expected_rows_step_seconds"] = play(module, target, model, both).seconds
        found.append(record)
    return found


def seconds_with_later_passes(timeline: Timeline) -> float:
    """Return the step's seconds if every conditional took its longer side: later passes in every layer, not hidden."""
    more = (
        branch["executions"] * (max(branch["seconds_not_taken"], default=0.0) - branch["seconds_taken"])
        for branch in timeline.skipped.values()
    )
    return timeline.seconds + sum(more)


def overflow_record(timeline: Timeline, buckets: Sequence[Buckets], complete: Timeline | None) -> dict:
    """Return what overflows cost an optimistic step on average.

    Args:
      timeline: of the common program; complete: of the complete one, None where that was not compiled.

    Returns:
      chance: the most that P(overflow) of a step is under the stated loads, None where no chance is stated;
      common_seconds; complete_seconds (no later pass taken) and complete_with_passes_seconds (all of them taken in
      every layer); step_seconds: t_common + P (t_common + t_complete with all passes); None for what is not known.
    """
    known = bool(buckets) and all(own.overflow is not None for own in buckets)
    chance = overflow_chance(buckets) if known else None
    with_passes = None if complete is None else seconds_with_later_passes(complete)
    step = None
    if chance is not None and with_passes is not None:
        step = timeline.seconds + chance * (timeline.seconds + with_passes)
    return {
        "chance": chance,
        "common_seconds": timeline.seconds,
        "complete_seconds": None if complete is None else complete.seconds,
        "complete_with_passes_seconds": with_passes,
        "step_seconds": step,
    }


def what_if_lines(report: dict) -> list[str]:
    """Return what a report says of rows, cores, overflows and thunks."""
    lines = []
    if report.get("overflow"):
        lines += _overflow_lines(report["overflow"])
    for record in report.get("cores", []):
        lines.append(
            f"compute at {record['cores'] - record['taken']} / {record['cores']} beside transfers: step "
            f"{_ms(record['step_seconds'])}, exposed {_ms(record['exposed_seconds'])}"
            + (
                f"; by expected rows {_ms(record['expected_rows_step_seconds'])}"
                if "expected_rows_step_seconds" in record
                else ""
            )
        )
    if report.get("thunks"):
        lines += _thunk_lines(report["thunks"])
    if report.get("rows"):
        lines += _row_lines(report["rows"], sum(report["step"]["flops"].values()))
    return lines


def _overflow_lines(record: dict) -> list[str]:
    common, chance = record["common_seconds"], record["chance"]
    said = "not known, since planned buckets state no chance" if chance is None else f"at most {chance:.3%}"
    if record["step_seconds"] is None:
        rest = "--complete compiles the complete program, for t_common + P x (t_common + t_complete)"
        return [f"P(overflow) of a step is {said}; {rest}"]
    return [
        f"P(overflow) of a step is {said}; complete program {_ms(record['complete_seconds'])}, with all later passes "
        f"in every layer {_ms(record['complete_with_passes_seconds'])}",
        f"t_common + P x (t_common + t_complete) = {_ms(common)} + {chance:.3%} x ({_ms(common)} + "
        f"{_ms(record['complete_with_passes_seconds'])}) = {_ms(record['step_seconds'])}",
    ]


def _thunk_lines(record: dict) -> list[str]:
    outside, inside = record["outside"], record["inside"]
    names = ", ".join(f"{count:,} {group.replace('_', ' ')}" for group, count in outside.items())
    return [
        f"{record['buffers']:,} command buffers with {sum(inside.values()):,} thunks; outside of them {names}",
    ]


def _row_lines(record: dict, flops: float) -> list[str]:
    lines = [""]
    for own in record["buckets"]:
        lines.append(
            f"buckets of {own['segment']}: {own['rows']:,} rows by shape, {own['expected_rows']:,.0f} expected "
            f"({own['used']:.1%}), {own['exchanges_of_a_step']} exchanges a step"
        )
    lines.append(
        f"by expected rows: step {_ms(record['step_seconds'])}, exposed {_ms(record['exposed_seconds'])}, "
        f"{record['flops'] / 1e12:.2f} TFLOP of {flops / 1e12:.2f} by shape"
    )
    lines.append(_ROWS.format("rows of", "runs", "by shape", "expected", "TFLOP", "expected", "modelled", "expected"))
    for own in record["instructions"]:
        lines.append(
            _ROWS.format(
                f"{own['part']} {own['scope']}".strip()[:32],
                own["executions"],
                f"{own['rows']:,}",
                f"{own['expected_rows']:,.0f}",
                f"{own['flops'] / 1e12:.3f}",
                f"{own['expected_flops'] / 1e12:.3f}",
                _ms(own["seconds"]),
                _ms(own["expected_seconds"]),
            )  # fmt: skip
        )
    return lines


_ROWS = "{:32} {:>6} {:>12} {:>12} {:>9} {:>9} {:>12} {:>12}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
