"""What of Trans and Agg a block-wise schedule hides, as the GPU compiler schedules the real training step.

    python scripts/bench/overlap.py --gin_file=configs/model/hecate_gpt_moe_s.gin --target=h200:4x8 --target=h200:1x8

needs the CUDA wheels of this jax in the environment, and no GPU. Every device has replicas of one expert of each of its
next --replicas neighbours, in every layer: all offer one expert and all links are alike. One row for each target,
schedule, guidance of the scheduler, and with and without the overflow branch, modelled from the program (`python -m
moe_jax.inspect` says how): of the bytes of Trans and Agg in the loops over layers, the steady state, those that have a
kernel, and a matmul, between start and done; modelled milliseconds and the share of them that is exposed, of all and in
the loops; the same for the all-to-alls; bytes per device in GB. Ceiling: 100% of the bytes, 0% exposed. The last line
is one JSON object; --out stores each case as soon as it is compiled, with its program, and skips those that it holds.
"""

from __future__ import annotations

import gzip
import itertools
import json
import pathlib
import sys

from absl import app, flags
from compile_cases import Case, Outcome, compile_case

SCHEDULES = {
    "expert parallel": (0, ()),
    "none": (None, ()),
    "hecate": (None, ("ModelConfig.prefetch = 'hecate'", "ModelConfig.refetch_replicas = True")),
    "pro_prophet": (None, ("ModelConfig.prefetch = 'pro_prophet'", "ModelConfig.refetch_replicas = True")),
}
_GIN_FILES = flags.DEFINE_multi_string("gin_file", [], "Config file; may repeat.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding; may repeat.")
_TARGETS = flags.DEFINE_multi_string("target", ["h200:4x8"], "DEVICE:NODESxDEVICES; may repeat.")
_SCHEDULES = flags.DEFINE_multi_enum("schedule", list(SCHEDULES), list(SCHEDULES), "What is compiled; may repeat.")
_GUIDED = flags.DEFINE_bool("guided", True, "Compile again, the scheduler given modelled seconds.")
_OVERFLOW = flags.DEFINE_multi_enum("overflow", ["yes", "no"], ["yes", "no"], "With the branch of later passes.")
_TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens of a device.")
_REPLICAS = flags.DEFINE_integer("replicas", 2, "Replicas on each device in each layer.")
_BY_NODE = flags.DEFINE_bool("by_node", False, "Whether replicas travel node by node.")
_OPTIONS = flags.DEFINE_multi_string("compiler_option", [], "Option for the compiler, NAME=VALUE; may repeat.")
_OUT = flags.DEFINE_string("out", "", "File of JSON lines, one for each case.")
ROW = "{:10} {:16} {:>6} {:>8} | {:>7} {:>7} {:>8} {:>8} {:>8} | {:>8} {:>8} | {:>7} {:>6} {:>6} {:>5}"


def main(argv: list[str]) -> None:
    done = read(_OUT.value)
    print(ROW.format("target", "schedule", "guided", "overflow", "kernel", "matmul", "ms", "exposed", "loops", "a2a ms",
                     "exposed", "step ms", "args", "temp", "s"))  # fmt: skip
    records = []
    for target, overflow, schedule in itertools.product(_TARGETS.value, _OVERFLOW.value, _SCHEDULES.value):
        replicas, bindings = SCHEDULES[schedule]
        case = Case(
            files=tuple(_GIN_FILES.value),
            bindings=(*bindings, *_GIN_BINDINGS.value),
            target=target,
            tokens=_TOKENS.value,
            replicas=_REPLICAS.value if replicas is None else replicas,
            by_node=_BY_NODE.value,
            options=tuple(tuple(text.split("=", 1)) for text in _OPTIONS.value),
            overflow=overflow == "yes",
        )
        key = {"target": target, "schedule": schedule, "overflow": overflow, "case": repr(case)}
        found = [r for r in done if {name: r[name] for name in key} == key]
        if len(found) < 1 + _GUIDED.value:
            found = []
            for outcome in compile_case(case, _GUIDED.value):
                found.append({**key, **recorded(outcome)})
                keep(found[-1], outcome)
        records += found
        for record in found:
            print(row(record), flush=True)
    print(json.dumps(records))


def keep(record: dict, outcome: Outcome) -> None:
    """Append a record to --out, and write its program beside it."""
    if not _OUT.value:
        return
    path = pathlib.Path(_OUT.value)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    name = "-".join(str(record[part]).replace(" ", "_") for part in ("target", "schedule", "guided", "overflow"))
    (path.parent / f"{path.stem}-{name}.hlo.gz").write_bytes(gzip.compress(outcome.text.encode()))


def read(path: str) -> list[dict]:
    """Return the records of a file, none if there is no such file."""
    found = pathlib.Path(path)
    return [json.loads(line) for line in found.read_text().splitlines()] if path and found.exists() else []


def recorded(outcome: Outcome) -> dict:
    """Return what is recorded of one compilation."""
    roles = {"all": outcome.report["totals"]["by_role"], "loops": outcome.report["in_loops"]["by_role"]}
    return {
        "guided": "yes" if outcome.guided else "no",
        "lower_seconds": outcome.lower_seconds,
        "compile_seconds": outcome.compile_seconds,
        "memory": outcome.memory,
        "step": outcome.report["step"],
        **{place: {r["role"]: r for r in rows} for place, rows in roles.items()},
    }


def moved(rows: dict) -> dict:
    """Return the sums of Trans and Agg."""
    both = [rows[role] for role in ("Trans", "Agg") if role in rows]
    return {name: sum(r[name] for r in both) for name in both[0] if name != "role"} if both else {}


def share(rows: dict, name: str, of: str) -> str:
    """Return a part of a total in percent."""
    return f"{rows[name] / rows[of]:.1%}" if rows and rows[of] else "-"


def row(record: dict) -> str:
    """Return a case as one line of the table."""
    both, loops, tokens = moved(record["all"]), moved(record["loops"]), record["all"].get("all-to-all")
    return ROW.format(
        record["target"],
        record["schedule"],
        record["guided"],
        record["overflow"],
        share(loops, "bytes_beside_kernels", "bytes"),
        share(loops, "bytes_beside_matmuls", "bytes"),
        f"{1e3 * both['seconds']:.2f}" if both else "-",
        share(both, "exposed_seconds", "seconds"),
        share(loops, "exposed_seconds", "seconds"),
        f"{1e3 * tokens['seconds']:.1f}" if tokens else "-",
        f"{1e3 * tokens['exposed_seconds']:.1f}" if tokens else "-",
        f"{1e3 * record['step']['modelled_seconds']:.1f}",
        f"{record['memory']['arguments'] / 1e9:.2f}",
        f"{record['memory']['temporaries'] / 1e9:.2f}",
        f"{record['lower_seconds'] + record['compile_seconds']:.0f}",
    )


if __name__ == "__main__":
    sys.argv[0] = "bench_overlap"
    app.run(main)
