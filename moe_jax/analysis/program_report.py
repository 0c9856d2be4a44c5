"""The report of a scheduled program: a record for JSON, and the same as a table for people.

Besides the modelled timeline: the same program under other assumptions (buckets without empty rows, fewer cores beside
a transfer, overflows), measured times of a trace, and what the compiler puts into command buffers. Seconds are modelled
unless a name says measured. `python -m moe_jax.analysis.program_report --target=h200:4x8 FILE.hlo.gz ...` prints one
line a file: how much of the experts' time, and of s2's gathers, has an exchange of rows in flight.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from moe_jax.cluster.costs import Buckets, Variant, overflow_chance
from moe_jax.cluster.hlo import EXCHANGE, Module, parse_module
from moe_jax.cluster.targets import Target, parse_target
from moe_jax.cluster.timeline import Flight, Model, Timeline, play
from moe_jax.errors import UserError

MOST_NAMES = 8  # of what computes beside a transfer


def build_report(timeline: Timeline, target: Target, model: Model, **facts) -> dict:
    """Return the record of a program.

    Args:
      facts: what stands at the top of the record as it is: command, date, versions, memory, compile_seconds; rows,
        cores, overflow and thunks, where they are known; model_flops, of a device's step.
    """
    described = dataclasses.asdict(target)
    described.pop("config")
    flights = sorted(timeline.flights.values(), key=lambda flight: -flight.exposed)
    model_flops = facts.get("model_flops")
    mfu = {"mfu": model_flops / (timeline.seconds * target.flops_bf16)} if model_flops and timeline.seconds else {}
    return {
        **facts,
        "target": described,
        "model": {
            **dataclasses.asdict(model),
            "states": "kernel = max(FLOPs / (matmul_efficiency x peak), bytes / (memory_efficiency x "
            "memory_bandwidth), launch); collective = latency + max(bytes inside nodes / intra, bytes across / node "
            "links), one at a time on each kind of link; exposed = wait at its done",
        },
        "step": {
            "modelled_seconds": timeline.seconds,
            "compute_seconds": timeline.compute_seconds,
            "matmul_seconds": timeline.matmul_seconds,
            "exposed_seconds": sum(flight.exposed for flight in flights),
            "flops": dict(sorted(timeline.flops.items())),
            "kernels": timeline.kernels,
            "shortest_kernels": timeline.shortest,
            "conditionals": sum(branch["executions"] for branch in timeline.skipped.values()),
            **mfu,
        },
        "pipeline": _pipeline(timeline, flights),
        "totals": {
            "by_role": _totals(flights, "role", lambda flight: flight.role),
            "by_kind": _totals(flights, "kind", lambda flight: flight.kind),
            "by_scope": _totals(flights, "scope", _part_and_scope),
        },
        "in_loops": {
            "by_role": _totals([flight for flight in flights if flight.loops], "role", lambda flight: flight.role)
        },
        "compute_by_scope": [
            {"part": part, "scope": scope, "seconds": seconds}
            for (part, scope), seconds in sorted(timeline.by_scope.items(), key=lambda item: -item[1])
        ],
        "collectives": [_flight_record(flight) for flight in flights],
        "branches": [{"name": name, **record} for name, record in timeline.skipped.items()],
        "unknown_loops": sorted(timeline.unknown_loops),
        "unknown_calls": dict(sorted(timeline.unknown_calls.items())),
    }


def _pipeline(timeline: Timeline, flights: list[Flight]) -> dict:
    """Return the gain of overlapping the exchange of tokens with the experts.

    `bound` is FasterMoE's (comm + comp) / max(comm, comp), the most that its `pairwise` schedule can gain over running
    one after the other; `reached` is the gain of this program's schedule.
    """
    exchange = [flight for flight in flights if flight.role == EXCHANGE]
    moving, exposed = (sum(getattr(flight, name) for flight in exchange) for name in ("seconds", "exposed"))
    experts = sum(seconds for (_, scope), seconds in timeline.by_scope.items() if "experts" in scope.split("/"))
    longer = max(moving, experts)
    return {
        "exchange_seconds": moving,
        "experts_seconds": experts,
        "exposed_seconds": exposed,
        "bound": (moving + experts) / longer if longer > 0 else 1.0,
        "reached": (moving + experts) / (exposed + experts) if exposed + experts > 0 else 1.0,
    }


def _flight_record(flight: Flight) -> dict:
    beside = sorted(flight.beside.items(), key=lambda item: -item[1])
    return {
        "name": flight.name,
        "kind": flight.kind,
        "role": flight.role,
        "part": flight.part,
        "scope": flight.scope,
        "computation": flight.computation,
        "loops": list(flight.loops),
        "asynchronous": flight.asynchronous,
        "bytes": flight.bytes,
        "groups": flight.groups,
        "group_size": flight.group_size,
        "nodes_of_a_group": flight.nodes,
        "bytes_inside_nodes": flight.traffic.intra_bytes,
        "bytes_leaving_a_node": flight.traffic.inter_bytes,
        "executions": flight.executions,
        "seconds": flight.seconds,
        "exposed_seconds": flight.exposed,
        "waited_for_links_seconds": flight.waited_for_links,
        "beside_seconds": flight.beside_seconds,
        "executions_beside_kernels": flight.beside_kernels,
        "executions_beside_matmuls": flight.beside_matmuls,
        "beside": {name: seconds for name, seconds in beside[:MOST_NAMES]},
    }


def _part_and_scope(flight: Flight) -> str:
    return f"{flight.part} {flight.scope}".strip() or "(unnamed)"


def _totals(flights: Iterable[Flight], name: str, key) -> list[dict]:
    """Return one record of sums per key, which stands in it as `name`; largest modelled time first."""
    sums: dict[str, dict] = {}
    for flight in flights:
        total = sums.setdefault(
            key(flight),
            {
                name: key(flight),
                "collectives": 0,
                "executions": 0,
                "bytes": 0,
                "bytes_beside_kernels": 0,
                "bytes_beside_matmuls": 0,
                "seconds": 0.0,
                "exposed_seconds": 0.0,
            },
        )
        total["collectives"] += 1
        total["executions"] += flight.executions
        total["bytes"] += flight.bytes * flight.executions
        total["bytes_beside_kernels"] += flight.bytes * flight.beside_kernels
        total["bytes_beside_matmuls"] += flight.bytes * flight.beside_matmuls
        total["seconds"] += flight.seconds
        total["exposed_seconds"] += flight.exposed
    return sorted(sums.values(), key=lambda total: -total["seconds"])


def _step_lines(report: dict) -> list[str]:
    """Return what a report says of the program as a whole."""
    lines = []
    target = report["target"]
    lines.append(f"target   {target['nodes']} x {target['per_node']} {target['device']}")
    if report.get("compile_seconds") is not None:
        guided = "twice, the scheduler guided by modelled seconds, " if report.get("guided_scheduler") else ""
        lines.append(
            f"compiled {guided}in {report['compile_seconds']:.1f} s (lowering {report['lower_seconds']:.1f} s)"
        )
    if report.get("program") == "common":
        lines.append(
            "program  the common one of optimistic steps; a step that overflows costs it and the complete one "
            "(--program=complete)"
        )
    if report.get("resolved"):
        lines.append("resolved: " + ", ".join(f"{name} = {value!r}" for name, value in report["resolved"].items()))
    assumed = [
        f"{field.name} {report['model'][field.name]:.4g} (default {field.default:.4g})"
        for field in dataclasses.fields(Model)
        if report["model"][field.name] != field.default
    ]
    if assumed:
        lines.append("constants of the cost model: " + ", ".join(assumed))
    if report.get("memory"):
        parts = [f"{name} {value / 1e9:.3f} GB" for name, value in report["memory"].items()]
        lines.append("bytes per device: " + ", ".join(parts))
    step = report["step"]
    flops = sum(step["flops"].values())
    lines.append(
        f"modelled step {_ms(step['modelled_seconds'])}: compute {_ms(step['compute_seconds'])} (matmuls "
        f"{_ms(step['matmul_seconds'])}, {flops / 1e12:.2f} TFLOP), exposed communication "
        f"{_ms(step['exposed_seconds'])}"
    )
    if "mfu" in step:
        flops = report["model_flops"]
        lines.append(
            f"{flops / 1e12:.2f} TFLOP of the model in a step of a device: {step['mfu']:.1%} of its peak (MFU)"
        )
    lines.append(
        f"{step['kernels']:,} kernels, {step['shortest_kernels']:,} of them at the floor of "
        f"{report['model']['launch'] * 1e6:g} us; {step['conditionals']:,} conditionals"
    )
    parts = [f"{part['part']} {part['scope']}".strip() or "(unnamed)" for part in report["compute_by_scope"]]
    seconds = [part["seconds"] for part in report["compute_by_scope"]]
    lines.append("compute: " + ", ".join(f"{name} {_ms(own)}" for name, own in zip(parts, seconds, strict=True)))
    pipeline = report["pipeline"]
    if pipeline["exchange_seconds"] > 0:
        lines.append(
            f"exchange of tokens {_ms(pipeline['exchange_seconds'])}, experts {_ms(pipeline['experts_seconds'])}: one "
            f"beside the other is at most {pipeline['bound']:.2f} times faster (FasterMoE's bound), in this program "
            f"{pipeline['reached']:.2f}"
        )
    return lines + what_if_lines(report)


def report_text(report: dict) -> str:
    """Return a report as text: memory, step, totals, and every collective."""
    lines = _step_lines(report)
    for title, name, totals in (
        ("role", "role", report["totals"]["by_role"]),
        ("role, inside loops", "role", report["in_loops"]["by_role"]),
        ("scope", "scope", report["totals"]["by_scope"]),
    ):
        lines += ["", _TOTAL.format(title, "runs", "MB", "beside mm", "modelled", "exposed", "")]
        for total in totals:
            hidden = total["bytes_beside_matmuls"] / max(total["bytes"], 1)
            share = total["exposed_seconds"] / max(total["seconds"], 1e-30)
            lines.append(
                _TOTAL.format(
                    total[name][:44],
                    total["executions"],
                    f"{total['bytes'] / 1e6:.2f}",
                    f"{hidden:.0%}",
                    _ms(total["seconds"]),
                    _ms(total["exposed_seconds"]),
                    f"{share:.0%}",
                )  # fmt: skip
            )
    lines += [
        "",
        _EACH.format("collective", "role", "part scope", "MB", "group", "runs", "modelled", "exposed", "beside"),
    ]
    for record in report["collectives"]:
        beside = ", ".join(list(record["beside"])[:3])
        group = f"{record['group_size']}/{record['nodes_of_a_group']}"
        lines.append(
            _EACH.format(
                record["name"][:26],
                record["role"][:18],
                f"{record['part']} {record['scope']}"[:30],
                f"{record['bytes'] / 1e6:.2f}",
                group,
                record["executions"],
                _ms(record["seconds"]),
                _ms(record["exposed_seconds"]),
                f"{_ms(record['beside_seconds'])} {beside}",
            )  # fmt: skip
        )
    for branch in report["branches"]:
        lines.append(
            f"branch {branch['name']} ({branch['part']} {branch['scope']}, {branch['executions']} runs): the other "
            f"side would take {', '.join(_ms(seconds) for seconds in branch['seconds_not_taken'])} and holds "
            f"{branch['collectives_not_taken']} collectives"
        )
    if report["unknown_loops"]:
        names = report["unknown_loops"]
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        lines.append(f"{len(names)} loops ({shown}): their turns are data; counted as one turn each, so too short")
    for name, count in report["unknown_calls"].items():
        lines.append(f"custom call {name!r} ({count} runs): its FLOPs are not known here; its bytes are counted")
    return "\n".join(lines) + "\n"


_TOTAL = "{:44} {:>7} {:>12} {:>10} {:>12} {:>12} {:>6}"
_EACH = "{:26} {:18} {:30} {:>10} {:>6} {:>5} {:>11} {:>11}  {}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


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
        "instructions": [
            {
                "part": part,
                "scope": scope,
                "executions": rows.executions,
                "rows": rows.rows,
                "expected_rows": rows.expected,
                "bytes": rows.bytes,
                "expected_bytes": expected.rows[part, scope].bytes,
                "flops": rows.flops,
                "expected_flops": expected.rows[part, scope].flops,
                "seconds": rows.seconds,
                "expected_seconds": expected.rows[part, scope].seconds,
            }
            for (part, scope), rows in sorted(by_shape.rows.items())
        ],
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
    with_passes = step = None
    if complete is not None:
        # every conditional takes its longer side: later passes in every layer, not hidden
        more = (
            branch["executions"] * (max(branch["seconds_not_taken"], default=0.0) - branch["seconds_taken"])
            for branch in complete.skipped.values()
        )
        with_passes = complete.seconds + sum(more)
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
        inside, outside = report["thunks"]["inside"], report["thunks"]["outside"]
        names = ", ".join(f"{count:,} {group.replace('_', ' ')}" for group, count in outside.items())
        lines.append(
            f"{report['thunks']['buffers']:,} command buffers with {sum(inside.values()):,} thunks; outside of them "
            f"{names}"
        )
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


@dataclasses.dataclass(frozen=True)
class Span:
    """One execution in a trace: on which device, of which instruction, from when to when (seconds)."""

    device: str
    instruction: str
    begin: float
    end: float


def add_measured(report: dict, spans: Sequence[Span], steps: int) -> dict:
    """Return the report with measured times.

    Args:
      report: from `build_report`.
      spans: of `steps` steps, on any number of devices.
      steps: at least 1.

    Returns:
      A new report: `measured` at its top (seconds of a step by the longest device, of compute, of collectives,
      exposed), and in each collective (None where the trace has no execution of it).
    """
    names = {stem(record["name"]) for record in report["collectives"]}
    devices: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        devices[span.device].append(span)
    share = 1.0 / (max(len(devices), 1) * steps)
    seconds: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    compute = step = 0.0
    for of_device in devices.values():
        working = merge_spans([(s.begin, s.end) for s in of_device if stem(s.instruction) not in names])
        compute += sum(end - begin for begin, end in working)
        step = max(step, max(s.end for s in of_device) - min(s.begin for s in of_device))
        for span in of_device:
            name = stem(span.instruction)
            if name in names:
                length = span.end - span.begin
                seconds[name] += length
                covered = (max(0.0, min(span.end, stop) - max(span.begin, start)) for start, stop in working)
                exposed[name] += length - sum(covered)
                counts[name] += 1
    collectives = []
    for record in report["collectives"]:
        name = stem(record["name"])
        found = None
        if name in counts:
            found = {
                "executions": counts[name] * share,
                "seconds": seconds[name] * share,
                "exposed_seconds": exposed[name] * share,
            }
        collectives.append({**record, "measured": found})
    total = {
        "steps": steps,
        "devices": len(devices),
        "step_seconds": step / steps,
        "compute_seconds": compute * share,
        "collective_seconds": sum(seconds.values()) * share,
        "exposed_seconds": sum(exposed.values()) * share,
    }
    return {**report, "measured": total, "collectives": collectives}


def measured_text(report: dict) -> str:
    """Return modelled and measured seconds side by side as text."""
    total, step = report["measured"], report["step"]
    lines = [
        "",
        f"measured over {total['steps']} steps on {total['devices']} devices, beside the model",
        _ROW.format("", "modelled ms", "measured ms"),
        _row("step", step["modelled_seconds"], total["step_seconds"]),
        _row("compute", step["compute_seconds"], total["compute_seconds"]),
        _row("exposed communication", step["exposed_seconds"], total["exposed_seconds"]),
    ]
    for record in report["collectives"]:
        found = record["measured"]
        if found is None:
            lines.append(f"{record['name']:<44}  not in the trace")
        else:
            lines.append(_row(record["name"], record["seconds"], found["seconds"]))
            lines.append(_row("  of it exposed", record["exposed_seconds"], found["exposed_seconds"]))
    return "\n".join(lines) + "\n"


_ROW = "{:<44} {:>14} {:>14}"


def _row(name: str, modelled: float, measured: float) -> str:
    return _ROW.format(name[:44], f"{modelled * 1e3:.3f}", f"{measured * 1e3:.3f}")


def stem(name: str) -> str:
    """Return the name that start, done and the kernel of one collective share."""
    head, dot, number = name.partition(".")
    return head.removesuffix("-start").removesuffix("-done") + dot + number


def merge_spans(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (begin, end) pairs as the fewest that cover the same time, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


BUFFER, LOOP, CONDITIONAL = "kCommandBuffer", "kWhile", "kConditional"
AROUND = frozenset("kSequential kDynamicSliceFusion kDynamicSlice kAsyncStart kAsyncDone kWaitForStreams".split())
COPIES = frozenset("kCopy kCopyDone kMemset kMemset32BitValue kMemzero kPartitionId kReplicaId".split())
COLLECTIVES = frozenset(
    "kAllGather kAllReduce kAllToAll kReduceScatter kCollectivePermute kCollectiveBroadcast "
    "kCollectiveGroup kCollectiveKernel kSend kRecv kNcclGroup".split()
)
GROUPS = ("kernels", "memory_copies", "collectives", "conditionals", "loops")
_THUNK = re.compile(r"^( *)(\d+): (k\w+)")
_SECTION = re.compile(r"^( *)(condition|body|true_branch|false_branch|branch_?\d+):?$")
_RECORD = re.compile(r"thunk_metadata \{\s*thunk_info \{(.*?)\}", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thunks:
    """What one step launches.

    Attributes:
      buffers: launches of command buffers; inside: {group: thunks in them}; outside: {group: thunks in none}, over
        `GROUPS`. A loop counts once however many turns it has, what it runs once for each.
      outside_kinds: {XLA's name of the kind: thunks in no buffer}.
    """

    buffers: int
    inside: dict[str, int]
    outside: dict[str, int]
    outside_kinds: dict[str, int]


@dataclasses.dataclass
class _Node:
    """One thunk of the text and, in it, (section or '', thunk) in order."""

    kind: str
    number: int
    inner: list[tuple[str, _Node]] = dataclasses.field(default_factory=list)

    def section(self, name: str) -> list[_Node]:
        return [node for section, node in self.inner if section == name]

    def sections(self) -> list[str]:
        return list(dict.fromkeys(section for section, _ in self.inner))


def count_thunks(sequence: str, metadata: str, module: Module) -> Thunks:
    """Return what one execution of a program launches.

    Args:
      sequence: the file `*.thunk_sequence_after_thunk_passes.txt` of a dump; metadata: `*.thunk_metadata.txt`.
      module: the program, which knows how often its loops turn; one whose turns are data counts one.

    Raises:
      UserError: the text has no thunks.
    """
    turns = {
        instruction.name: instruction.trip_count or 1
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "while"
    }
    loops = {number: turns.get(name, 1) for number, name in _instructions(metadata).items()}
    nodes = _read(sequence)
    if not nodes:
        raise UserError("the compiler's dump holds no thunks; its text has a form that is not known here")
    counted = _count(nodes, loops, inside=False)
    inside, outside = Counter[str](), Counter[str]()
    for (kind, in_buffer), count in counted.items():
        if kind not in AROUND and kind != BUFFER:
            (inside if in_buffer else outside)[_group(kind)] += count
    kinds = {kind: n for (kind, in_buffer), n in counted.items() if not in_buffer and kind not in {*AROUND, BUFFER}}
    return Thunks(
        buffers=counted[BUFFER, False],
        inside={group: inside[group] for group in GROUPS},
        outside={group: outside[group] for group in GROUPS},
        outside_kinds=dict(sorted(kinds.items(), key=lambda item: -item[1])),
    )


def _group(kind: str) -> str:
    if kind in COPIES:
        return "memory_copies"
    if kind in COLLECTIVES:
        return "collectives"
    return {CONDITIONAL: "conditionals", LOOP: "loops"}.get(kind, "kernels")


def _instructions(metadata: str) -> dict[int, str]:
    """Return {number of a thunk: name of its instruction}."""
    found = {}
    for record in _RECORD.findall(metadata):
        name, number = re.search(r'profile_annotation: "([^"]*)"', record), re.search(r"thunk_id: (\d+)", record)
        if name and number:
            found[int(number.group(1))] = name.group(1)
    return found


def _read(text: str) -> list[_Node]:
    """Return the thunks of a text as trees, by their indentation; sections belong to the loop or conditional above."""
    root = _Node("", -1)
    above: list[tuple[int, _Node]] = [(-1, root)]  # (indentation, thunk) from the outside in
    for line in text.splitlines():
        thunk, head = _THUNK.match(line), _SECTION.match(line.rstrip())
        if head:
            # the heading of a loop's condition stands at the margin, right below the loop
            name, indent = head.group(2), len(head.group(1))
            if name == "condition":
                owner, heading = above[-1][1], above[-1][0]
            else:
                heading, owner = next((own for own in above if own[0] == indent - 2), above[-1])
            while above[-1][0] > heading:
                above.pop()
            owner.inner.append((name, _Node("", -1)))
        elif thunk:
            indent, node = len(thunk.group(1)), _Node(thunk.group(3), int(thunk.group(2)))
            while above[-1][0] >= indent:
                above.pop()
            parent = above[-1][1]
            inner = [name for name, _ in parent.inner if name] if parent.kind in (LOOP, CONDITIONAL) else []
            parent.inner.append((inner[-1] if inner else "", node))
            above.append((indent, node))
    return [node for _, node in root.inner]


def _count(nodes: list[_Node], loops: dict[int, int], inside: bool) -> Counter[tuple[str, bool]]:
    """Return {(kind, in a command buffer): how often it runs}; of a conditional the branch with the fewest."""
    total: Counter[tuple[str, bool]] = Counter()
    for node in nodes:
        if node.kind:
            total[node.kind, inside] += 1
        inner = inside or node.kind == BUFFER
        if node.kind == LOOP:
            for key, count in _count(node.section("body"), loops, inner).items():
                total[key] += loops.get(node.number, 1) * count
        elif node.kind == CONDITIONAL:
            branches = [_count(node.section(name), loops, inner) for name in node.sections()]
            total += min(branches, key=lambda branch: branch.total(), default=Counter())
        else:
            total += _count([own for _, own in node.inner], loops, inner)
    return total


GATHERS = ("all-gather moe/combine", "all-gather moe/dispatch")  # s2's, forward and backward


def seconds(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in merge_spans(spans))


def shared(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Return the seconds that lie in both."""
    return seconds(one) + seconds(other) - seconds(one + other)


def beside_text(line: Timeline) -> str:
    """Return the line of one simulated program, as the docstring of this file says."""
    moving = [e for e in line.events if e.row in ("inside nodes", "across nodes")]
    rows = [(e.begin, e.end) for e in moving if e.label.startswith("all-to-all")]
    gathers = [(e.begin, e.end) for e in moving if e.label in GATHERS]
    experts = [(e.begin, e.end) for e in line.events if e.row == "compute" and "experts" in e.label]
    found = [seconds(experts), shared(experts, rows), seconds(gathers), shared(gathers, rows), seconds(rows)]
    ms = [f"{1e3 * value:.2f}" for value in (*found, line.seconds)]
    return (
        f"experts {ms[0]} ms, {ms[1]} beside rows; gathers {ms[2]} ms, {ms[3]} beside rows; "
        f"rows {ms[4]} ms; step {ms[5]} ms"
    )


def main() -> None:
    """Print one line for each file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="h200:4x8", help="DEVICE:NODESxDEVICES that the programs are compiled for")
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="scheduled programs, .hlo or .hlo.gz")
    options = parser.parse_args()
    target = parse_target(options.target)
    for path in options.files:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        print(f"{path.name}: {beside_text(play(parse_module(text), target))}")


if __name__ == "__main__":
    main()
