"""How close `moe_jax.tune` comes to the best of plain and settings drawn at random.

Draws settings by --seed from the cross product of all that tune moves, those that build; times plain, these and what
tune chose (its journal is in --out) in interleaved rounds, and the fastest of all again, beside tune's choice, in fresh
rounds. But for noise no ratio is below 1; the bar is 1.03. A file whose plain takes 1.15 times its best
(`plain_over_best`) shows that tune finds something.

    python scripts/bench/tune.py --seed=1 --out=runs/bench_tune
    python scripts/bench/tune.py --seed=1 --out=runs/bench_tune --gin_bindings='ModelConfig.remat = "block"'

Ends in one JSON line. The search takes its budget, and the rest the builds and rounds of --draws programs.
"""

from __future__ import annotations

import datetime
import functools
import json
import platform
import random
from pathlib import Path

from absl import app, flags

_GIN_FILES = flags.DEFINE_multi_string("gin_file", ["configs/run/demo.gin"], "Config file.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", 8, "Devices that the CPU is split into; 0 takes jax's.")
_SEED = flags.DEFINE_integer("seed", None, "By which settings are drawn.", required=True)
_DRAWS = flags.DEFINE_integer("draws", 12, "Settings that are drawn.")
_BUDGET = flags.DEFINE_float("budget_seconds", 1200, "Of tune.")
_OUT = flags.DEFINE_string("out", None, "Folder of the journal, and of the JSON.", required=True)


def draw(plain, candidates, bench, loss: float, count: int, rng: random.Random) -> tuple[dict, dict]:
    """Return {text: setting} of drawn settings whose programs `bench` holds, and {text: why} of others."""
    from moe_jax.analysis.tuning import text_of

    held, refused = {}, {}
    while len(held) < count:
        setting = {name: rng.choice(values) for name, values in candidates.items()}
        text = text_of(setting, plain)
        if text in held or text in refused or text == "plain":
            continue
        try:
            bench.start(text, setting, loss)
        except Exception as error:  # does not build here
            refused[text] = f"{type(error).__name__}: {str(error)[:200]}"
            print(f"not possible: {text}: {refused[text]}", flush=True)
            continue
        held[text] = setting
        print(f"{len(held)} of {count}: {text}", flush=True)
    return held, refused


def main(_):
    import jax

    from moe_jax.analysis import tuning
    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.parallel.mesh import set_up_devices

    set_up_devices(_HOST_DEVICES.value or None)
    config, text, _ = parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value)
    devices, out = jax.devices(), Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    plain, candidates, _ = tuning.prepare(config, devices)
    key, say = tuning.journal_key(text, devices), functools.partial(print, flush=True)
    journal, bench = tuning.Journal(out / "tuned.journal.jsonl", key, say), tuning.Bench(config, devices)
    found = tuning.search(plain, candidates, bench, journal, _BUDGET.value, say)
    chosen = tuning.text_of(found["best"], plain)
    loss = bench.time({"plain": plain})["loss"]
    drawn, refused = draw(plain, candidates, bench, loss, _DRAWS.value, random.Random(_SEED.value))
    timed = bench.time({"plain": plain, **drawn, chosen: found["best"]}, loss)
    best = min(timed["seconds"], key=lambda name: timed["seconds"][name])
    again = (
        timed if best == chosen else bench.time({best: {"plain": plain, **drawn}[best], chosen: found["best"]}, loss)
    )
    ratio = again["seconds"][chosen] / again["seconds"][best]
    answer = {
        "chosen": chosen,
        "best": best,
        "ratio_to_best": round(ratio, 4),
        "fresh_rounds": again["rounds"],
        "plain_over_best": round(timed["seconds"]["plain"] / timed["seconds"][best], 4),
        "seconds": {name: round(seconds, 5) for name, seconds in timed["seconds"].items()},
        "rounds": timed["rounds"],
        "refused": refused,
        "tried_by_tune": len(found["rows"]),
        "tune_seconds": round(journal.spent, 1),
        "seed": _SEED.value,
        "bindings": _GIN_BINDINGS.value,
        "machine": [key["cpu"], key["machine"], key["devices"], platform.node()],
        "commit": [key["commit"], key["source"]],
        "date": datetime.date.today().isoformat(),
    }
    (out / f"seed_{_SEED.value}.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(answer))


if __name__ == "__main__":
    app.run(main)
