"""What a sweep of `scripts/bench_schedules.py` says: speed-ups by groups, the automatic choice, the model's error.

Inputs: measured seconds per layer and schedule, and the calibration file of the same place. Outputs: tables on the
screen, two plots, one JSON line. `parm` is whichever schedule the file makes `MoEConfig.schedule = 'parm'` take; beside
it both rules are judged: the closed form of Parm's equations 13 and 14 on fits of collectives, and `layer_seconds`.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import statistics
import subprocess

import numpy as np

from moe_jax.analysis.timed_layers import SCHEDULES

DEVICES, NEAR = 8, 1.03


def interval(samples: list[float], base: list[float], rng, draws: int = 400) -> tuple[float, float]:
    """Return the 95% bootstrap interval of median(base) / median(samples), rounds drawn in pairs."""
    n = min(len(samples), len(base))
    index = rng.integers(0, n, (draws, n))
    ratio = np.median(np.asarray(base)[index], axis=1) / np.median(np.asarray(samples)[index], axis=1)
    return tuple(float(q) for q in np.quantile(ratio, (0.025, 0.975)))


def report(path: pathlib.Path, rows: dict, cluster_path: str | None) -> None:
    """Print tables and the JSON line; draw beside the CSV file."""
    from moe_jax.analysis.timed_layers import GATHER, predict
    from moe_jax.cluster import read_cluster
    from moe_jax.errors import UserError
    from moe_jax.moe.schedules import ScheduleOptions
    from moe_jax.moe.schedules.automatic import by_equations, by_layers, choose

    if not rows:
        raise SystemExit(f"error: {path} holds no measured layer; run the sweep first")
    if not cluster_path:
        raise SystemExit("error: --report needs --cluster, the calibration file of the same place")
    try:
        cluster = read_cluster(cluster_path)
        cluster.check_devices(DEVICES, "the sweep")
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    rng = np.random.default_rng(0)
    layers, rules = [], {}
    knows_layers = any(name == "layer:deepspeed" for name, _ in cluster.fits)
    candidates = ("s1", "s2", "deepspeed") if knows_layers else ("s1", "s2")  # what parm chooses from
    for layer, samples in rows.items():
        medians = {name: statistics.median(samples[name]) for name in SCHEDULES}
        predicted = {name: predict(name, layer, DEVICES, cluster) for name in SCHEDULES}
        roles, sizes = layer.sizes(DEVICES)
        asked = (roles, sizes, 4 * layer.model_dim, cluster, ScheduleOptions(gather=GATHER))
        for rule in (by_equations, by_layers):
            choice = rule(*asked)
            rules.setdefault(choice.rule, []).append((layer, medians, choice))
        pick = "s1"
        if layer.mp_size > 1 or "deepspeed" in candidates:
            pick = choose(*asked).schedule
        low, high = interval(samples[pick], samples["deepspeed"], rng)
        layers.append((layer, {**medians, "parm": medians[pick]}, predicted, pick, low, high))
    table = _table(layers)
    answer = {
        "place": path.stem,
        "layers": len(layers),
        "speedup": table,
        **_choice(layers, candidates),
        "rules": {name: hit_rates(judged) for name, judged in rules.items()},
        **_lower_ends(layers),
        "communication_share": _shares(layers),
        "prediction": _prediction(layers),
        "fits_least_r2": _least_r2(cluster),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }
    for pair, line in table.items():
        cells = "  ".join(
            f"{n} {v['mean']:.2f} [{v['min']:.2f}, {v['max']:.2f}]" for n, v in line.items() if n != "layers"
        )
        print(f"{pair:10s} {line['layers']:3d} layers  {cells}")
    _draw(layers, path)
    for name, hits in answer["rules"].items():
        print(f"rule {name:10s} {'  '.join(f'{what} {value}' for what, value in hits.items())}")
    line = json.dumps(answer)
    path.with_name(f"{path.stem}_summary.json").write_text(line + "\n", encoding="utf-8")
    print(line)


def _table(layers) -> dict:
    """Parm's table IV: speed-ups over deepspeed per (N_MP, N_ESP)."""
    table = {}
    for pair in sorted({(layer.mp_size, layer.esp_size) for layer, *_ in layers}):
        times = [t for layer, t, *_ in layers if (layer.mp_size, layer.esp_size) == pair]
        cells: dict = {"layers": len(times)}
        for name in ("s1", "s2", "parm"):
            ratios = [t["deepspeed"] / t[name] for t in times]
            cells[name] = {"mean": _r(np.mean(ratios)), "min": _r(min(ratios)), "max": _r(max(ratios))}
        table[f"{pair[0]},{pair[1]}"] = cells
    return table


def _choice(layers, candidates) -> dict:
    """How often parm took the fastest, where there is a choice."""
    asked = [(times, pick) for layer, times, _, pick, *_ in layers if layer.mp_size > 1 or "deepspeed" in candidates]
    if not asked:
        return {}
    best = [min(times[name] for name in candidates) for times, _ in asked]
    loss = [times["parm"] / least - 1 for (times, _), least in zip(asked, best, strict=True)]
    with_mp = [times for layer, times, *_ in layers if layer.mp_size > 1]
    gains = [max(times["s1"], times["s2"]) / times["parm"] - 1 for times in with_mp]
    return {
        "pick_right": _r(np.mean([lost <= 0 for lost in loss])),
        "pick_right_or_within_3_percent": _r(np.mean([1 + lost <= NEAR for lost in loss])),
        "picked": {name: sum(pick == name for _, pick in asked) for name in candidates},
        "fastest": {
            name: sum(times[name] == least for (times, _), least in zip(asked, best, strict=True))
            for name in candidates
        },
        "faster_of_s1_and_s2": {
            "s1": sum(times["s1"] < times["s2"] for times in with_mp),
            "s2": sum(times["s2"] < times["s1"] for times in with_mp),
        },
        "parm_over_worse_mean": _r(np.mean(gains)),
        "parm_behind_better_mean": _r(np.mean(loss)),
    }


def hit_rates(judged) -> dict:
    """How often one rule's choice is the shortest that was measured, and how far behind it is, mean.

    `of_three` asks all layers for the shortest of deepspeed, s1 and s2, whatever the rule compares. `of_s1_and_s2` asks
    those with N_MP > 1, where the rule's times of these two differ, for the shorter of them: what Parm's rule is for.

    Args:
      judged: (layer, measured {schedule: seconds}, the rule's ParmChoice) of each layer.
    """
    three = [times[choice.schedule] / min(times[name] for name in SCHEDULES) for _, times, choice in judged]
    two = []
    for layer, times, choice in judged:
        if layer.mp_size > 1:
            pick = "s1" if choice.s1_seconds <= choice.s2_seconds else "s2"
            two.append(times[pick] / min(times["s1"], times["s2"]))
    found = {}
    for name, behind in (("of_three", three), ("of_s1_and_s2", two)):
        found[f"{name}_layers"] = len(behind)
        if behind:
            found[name] = _r(np.mean([ratio == 1 for ratio in behind]))
            found[f"{name}_within_3_percent"] = _r(np.mean([ratio <= NEAR for ratio in behind]))
            found[f"{name}_behind_mean"] = _r(np.mean(behind) - 1)
    return found


def _lower_ends(layers) -> dict:
    """Layers whose 95% interval of parm's speed-up begins, or ends, below 1; and the intervals of the pairs' means."""
    rng = np.random.default_rng(1)
    means = {}
    for pair in sorted({(layer.mp_size, layer.esp_size) for layer, *_ in layers}):
        ratios = np.array(
            [t["deepspeed"] / t["parm"] for layer, t, *_ in layers if (layer.mp_size, layer.esp_size) == pair]
        )
        drawn = ratios[rng.integers(0, len(ratios), (1000, len(ratios)))].mean(axis=1)
        means[f"{pair[0]},{pair[1]}"] = [_r(q) for q in np.quantile(drawn, (0.025, 0.975))]
    return {
        "parm_mean_interval_95": means,
        "layers_lower_end_below_1": [list(layer) + [_r(low), _r(high)] for layer, *_, low, high in layers if low < 1],
        "layers_upper_end_below_1": sum(high < 1 for *_, high in layers),
    }


def _shares(layers) -> dict:
    """Predicted communication over measured layer time (Parm, fig. 1): mean and quartiles."""
    shares = {}
    for name in SCHEDULES:
        values = [min(1.0, predicted[name].communication / times[name]) for _, times, predicted, *_ in layers]
        shares[name] = {
            "mean": _r(np.mean(values)),
            "quartiles": [_r(q) for q in np.quantile(values, (0.25, 0.5, 0.75))],
        }
    return shares


def _prediction(layers) -> dict:
    """Error of predicted layer times, all schedules together and each alone."""

    def judge(pairs):
        predicted, measured = np.array(pairs).T
        errors = np.abs(predicted / measured - 1)
        residual = ((predicted - measured) ** 2).sum() / ((measured - measured.mean()) ** 2).sum()
        p95, bias = np.quantile(errors, 0.95), np.median(predicted / measured)
        return {"median": _r(np.median(errors)), "p95": _r(p95), "r2": _r(1 - residual), "bias": _r(bias)}

    pairs = {name: [(p[name].total, t[name]) for layer, t, p, *_ in layers] for name in SCHEDULES}
    return {"all": judge(sum(pairs.values(), [])), **{name: judge(found) for name, found in pairs.items()}}


def _least_r2(cluster) -> list:
    name, fit = min(((n, f) for n, f in cluster.fits if f.r2 is not None), key=lambda pair: pair[1].r2)
    return [name, _r(fit.r2)]


def _draw(layers, path: pathlib.Path) -> None:
    """Speed-ups as in Parm's fig. 7, and predicted over measured times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for pair in ((4, 4), (2, 2), (1, 4)):
        ratios = [t["deepspeed"] / t["parm"] for layer, t, *_ in layers if (layer.mp_size, layer.esp_size) == pair]
        left.hist(ratios, bins=np.arange(0.5, 7.1, 0.25), alpha=0.6, label=f"N_MP, N_ESP = {pair[0]}, {pair[1]}")
    left.set_xlabel("speed-up of parm over deepspeed")
    left.set_ylabel("layers")
    left.legend(fontsize=7)
    for name in SCHEDULES:
        measured = [1e3 * t[name] for _, t, *_ in layers]
        predicted = [1e3 * p[name].total for _, _, p, *_ in layers]
        right.loglog(measured, predicted, "o", ms=3, alpha=0.6, label=name)
    ends = right.get_xlim()
    right.plot(ends, ends, lw=1, color="grey")
    right.set_xlabel("measured ms")
    right.set_ylabel("predicted ms")
    right.legend(fontsize=7)
    figure.suptitle(f"{path.stem}: {len(layers)} MoE layers, forward and backward", fontsize=9)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=80)
    plt.close(figure)


def _commit() -> str | None:
    here = pathlib.Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return git.stdout.strip() or None


def _r(number) -> float:
    return round(float(number), 4)
