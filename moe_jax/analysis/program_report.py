"""The report of a scheduled program: a record for JSON, the same as a table for people, and a trace of its timeline.

Besides the modelled timeline: the same program under other assumptions (prices, fewer cores next to a transfer,
overflows); `measured.py` adds the times of a trace.
Seconds are modelled unless a name says measured.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_jax.cluster.costs import Buckets
from moe_jax.cluster.fits import LEVELS
from moe_jax.cluster.hlo import EXCHANGE, Module
from moe_jax.cluster.prices import MEASURED, Prices
from moe_jax.cluster.timeline import Flight, Timeline, play

MOST_NAMES = 8  # of what computes next to a transfer
TAKEN_CORES = (0, 16, 20, 32)
ASSUMED = " (turns assumed)"  # behind lines with a figure of a program that has loops whose turns are data
FIGURE = re.compile(r"\d\.\d{3}(?! GB|%|\d)|MFU|kernels, |exchange of tokens: ")


def build_report(timeline: Timeline, prices: Prices, facts: Mapping[str, Any]) -> dict:
    """Return the record of a program.

    Args:
      facts: what stands at the top of the record as it is: command, date, versions, memory, compile_seconds, what
        `what_if` returns; model_flops, of a device's step.
    """
    target, described = prices.target, dataclasses.asdict(prices.target)
    described.pop("config")
    flights = sorted(timeline.flights.values(), key=lambda flight: -flight.exposed_seconds)
    model_flops = facts.get("model_flops")
    mfu = {"mfu": model_flops / (timeline.seconds * target.flops_bf16)} if model_flops and timeline.seconds else {}
    exchange = [flight for flight in flights if flight.role == EXCHANGE]
    moving, exposed = sum(flight.seconds for flight in exchange), sum(flight.exposed_seconds for flight in exchange)
    experts = sum(seconds for (_, scope), seconds in timeline.by_scope.items() if "experts" in scope.split("/"))
    collectives = []
    for flight in flights:
        record = {name: value for name, value in vars(flight).items() if name != "alone"}
        overlapped = dict(flight.overlapped.most_common(MOST_NAMES))
        collectives.append({**record, "overlapped_seconds": flight.overlapped.total(), "overlapped": overlapped})
    return {
        **facts,
        "target": described,
        "model": {
            **{name: getattr(prices, name) for name in ("level", *MEASURED)},
            "prices": prices.described(),
            "states": "kernel = max(its products, bytes / (share x memory_bandwidth), launch); collective = start-up + "
            "max(inside nodes, bytes across / node links), one at a time on each kind of link; exposed = wait at its "
            "done; range = the step at each level of what nobody measured",
        },
        "step": {
            "modelled_seconds": timeline.seconds,
            "compute_seconds": timeline.compute_seconds,
            "matmul_seconds": timeline.matmul_seconds,
            "exposed_seconds": sum(flight.exposed_seconds for flight in flights),
            "flops": dict(sorted(timeline.flops.items())),
            "kernels": timeline.kernels,
            "shortest_kernels": timeline.shortest,
            "launch": prices.assumed("launch"),
            "conditionals": sum(branch["executions"] for branch in timeline.skipped.values()),
            **mfu,
        },
        # bound: FasterMoE's (comm + comp) / max(comm, comp), the most that its `pairwise` schedule can gain over one
        # after the other; reached: the gain of this program's schedule
        "pipeline": {
            "exchange_seconds": moving,
            "experts_seconds": experts,
            "exposed_seconds": exposed,
            "bound": (moving + experts) / max(moving, experts) if max(moving, experts) > 0 else 1.0,
            "reached": (moving + experts) / (exposed + experts) if exposed + experts > 0 else 1.0,
        },
        "totals": {f"by_{name}": _totals(flights, name) for name in ("role", "kind", "scope")},
        "in_loops": {"by_role": _totals((flight for flight in flights if flight.loops), "role")},
        "compute_by_scope": [
            {"part": key[0], "scope": key[1], "seconds": seconds, "overlapped_seconds": timeline.overlapped[key]}
            for key, seconds in timeline.by_scope.most_common()
        ],
        "collectives": collectives,
        "branches": [{"name": name, **record} for name, record in timeline.skipped.items()],
        "assumed_turns": timeline.assumed_turns,
        "unknown_loops": sorted(timeline.unknown_loops),
        "unknown_calls": dict(sorted(timeline.unknown_calls.items())),
    }


def _totals(flights: Iterable[Flight], name: str) -> list[dict]:
    """Return one record of sums per role, kind or (part and) scope; largest modelled time first."""
    sums: dict[str, Counter] = defaultdict(Counter)
    for flight in flights:
        key = getattr(flight, name)
        if name == "scope":
            key = f"{flight.part} {key}".strip() or "(unnamed)"
        sums[key].update(
            collectives=1,
            executions=flight.executions,
            bytes=flight.bytes * flight.executions,
            bytes_overlapping_kernels=flight.bytes * flight.executions_overlapping_kernels,
            bytes_overlapping_matmuls=flight.bytes * flight.executions_overlapping_matmuls,
            seconds=flight.seconds,
            exposed_seconds=flight.exposed_seconds,
        )
    return sorted(({name: key, **total} for key, total in sums.items()), key=lambda total: -total["seconds"])


def what_if(module: Module, prices: Prices) -> dict:
    """Return the program under other assumptions, for JSON.

    Returns:
      range: {level of `LEVELS`: step_seconds, compute_seconds, exposed_seconds}, of the order in which the compiler put
      the program.
      cores: the step with `TAKEN_CORES` less for compute next to transfers ([] for a target of unknown cores).
      buckets, where they are known: each with its rows by shape, those expected, and its exchanges of a step.
    """
    levels, cores, target = {}, [], prices.target
    for level in LEVELS:
        line = play(module, dataclasses.replace(prices, level=level))
        levels[level] = {
            "step_seconds": line.seconds,
            "exposed_seconds": line.exposed_seconds,
            "compute_seconds": line.compute_seconds,
        }
    for taken in TAKEN_CORES if target.cores else ():
        line = play(module, prices, taken=taken / target.cores)
        took = {"step_seconds": line.seconds, "exposed_seconds": line.exposed_seconds}
        cores.append({"taken": taken, "cores": target.cores, **took})
    buckets = [{**dataclasses.asdict(own), "used": own.used} for own in module.buckets]
    return {"range": levels, "cores": cores, **({"buckets": buckets} if buckets else {})}


def overflow_record(timeline: Timeline, buckets: Sequence[Buckets], complete: Timeline | None) -> dict:
    """Return what overflows cost an optimistic step on average; None for what is not known.

    Args:
      timeline: of the common program; complete: of the complete one, None where that was not compiled.

    Returns:
      chance: the most that P(overflow) of a step is under the stated loads; common_seconds; complete_seconds (no later
      pass taken) and complete_with_passes_seconds (all of them taken in every layer); step_seconds: t_common +
      P (t_common + t_complete with all passes).
    """
    chance = alone = with_passes = step = None
    if buckets and all(own.overflow is not None for own in buckets):
        chance = min(1.0, sum(own.exchanges * own.overflow for own in buckets))
    if complete is not None:
        # every conditional takes its longer side: later passes in every layer, not hidden
        more = (
            branch["executions"] * (max(branch["seconds_not_taken"], default=0.0) - branch["seconds_taken"])
            for branch in complete.skipped.values()
        )
        alone, with_passes = complete.seconds, complete.seconds + sum(more)
        step = None if chance is None else timeline.seconds + chance * (timeline.seconds + with_passes)
    return {
        "chance": chance,
        "common_seconds": timeline.seconds,
        "complete_seconds": alone,
        "complete_with_passes_seconds": with_passes,
        "step_seconds": step,
    }


def report_text(report: dict) -> str:
    """Return a report as text: memory, step, other assumptions, totals, every collective, and what was measured."""
    lines = [*_step_lines(report), *_what_if_lines(report)]
    for title, name, totals in (
        ("role", "role", report["totals"]["by_role"]),
        ("role, inside loops", "role", report["in_loops"]["by_role"]),
        ("scope", "scope", report["totals"]["by_scope"]),
    ):
        lines.append("")
        lines.append(f"{title:44} {'runs':>7} {'MB':>12} {'overlap mm':>10} {'modelled':>12} {'exposed':>12} {'':>6}")
        for total in totals:
            hidden = total["bytes_overlapping_matmuls"] / max(total["bytes"], 1)
            share = total["exposed_seconds"] / max(total["seconds"], 1e-30)
            lines.append(
                f"{total[name][:44]:44} {total['executions']:>7} {total['bytes'] / 1e6:>12.2f} {hidden:>10.0%} "
                f"{_ms(total['seconds']):>12} {_ms(total['exposed_seconds']):>12} {share:>6.0%}"
            )
    head = f"{'collective':26} {'role':18} {'part scope':30} {'MB':>10} {'group':>6} {'runs':>5} {'modelled':>11} "
    lines += ["", head + f"{'exposed':>11}  overlapped with"]
    for own in report["collectives"]:
        group, scope = f"{own['group_size']}/{own['nodes_of_a_group']}", f"{own['part']} {own['scope']}"
        lines.append(
            f"{own['name'][:26]:26} {own['role'][:18]:18} {scope[:30]:30} {own['bytes'] / 1e6:>10.2f} {group:>6} "
            f"{own['executions']:>5} {_ms(own['seconds']):>11} {_ms(own['exposed_seconds']):>11}  "
            f"{_ms(own['overlapped_seconds'])} {', '.join(list(own['overlapped'])[:3])}"
        )
    for branch in report["branches"]:
        lines.append(
            f"branch {branch['name']} ({branch['part']} {branch['scope']}, {branch['executions']} runs): the other "
            f"side would take {', '.join(_ms(seconds) for seconds in branch['seconds_not_taken'])} and holds "
            f"{branch['collectives_not_taken']} collectives"
        )
    for name, count in report["unknown_calls"].items():
        lines.append(f"custom call {name!r} ({count} runs): its FLOPs are not known here; its bytes are counted")
    if "measured" in report:
        lines += _measured_lines(report)
    mark = ASSUMED if report["assumed_turns"] else ""
    return "\n".join(line + mark * bool(FIGURE.search(line)) for line in lines) + "\n"


def _step_lines(report: dict) -> list[str]:
    """Return what a report says of the program as a whole."""
    target, model, step, pipeline = report["target"], report["model"], report["step"], report["pipeline"]
    lines = [f"target   {target['nodes']} x {target['per_node']} {target['device_kind']}"]
    if report.get("compile_seconds") is not None:
        guided = "twice, the scheduler guided by modelled seconds, " if report.get("guided_scheduler") else ""
        seconds = f"{report['compile_seconds']:.1f} s (lowering {report['lower_seconds']:.1f} s)"
        lines.append(f"compiled {guided}in {seconds}")
    if report.get("program") == "common":
        lines.append("program  the common one of optimistic steps; one that overflows costs it and the complete one")
    if report.get("resolved"):
        lines.append("resolved: " + ", ".join(f"{name} = {value!r}" for name, value in report["resolved"].items()))
    assumed = [f"level {model['level']}"] if model["level"] != "middle" else []
    assumed += [f"{name} {model[name]}" for name in MEASURED if model[name] is not None]
    if assumed:
        lines.append("constants of the cost model: " + ", ".join(assumed))
    lines += [f"price of {what}: {basis}" for what, basis in model["prices"].items()]
    once, rows = report["unknown_loops"], "expected rows" if "buckets" in report else "all rows by shape"
    if told := len(report["assumed_turns"]) - len(once):
        lines.append(f"{told} loops over blocks of rows: turns are data, assumed for {rows}, alike in all groups")
    if once:
        lines.append(f"{len(once)} loops ({', '.join(once[:3])}): turns are data, counted as one each, so too short")
    span = ""
    if "range" in report:
        low, high = (_ms(report["range"][level]["step_seconds"]) for level in (LEVELS[0], LEVELS[-1]))
        span = f" ({low} to {high})"
    if report.get("memory"):
        parts = [f"{name} {value / 1e9:.3f} GB" for name, value in report["memory"].items()]
        lines.append("bytes per device: " + ", ".join(parts))
    lines.append(
        f"modelled step {_ms(step['modelled_seconds'])}{span}: compute {_ms(step['compute_seconds'])} (matmuls "
        f"{_ms(step['matmul_seconds'])}, {sum(step['flops'].values()) / 1e12:.2f} TFLOP), exposed communication "
        f"{_ms(step['exposed_seconds'])}"
    )
    if "mfu" in step:
        flops = report["model_flops"] / 1e12
        lines.append(f"{flops:.2f} TFLOP of the model in a step of a device: {step['mfu']:.1%} of its peak (MFU)")
    lines.append(
        f"{step['kernels']:,} kernels, {step['shortest_kernels']:,} of them at the floor of "
        f"{step['launch'] * 1e6:g} us; {step['conditionals']:,} conditionals"
    )
    named = [(f"{own['part']} {own['scope']}".strip() or "(unnamed)", own) for own in report["compute_by_scope"]]
    lines.append("compute: " + ", ".join(f"{name} {_ms(own['seconds'])}" for name, own in named))
    if pipeline["exchange_seconds"] > 0:
        shares = (
            f"{name} {own['overlapped_seconds'] / own['seconds']:.0%}" for name, own in named if own["seconds"] > 0
        )
        lines.append("compute overlapped with an exchange of tokens: " + ", ".join(shares))
        lines.append(
            f"exchange of tokens {_ms(pipeline['exchange_seconds'])}, experts {_ms(pipeline['experts_seconds'])}: one "
            f"next to the other is at most {pipeline['bound']:.2f} times faster (FasterMoE's bound), in this program "
            f"{pipeline['reached']:.2f}"
        )
    return lines


def _what_if_lines(report: dict) -> list[str]:
    """Return what a report says of overflows, cores and buckets."""
    lines = []
    if overflow := report.get("overflow"):
        common, chance = _ms(overflow["common_seconds"]), overflow["chance"]
        said = "not known, since planned buckets state no chance" if chance is None else f"at most {chance:.3%}"
        said = f"P(overflow) of a step is {said}; "
        if overflow["step_seconds"] is None:
            lines.append(said + "--complete compiles the complete program, for t_common + P x (t_common + t_complete)")
        else:
            complete = _ms(overflow["complete_with_passes_seconds"])
            lines += [
                f"{said}complete program {_ms(overflow['complete_seconds'])}, with all later passes in every layer "
                f"{complete}",
                f"t_common + P x (t_common + t_complete) = {common} + {chance:.3%} x ({common} + {complete}) = "
                f"{_ms(overflow['step_seconds'])}",
            ]
    for own in report.get("cores", []):
        lines.append(
            f"compute at {own['cores'] - own['taken']} / {own['cores']} next to transfers: step "
            f"{_ms(own['step_seconds'])}, exposed {_ms(own['exposed_seconds'])}"
        )
    for own in report.get("buckets", []):
        lines.append(
            f"buckets of {own['segment']}: {own['by_shape']:,} rows by shape, {own['expected']:,.0f} expected "
            f"({own['used']:.1%}), {own['exchanges']} exchanges a step"
        )
    return lines


def _measured_lines(report: dict) -> list[str]:
    """Return modelled and measured seconds side by side: of the step and its collectives, then by instruction."""
    total, step = report["measured"], report["step"]
    sides = [
        ("step", step["modelled_seconds"], total["step_seconds"]),
        ("compute", step["compute_seconds"], total["compute_seconds"]),
        ("exposed communication", step["exposed_seconds"], total["exposed_seconds"]),
    ]
    for own in report["collectives"]:
        found = own["measured"]
        sides.append((own["name"], own["seconds"], found and found["seconds"]))
        if found:
            sides.append(("  of it exposed", own["exposed_seconds"], found["exposed_seconds"]))
    lines = ["", f"measured over {total['steps']} steps on {total['devices']} devices, next to the model"]
    lines.append(f"{'':44} {'modelled ms':>14} {'measured ms':>14}")
    for name, modelled, measured in sides:
        if measured is None:
            lines.append(f"{name:<44}  not in the trace")
        else:
            lines.append(f"{name[:44]:44} {modelled * 1e3:>14.3f} {measured * 1e3:>14.3f}")
    found = report["instructions"]
    plain = "" if found["step_seconds"] is None else f"{_ms(found['step_seconds'])} without the profiler, "
    lines.append("")
    lines.append(
        f"{found['launches']} launches a step, busy {_ms(found['busy_seconds'])} of {plain}"
        f"{_ms(found['profiled_step_seconds'])} with it"
    )
    groups = [(group["group"], group) for group in found["groups"]]
    worst = [(f"{row['name']} {row['scope']}", row) for row in found["worst"]]
    for title, rows in (("group", groups), ("instructions that differ most", worst)):
        lines.append(f"{title:58} {'runs':>7} {'modelled ms':>12} {'measured ms':>12} {'ratio':>7}")
        for name, row in rows:
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
            lines.append(
                f"{name[:58]:58} {row['executions']:>7} {row['modelled_seconds'] * 1e3:>12.3f} "
                f"{row['measured_seconds'] * 1e3:>12.3f} {ratio:>7}"
            )
        lines += [""] if rows is groups else []
    for key, side in (("not_in_trace", "modelled_seconds"), ("not_in_program", "measured_seconds")):
        if found[key]["instructions"]:
            lines.append(f"{key.replace('_', ' ')}: {found[key]['instructions']} instructions, {_ms(found[key][side])}")
    lines += ["", "constants that fit (--constants=FILE takes them)"]
    for name, fitted in found["fit"].items():
        lines.append(f"  {name} {fitted['before']:.4g} -> {fitted['value']:.4g} ({fitted['samples']} samples)")
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


ROWS = ("compute", "inside nodes", "across nodes", "wait")


def write_chrome_trace(timeline: Timeline, path: pathlib.Path) -> None:
    """Write a trace for Perfetto (ui.perfetto.dev): complete events ('X'), in microseconds, one thread for each row."""
    events: list[dict] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
        for row, name in enumerate(ROWS)
    ]
    for row, name, label, begin, end in timeline.events:
        where = {"ph": "X", "pid": 0, "tid": ROWS.index(row), "name": label or name}
        when = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
        events.append({**where, **when, "args": {"instruction": name}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
