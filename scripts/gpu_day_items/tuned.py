"""Item 10: `moe_jax.tune` on GPT-MoE-S with four layers: which settings measuring chooses here, and against plain."""

from __future__ import annotations

import logging

from gpu_day_items import configs

FIRST = ("MoEConfig.grouped_matmul", "train.guide_scheduler", "train.optimistic", "ModelConfig.stack")


def measure(context, seconds: float):
    """Search for so many seconds, and record each setting that was tried."""
    import jax

    from moe_jax.analysis import tuning
    from moe_jax.config.run_config import config_text

    logging.getLogger("absl").setLevel(logging.ERROR)
    config, devices = configs.gpt_moe_s(context, batch=8, layers=context.of_size(4, 1), steps=20), jax.devices()[:1]
    plain, candidates, _ = tuning.prepare(config, devices)
    first = ["ModelConfig.stack"] if context.tiny else [knob for knob in FIRST if knob in candidates]
    candidates = {knob: candidates[knob] for knob in (*first, *(() if context.tiny else candidates))}
    key = tuning.journal_key(config_text(config), devices)
    journal = tuning.Journal(context.scratch / "tuned.journal.jsonl", key, print)
    bench = tuning.Bench(config, devices)
    bench.least_seconds = context.of_size(bench.least_seconds, 0.05)
    found = tuning.search(plain, candidates, bench, journal, seconds, print)
    best = tuning.text_of(found["best"], plain)
    context.record(best=best, ratio_to_plain=found["answer"]["ratio"], tried=found["rows"])
    for text, step, ratio, said in found["rows"]:
        context.row(text, said if step is None else f"{step * 1e3:.1f} ms a step, {ratio:.3f} of plain ({said})")
    context.row(f"chosen: {best}", f"{found['answer']['ratio']:.3f} of plain in {found['answer']['rounds']} rounds")
