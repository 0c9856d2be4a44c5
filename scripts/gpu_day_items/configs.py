"""What this machine is, and configs of runs, built in code, since gin-config may be missing."""

from __future__ import annotations

import dataclasses
import sys
from importlib import metadata


def gpt_moe_s(context, *, batch: int, layers: int = 12, model: dict | None = None, moe: dict | None = None, **train):
    """Return the RunConfig of GPT-MoE-S (configs/model/hecate_gpt_moe_s.gin), or of a tiny model of its form.

    Args:
      batch: sequences of 2,048 tokens; a tiny one has 4 of 16.
      layers: of the 12; a tiny one has 2 at most.
      model, moe: fields of `ModelConfig` and `MoEConfig`; train: of `TrainConfig`.
    """
    from moe_jax.config.run_config import RunConfig
    from moe_jax.config.train_config import TrainConfig
    from moe_jax.data.corpus import DataConfig
    from moe_jax.models.config import ModelConfig
    from moe_jax.moe.config import MoEConfig

    sizes = {"layers": layers, "model_dim": 768, "hidden_dim": 1536, "heads": 12, "vocab_size": 50304}
    experts, length = 64, 2048
    path, dtype = "", "bfloat16"
    if context.tiny:
        sizes = {"layers": min(layers, 2), "model_dim": 16, "hidden_dim": 16, "heads": 2, "vocab_size": 0}
        experts, length, batch = 8, 16, 4
        train["evaluate_windows"] = 4
        path, dtype = context.scratch / "corpus", "float32"
        path.mkdir(exist_ok=True)
        for name, step in (("a.txt", 7), ("b.txt", 11)):
            (path / name).write_text(" ".join(f"{(i * step) % 97} apples" for i in range(600)), encoding="utf-8")
    fields = {"kind": "gpt", "max_length": length, "dtype": dtype, **sizes, **(model or {})}
    return RunConfig(
        train=TrainConfig(batch_size=batch, **{"warmup_steps": 5, "evaluate_windows": 8, **train}),
        data=DataConfig(path=str(path), sequence_length=length, cache_dir=str(context.scratch / "tokens")),
        model=ModelConfig(**fields),
        moe=MoEConfig(num_experts=experts, top_k=2, **(moe or {})),
    )


def small(context, **train):
    """Return a RunConfig of two layers in bfloat16 that compiles in seconds."""
    config = gpt_moe_s(context, batch=8, layers=2, **train)
    if context.tiny:
        return config
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, model_dim=256, hidden_dim=512, heads=4, vocab_size=0, max_length=512),
        moe=dataclasses.replace(config.moe, num_experts=16),
        data=dataclasses.replace(config.data, sequence_length=512),
    )


def target_here():
    """Return the target whose rates the model takes for one of these devices, and whether it is this very device."""
    import jax

    from moe_jax.cluster.targets import device_named, parse_target

    kind = jax.devices()[0].device_kind
    name = device_named(kind)
    if name is None and jax.devices()[0].platform != "cpu":
        return None, False
    return parse_target(f"{name or 'h200'}:1x1"), name is not None


def describe_machine(context):
    """Record versions and the first device."""
    import jax

    versions = {}
    for name in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    context.record(
        **versions,
        python=".".join(map(str, sys.version_info[:3])),
        platform=device.platform,
        device_kind=device.device_kind,
        devices=len(jax.devices()),
        compute_capability=str(getattr(device, "compute_capability", "")),
        memory_bytes=int((device.memory_stats() or {}).get("bytes_limit", 0)),
    )
