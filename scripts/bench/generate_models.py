"""Time decode of models that differ in their experts: dense, mixtures of experts, and DeepSpeed-MoE's smaller ones.

What it says: what experts cost where a token waits for weights. Of each model: parameters, those that a token takes,
and milliseconds of a decode step at several batches. A dense model is one expert that every token takes, so that one
program measures all; parameters are fresh, so text means nothing, and routing is as even as fresh gates are. Rounds are
interleaved over models and batches after one that compiles. Ends in one JSON line. Run it as

    python scripts/bench/generate_models.py

Source of the models: Rajbhandari et al. 2022 (DeepSpeed-MoE), sections 4 and 5, scaled down: experts in every second
block and top-1 (their 350M+MoE-128), PR-MoE with a residual expert, half the experts in the last two MoE blocks and a
quarter in the others (their 32/64), MoS with an eighth of the blocks less, and a dense model with about five times the
parameters, which there reaches the same quality.
"""

from __future__ import annotations

import json

from absl import app, flags

_DIM = flags.DEFINE_integer("model_dim", 256, "M of all but the large dense model; experts have hidden dim 4 M.")
_LAYERS = flags.DEFINE_integer("layers", 16, "Blocks, a multiple of 16.")
_EXPERTS = flags.DEFINE_integer("experts", 32, "Experts of the standard model's MoE blocks.")
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "64"], "Prompts generated together.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 16, "Tokens of a prompt.")
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 32, "Tokens that follow each.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved rounds.")


def models(dim: int, layers: int, experts: int) -> dict[str, list[str]]:
    """Return {name: bindings} of the models that are compared."""

    def bindings(dim, layers, experts, *more):
        sizes = {"layers": layers, "moe_every": 2, "model_dim": dim, "heads": 8, "hidden_dim": 4 * dim}
        lines = [f"ModelConfig.{name} = {value}" for name, value in sizes.items()]
        routed = [f"MoEConfig.num_experts = {experts}", "MoEConfig.top_k = 1", "MoEConfig.router = 'switch'"]
        return [*lines, *(routed if experts > 1 else ["MoEConfig.num_experts = 1", "MoEConfig.top_k = 1"]), *more]

    def pyramid(blocks):
        runs = ((blocks - 4, experts // 4), (4, experts // 2))
        texts = tuple(f"layers={count} moe_every=2 num_experts={own}" for count, own in runs)
        return f"ModelConfig.segments = {texts!r}"

    residual = ("MoEConfig.shared_experts = 1",)
    fewer = layers - layers // 8
    return {
        "dense": bindings(dim, layers, 1),
        "MoE": bindings(dim, layers, experts),
        "PR-MoE": bindings(dim, layers, experts, pyramid(layers), *residual),
        "PR-MoE + MoS": bindings(dim, fewer, experts, pyramid(fewer), *residual),
        "dense, 5 times the parameters": bindings(round(dim * 5**0.5 / 16) * 16, layers, 1),
    }


def build(bindings: list[str]):
    """Return (generator with fresh parameters, `ParameterCounts`)."""
    import jax

    from moe_jax.config import parse_run_config
    from moe_jax.data import build_tokenizer
    from moe_jax.inference import Generator
    from moe_jax.inference.load import build_model
    from moe_jax.models.counts import parameter_counts

    config = parse_run_config((), bindings)[0]
    tokenizer = build_tokenizer(config.data)
    model = build_model(config, jax.devices()[:1], tokenizer)
    params = jax.jit(model.init)(jax.random.key(0))
    counts = parameter_counts(model.config, model.moe, model.vocab_size)
    return Generator(model, params, tokenizer=tokenizer, vocabulary=tokenizer.vocab_size), counts


def measure(generators: dict, batches: list[int]) -> dict:
    """Return {(name, batch): seconds of decode steps}, of all rounds."""
    import numpy as np

    from moe_jax.inference import Sampling

    prompts = np.random.default_rng(0).integers(0, 256, (max(batches), _PROMPT_TOKENS.value)).tolist()
    found: dict = {(name, batch): [] for batch in batches for name in generators}
    for index in range(_ROUNDS.value + 1):
        for name, batch in found:
            made = generators[name].generate(
                prompts[:batch], _NEW_TOKENS.value, Sampling(temperature=0), ignore_eos=True
            )
            if index:  # the first round compiles
                found[name, batch].extend(np.diff(made.seconds))
    return found


def main(_):
    import numpy as np

    from moe_jax.parallel.host_devices import set_up_devices

    set_up_devices(1)
    built = {name: build(lines) for name, lines in models(_DIM.value, _LAYERS.value, _EXPERTS.value).items()}
    batches = [int(text) for text in _BATCHES.value]
    found = measure({name: generator for name, (generator, _) in built.items()}, batches)
    columns = " | ".join(f"batch {batch}: ms a step, tokens/s" for batch in batches)
    print(f"| model | parameters | activated | {columns} |")
    print("|---|---|---|" + "---|" * len(batches))
    record = {}
    for name, (_, counts) in built.items():
        steps = [float(np.median(found[name, batch])) for batch in batches]
        shown = " | ".join(f"{1e3 * step:.2f}, {batch / step:.0f}" for step, batch in zip(steps, batches, strict=True))
        print(f"| {name} | {counts.total:,} | {counts.active:,} | {shown} |")
        record[name] = {"parameters": counts.total, "active": counts.active, "step_ms": [1e3 * s for s in steps]}
    print(f"\n{json.dumps(record)}")


if __name__ == "__main__":
    app.run(main)
