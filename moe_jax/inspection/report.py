"""A timeline as numbers: one record for JSON, and the same as a table for people.

Inputs: a `Timeline`, its `Target` and `Model`, memory and versions from the caller. Outputs: a dictionary that
`json.dumps` takes, and text. Seconds in the record are modelled unless a name says measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from moe_jax.inspection.scopes import EXCHANGE
from moe_jax.inspection.targets import Target
from moe_jax.inspection.timeline import Flight, Model, Timeline
from moe_jax.inspection.what_if import what_if_lines

MOST_NAMES = 8  # of what computes beside a transfer


def build_report(timeline: Timeline, target: Target, model: Model, **facts) -> dict:
    """Return the record of a program.

    Args:
      facts: what stands at the top of the record as it is: command, date, versions, memory, compile_seconds; rows,
        cores, overflow and thunks, where they are known (`what_if.py`, `thunks.py`); model_flops, of a device's step.
    """
    described = dataclasses.asdict(target)
    described.pop("config")
    flights = sorted(timeline.flights.values(), key=lambda flight: -flight.exposed)
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
            **_utilisation(timeline, target, facts.get("model_flops")),
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


def _utilisation(timeline: Timeline, target: Target, flops: float | None) -> dict:
    """Return {"mfu": model FLOPs over what the device's bfloat16 peak makes in a step}, {} where they are not known."""
    return {"mfu": flops / (timeline.seconds * target.flops_bf16)} if flops and timeline.seconds else {}


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
