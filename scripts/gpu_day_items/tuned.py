"""Item 10: `moe_jax.tune` on GPT-MoE-S with four layers: which settings measuring chooses here, and against plain."""

from __future__ import annotations

import logging
from unittest import mock

from gpu_day_items import configs

FIRST = ("MoEConfig.grouped_matmul", "train.guide_scheduler", "train.optimistic", "ModelConfig.stack")


def measure(context, seconds: float):
    """Search for so many seconds, and record each setting that was tried."""
    import jax

    from moe_jax.analysis import tuning

    logging.getLogger("absl").setLevel(logging.ERROR)
    config, devices = configs.gpt_moe_s(context, batch=8, layers=context.of_size(4, 1), steps=20), jax.devices()[:1]
    candidates = tuning.find_candidates(config)
    first = [one for name in FIRST for one in candidates if name in one]
    candidates = first[-2:] if context.tiny else first + [one for one in candidates if one not in first]
    rows: list[str] = []
    with mock.patch.object(tuning, "SECONDS", context.of_size(tuning.SECONDS, 0.05)):
        best, ratio = tuning.Bench(config, devices).search(candidates, seconds, rows.append)
    tried = "\n".join(rows).splitlines()[1:]
    context.record(best=tuning.text_of(best), ratio_to_plain=ratio, tried=tried)
    for number, row in enumerate(tried):
        context.row(f"setting {number}: seconds a step, to plain", row.strip())
    context.row(f"chosen: {tuning.text_of(best)}", f"{ratio:.3f} of plain")
