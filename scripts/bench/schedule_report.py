"""What a sweep of `scripts/bench_schedules.py` says: speed-ups by groups, the automatic choice, the model's error.

Inputs: measured seconds per layer and schedule, and the calibration file of the same place. Outputs: tables on the
screen, a plot, one JSON line. `parm` is whichever schedule the file makes `MoEConfig.schedule = 'parm'` take; by it
both rules are judged: Parm's equations 13 and 14 on fits of collectives, and `layer_seconds`.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import statistics

import numpy as np

from moe_jax.analysis.timed import SCHEDULES

DEVICES, NEAR = 8, 1.03


def report(path: pathlib.Path, rows: dict, cluster_path: str | None) -> None:
    """Print tables and the JSON line; draw next to the CSV file."""
    from moe_jax.analysis.timed import predict
    from moe_jax.cluster import read_cluster
    from moe_jax.errors import UserError
    from moe_jax.moe.choosers import parm_seconds, rule_of

    if not rows:
        raise SystemExit(f"error: {path} holds no measured layer; run the sweep first")
    if not cluster_path:
        raise SystemExit("error: --report needs --cluster, the calibration file of the same place")
    try:
        cluster = read_cluster(cluster_path)
        cluster.check_devices(DEVICES, "the sweep")
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    collectives = dataclasses.replace(
        cluster, fits=tuple(fit for fit in cluster.fits if ":" in fit[0] and not fit[0].startswith("layer:"))
    )
    knows_layers = any(name == "layer:deepspeed" for name, _ in cluster.fits)
    candidates = ("s1", "s2", "deepspeed") if knows_layers else ("s1", "s2")  # what parm chooses from
    pairs: dict[str, list[dict]] = {}  # measured seconds of a layer by schedule and 'parm', by (N_MP, N_ESP)
    rules: dict[str, list] = {}
    predicted: dict[str, list] = {name: [] for name in SCHEDULES}
    behind, over_worse = [], []  # parm behind the best of its candidates; the worse of s1 and s2 over it, with N_MP > 1
    for layer, samples in rows.items():
        times = {name: statistics.median(samples[name]) for name in SCHEDULES}
        for name in SCHEDULES:
            predicted[name].append((predict(name, layer, DEVICES, cluster), times[name]))
        roles, sizes = layer.sizes(DEVICES)
        for known in (collectives, cluster):
            seconds = parm_seconds(roles, sizes, known)
            rules.setdefault(rule_of(known), []).append((layer, dict(times), seconds))
        chooses = layer.mp_size > 1 or knows_layers
        times["parm"] = times[min(seconds, key=seconds.get) if chooses else "s1"]
        if chooses:
            behind.append(times["parm"] / min(times[name] for name in candidates) - 1)
        if layer.mp_size > 1:
            over_worse.append(max(times["s1"], times["s2"]) / times["parm"] - 1)
        pairs.setdefault(f"{layer.mp_size},{layer.esp_size}", []).append(times)
    table = {}  # Parm's table IV: mean speed-ups over deepspeed, and the 95% bootstrap interval of parm's mean
    for pair, found in sorted(pairs.items()):
        ratios = {name: np.array([t["deepspeed"] / t[name] for t in found]) for name in ("s1", "s2", "parm")}
        draws = np.random.default_rng(1).integers(0, len(found), (1000, len(found)))
        interval = [_r(q) for q in np.quantile(ratios["parm"][draws].mean(axis=1), (0.025, 0.975))]
        means = {name: _r(ratio.mean()) for name, ratio in ratios.items()}
        table[pair] = cells = {"layers": len(found), **means, "parm_95": interval}
        shown = "  ".join(f"{name} {cells[name]:.2f}" for name in ("s1", "s2", "parm"))
        print(f"{pair:10s} {cells['layers']:3d} layers  {shown}  95% of parm's mean {cells['parm_95']}")
    rates = {name: _hit_rate(judged) for name, judged in rules.items()}
    for name, rate in rates.items():
        print(f"rule {name:10s} picks the shorter of s1 and s2 {rate}")
    answer = {
        "layers": len(rows),
        "speedup": table,
        "pick_right_or_within_3_percent": _r(np.mean([1 + lost <= NEAR for lost in behind])) if behind else None,
        "parm_over_worse_mean": _r(np.mean(over_worse)) if over_worse else None,
        "parm_behind_best_mean": _r(np.mean(behind)) if behind else None,
        "rules": rates,
        "prediction": {
            "all": _errors(sum(predicted.values(), [])),
            **{name: _errors(found) for name, found in predicted.items()},
        },
        "date": datetime.date.today().isoformat(),
    }
    _draw(pairs, predicted, path)
    line = json.dumps(answer)
    path.with_name(f"{path.stem}_summary.json").write_text(line + "\n", encoding="utf-8")
    print(line)


def _hit_rate(judged) -> float | None:
    """Return how often a rule picks the shorter of s1 and s2, which is what Parm's rule is for; None without a choice.

    Args:
      judged: (layer, measured {schedule: seconds}, the rule's {schedule: seconds}) of each layer; with N_MP = 1 the
        rule's times of the two do not differ.
    """
    rights = [
        times[min(("s1", "s2"), key=ours.get)] == min(times["s1"], times["s2"])
        for layer, times, ours in judged
        if layer.mp_size > 1
    ]
    return _r(np.mean(rights)) if rights else None


def _errors(pairs: list) -> dict:
    """Return how predicted layer times differ from measured ones, from (prediction, measured seconds)."""
    ours, measured = (np.array(side) for side in zip(*((sum(p), seconds) for p, seconds in pairs), strict=True))
    residual = ((ours - measured) ** 2).sum() / ((measured - measured.mean()) ** 2).sum()
    return {"median": _r(np.median(np.abs(ours / measured - 1))), "r2": _r(1 - residual)}


def _draw(pairs, predicted, path: pathlib.Path) -> None:
    """Speed-ups as in Parm's fig. 7, and predicted over measured times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for pair in ("4,4", "2,2", "1,4"):
        ratios = [t["deepspeed"] / t["parm"] for t in pairs.get(pair, ())]
        left.hist(ratios, bins=np.arange(0.5, 7.1, 0.25), alpha=0.6, label=f"N_MP, N_ESP = {pair}")
    left.set_xlabel("speed-up of parm over deepspeed")
    left.set_ylabel("layers")
    left.legend(fontsize=7)
    for name, found in predicted.items():
        measured, ours = [1e3 * s for _, s in found], [1e3 * sum(p) for p, _ in found]
        right.loglog(measured, ours, "o", ms=3, alpha=0.6, label=name)
    ends = right.get_xlim()
    right.plot(ends, ends, lw=1, color="grey")
    right.set_xlabel("measured ms")
    right.set_ylabel("predicted ms")
    right.legend(fontsize=7)
    figure.suptitle(f"{path.stem}: {sum(map(len, pairs.values()))} MoE layers, forward and backward", fontsize=9)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=80)
    plt.close(figure)


def _r(number) -> float:
    return round(float(number), 4)
