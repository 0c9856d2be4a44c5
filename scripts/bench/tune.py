"""How close `moe_jax.tune` comes to the best of settings drawn at random.

Draws settings by --seed from the cross product of all that tune tries, those that run; times each in turn with what
tune chose, and the fastest of them again, in fresh rounds (`chosen_over_best_drawn`; the bar is 1.03). A file whose
plain takes 1.15 times what was chosen (`plain_over_chosen`) shows that tune finds something.

    python scripts/bench/tune.py --seed=1 --out=runs/bench_tune
    python scripts/bench/tune.py --seed=1 --out=runs/bench_tune --gin_bindings='ModelConfig.remat = "block"'

Ends in one JSON line. The search takes its budget, and the rest the builds and rounds of --draws programs.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

from absl import app, flags

_GIN_FILES = flags.DEFINE_multi_string("gin_file", ["configs/run/demo.gin"], "Config file.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", 8, "Devices that the CPU is split into; 0 takes jax's.")
_SEED = flags.DEFINE_integer("seed", None, "By which settings are drawn.", required=True)
_DRAWS = flags.DEFINE_integer("draws", 12, "Settings that are drawn.")
_BUDGET = flags.DEFINE_float("budget_seconds", 1200, "Of tune.")
_OUT = flags.DEFINE_string("out", None, "Folder of the JSON.", required=True)


def main(_):
    import jax
    from moe_jax.observe.run_folder import environment_record

    from moe_jax.analysis.tuning import Bench, find_candidates, text_of
    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.parallel.mesh import set_up_devices

    set_up_devices(_HOST_DEVICES.value or None)
    config = parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value)[0]
    devices, out, rng = jax.devices(), Path(_OUT.value), random.Random(_SEED.value)
    out.mkdir(parents=True, exist_ok=True)
    say, bench, candidates = functools.partial(print, flush=True), Bench(config, devices), find_candidates(config)
    chosen, over_plain = bench.search(candidates, _BUDGET.value, say)
    values = {name: [one[name] for one in candidates if name in one] for one in candidates for name in one}
    ratios, settings, refused = {}, {}, {}  # seconds over those of what was chosen
    while len(ratios) < _DRAWS.value:
        setting = {name: rng.choice(of_name) for name, of_name in values.items()}
        text = text_of(setting)
        try:
            ratios[text], settings[text] = bench.race(chosen, setting)[1], setting
        except Exception as error:  # does not run here
            refused[text] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        say(f"{len(ratios)} of {_DRAWS.value}: {ratios[text]:.3f} of the chosen one's seconds: {text}")
    best = min(ratios, key=lambda text: ratios[text])
    answer = {
        "chosen": text_of(chosen),
        "best_drawn": best,
        "chosen_over_best_drawn": round(1 / bench.race(chosen, settings[best])[1], 4),
        "plain_over_chosen": round(1 / over_plain, 4),
        "ratios": {text: round(ratio, 4) for text, ratio in ratios.items()},
        "refused": refused,
        "seed": _SEED.value,
        "bindings": _GIN_BINDINGS.value,
        **environment_record(devices=[{"platform": one.platform, "kind": one.device_kind} for one in devices]),
    }
    (out / f"seed_{_SEED.value}.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    say(json.dumps(answer))


if __name__ == "__main__":
    app.run(main)
