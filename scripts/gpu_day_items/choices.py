"""Item 4: ten steps of GPT-MoE-S with four layers under one choice changed, the scheduler unguided."""

from __future__ import annotations

import dataclasses
import time

from gpu_day_items import configs
from gpu_day_items.context import NotHere, shown


def measure(
    context, model: dict | None = None, moe: dict | None = None, options: dict | None = None, chunk: int = 1
):  # fmt: skip
    """Compile and time one variant.

    Args:
      model, moe: fields of `ModelConfig` and `MoEConfig` that differ; options: for the compiler.
      chunk: times the default `loss_chunk`.
    """
    import jax

    from moe_jax.models.config import ModelConfig
    from moe_jax.parallel.mesh import to_devices
    from moe_jax.training.program import build_session

    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    missing = [name for name in model or {} if name not in fields]
    if missing:
        raise NotHere(f"not in this commit: ModelConfig.{missing[0]}")
    if (model or {}).get("attention") == "cudnn" and jax.devices()[0].platform == "cpu":
        raise NotHere("cuDNN attention needs a GPU")
    if moe and context.tiny:
        raise NotHere(f"{next(iter(moe))} needs dims that are multiples of 128")
    if chunk > 1 and context.tiny:
        raise NotHere("a tiny loss is one chunk")
    changed = dict(model or {})
    if chunk > 1:
        changed["loss_chunk"] = chunk * ModelConfig().loss_chunk
    config = configs.gpt_moe_s(context, batch=8, layers=context.of_size(4, 1), model=changed, moe=moe, steps=20)
    session = build_session(config, jax.devices()[:1])
    started = time.monotonic()
    lowered = session.trace_step().lower()
    executable = lowered.compile(compiler_options={**session.compiler_options(), **(options or {})})
    compiled = time.monotonic() - started
    state, tables, host_signals = session.fresh_state(), session.tables, session.host_signals(0)
    steps = context.of_size(10, 3)
    batches = [to_devices(session.feed.read(step), session.state_shardings.batch) for step in range(2 + steps)]
    for batch in batches[:2]:
        state, metrics = executable(state, batch, tables, host_signals)
    jax.block_until_ready((state, metrics))
    started = time.perf_counter()
    for batch in batches[2:]:
        state, metrics = executable(state, batch, tables, host_signals)
    jax.block_until_ready((state, metrics))
    seconds = (time.perf_counter() - started) / steps
    analysis = executable.memory_analysis()
    temporaries = None if analysis is None else int(analysis.temp_size_in_bytes)
    context.record(step_seconds=seconds, compile_seconds=compiled, temporaries=temporaries, loss=float(metrics["loss"]))
    parts = [f"{name} = {value!r}" for name, value in {**changed, **(moe or {}), **(options or {})}.items()]
    name = ", ".join(parts) or "base (attention as chosen for this device, scan, default command buffers)"
    context.row(
        name, f"{shown(seconds)} a step, temporaries {(temporaries or 0) / 1e9:.2f} GB, compiled in {compiled:.1f} s"
    )
