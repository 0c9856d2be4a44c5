"""Time generation: tokens a second, and how long the first and every further token takes, at several batches.

    python scripts/bench/generate.py --workdir=runs/demo          # a trained run, or --gin_file with fresh parameters
    python scripts/bench/generate.py --against=experts --model_dim=256 --layers=16 --prompt_tokens=16 --new_tokens=32
    python scripts/bench/generate.py --against=transformers --batches=1,8 --rounds=3 --new_tokens=24

What it says: what a user waits for. A prompt's first token waits for the whole prompt (prefill), every further one for
a pass over the weights that its batch activates. All sides continue the same prompts greedily; rounds are interleaved
over sides and batches, and the first, which compiles, is left out. Ends in one JSON line.

experts: what experts cost where a token waits for weights. A dense model (one expert that every token takes), mixtures
  of experts and a dense model with about five times the parameters. Source: Rajbhandari et al. 2022 (DeepSpeed-MoE),
  sections 4 and 5, scaled down: experts in every second block and top-1 (their 350M+MoE-128), PR-MoE with a residual
  expert, half the experts in the last two MoE blocks and a quarter in the others (their 32/64), MoS with an eighth of
  the blocks less. Parameters are fresh, so routing is as even as fresh gates are.
transformers: a Mixtral with random weights is built by transformers, written as it writes models, converted as a user
  would, and both decode in float32; transformers with each of its caches and ways to compute experts, and prompts whose
  texts differ are counted. Needs torch, transformers and safetensors.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

_GIN_FILES = flags.DEFINE_multi_string("gin_file", ["configs/run/demo.gin"], "Config file.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding.")
_WORKDIR = flags.DEFINE_string("workdir", "", "Run folder to take config and parameters of.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", 1, "Devices that the CPU is split into.")
_AGAINST = flags.DEFINE_enum("against", "", ["", "experts", "transformers"], "What else is timed.")
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "64"], "Prompts generated together.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "Tokens of a prompt.")
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "Tokens that follow each.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved rounds.")
_MODEL_DIM = flags.DEFINE_integer("model_dim", 512, "M with --against.")
_LAYERS = flags.DEFINE_integer("layers", 8, "Layers with --against; with 'experts' a multiple of 16.")
_EXPERTS = flags.DEFINE_integer("experts", 0, "Experts with --against; 0 takes 32 of 'experts', 16 of 'transformers'.")


def fresh_generator(gin_files, bindings):
    """Return (generator with fresh parameters of a config, what `parameter_counts` says)."""
    import jax

    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.data.tokenizer import build_tokenizer
    from moe_jax.inference import Generator
    from moe_jax.inference.generator import build_model
    from moe_jax.models.counts import parameter_counts

    config = parse_run_config(gin_files, bindings)[0]
    tokenizer = build_tokenizer(config.data)
    model = build_model(config, jax.devices(), tokenizer)
    shardings = jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(model.roles.mesh, spec),
        model.layout().params,
        is_leaf=lambda node: isinstance(node, jax.sharding.PartitionSpec),
    )
    params = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0))
    counts = parameter_counts(model.config, model.moe, model.vocab_size)
    made = Generator(model, params, tokenizer=tokenizer, vocabulary=tokenizer.vocab_size)
    return made, counts


def decoder(generator):
    """Return decode(prompts, new) -> (new ids, seconds [new] since the prompts went in) of a `Generator`."""
    from moe_jax.inference import Sampling

    def decode(prompts, new):
        made = generator.generate(prompts, new, Sampling(temperature=0), ignore_eos=True)
        return made.token_ids, list(made.seconds)

    return decode


def expert_models() -> dict[str, list[str]]:
    """Return {name: bindings} of DeepSpeed-MoE's models."""
    experts, layers = _EXPERTS.value or 32, _LAYERS.value

    def bindings(dim, layers, experts, *more):
        sizes = {"layers": layers, "moe_every": 2, "model_dim": dim, "heads": 8, "hidden_dim": 4 * dim}
        lines = [f"ModelConfig.{name} = {value}" for name, value in sizes.items()]
        router = ["MoEConfig.router = 'switch'"] if experts > 1 else []
        return [*lines, f"MoEConfig.num_experts = {experts}", "MoEConfig.top_k = 1", *router, *more]

    def pyramid(blocks):
        runs = ((blocks - 4, experts // 4), (4, experts // 2))
        texts = tuple(f"layers={count} moe_every=2 num_experts={own}" for count, own in runs)
        return f"ModelConfig.segments = {texts!r}", "MoEConfig.shared_experts = 1"

    dim, fewer = _MODEL_DIM.value, layers - layers // 8
    return {
        "dense": bindings(dim, layers, 1),
        "MoE": bindings(dim, layers, experts),
        "PR-MoE": bindings(dim, layers, experts, *pyramid(layers)),
        "PR-MoE + MoS": bindings(dim, fewer, experts, *pyramid(fewer)),
        "dense, 5 times the parameters": bindings(round(dim * 5**0.5 / 16) * 16, layers, 1),
    }


def transformers_sides(folder: pathlib.Path) -> dict:
    """Return {name: decode} of a Mixtral in transformers, by each cache and way to compute experts, and of ours."""
    try:
        import safetensors  # noqa: F401
        import torch
        import transformers
    except ImportError as error:
        print(f"error: {error.name} is missing; python -m pip install torch transformers safetensors", file=sys.stderr)
        sys.exit(2)
    from moe_jax.inference import load
    from moe_jax.inference.conversion import import_folder

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(os.cpu_count())
    torch.manual_seed(0)
    dim, heads = _MODEL_DIM.value, _MODEL_DIM.value // 64
    config = transformers.MixtralConfig(
        vocab_size=32000, hidden_size=dim, intermediate_size=2 * dim, num_hidden_layers=_LAYERS.value,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), num_local_experts=_EXPERTS.value or 16,
        num_experts_per_tok=2, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    with torch.no_grad():  # larger than its own, so that a token depends on those before it
        for leaf in model.parameters():
            if leaf.ndim > 1:
                leaf.copy_(torch.randn(leaf.shape) * leaf.shape[-1] ** -0.5)
    model.save_pretrained(folder / "model")
    import_folder(folder / "model", folder / "run")

    class Clock(transformers.StoppingCriteria):
        def __init__(self):
            self.seconds = []

        def __call__(self, ids, scores, **_):
            self.seconds.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool)

    def theirs(way, cache):
        @torch.inference_mode()
        def decode(prompts, new):
            model.set_experts_implementation(way)
            ids, clock = torch.tensor(prompts), Clock()
            started = time.perf_counter()
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
                pad_token_id=0, cache_implementation=cache, stopping_criteria=[clock],
            )  # fmt: skip
            return found[:, ids.shape[1] :].tolist(), [at - started for at in clock.seconds]

        return decode

    ways = (("default", model.config._experts_implementation), ("eager", "eager"))
    found = {f"{name} experts, {c} cache": theirs(way, c) for name, way in ways for c in ("dynamic", "static")}
    return {"moe_jax": decoder(load(folder / "run")), **found}


def measure(sides: dict, vocabulary: int) -> list[dict]:
    """Print and return rows {batch, side, tokens_per_second, first_ms, further_ms}: ms are the 50, 90, 99% of all."""
    batches = [int(text) for text in _BATCHES.value]
    prompts = np.random.default_rng(0).integers(3, vocabulary, (max(batches), _PROMPT_TOKENS.value)).tolist()
    found: dict = {(batch, name): ([], []) for batch in batches for name in sides}
    texts: dict = {}
    for index in range(_ROUNDS.value + 1):
        for (batch, name), (first, further) in found.items():
            ids, seconds = sides[name](prompts[:batch], _NEW_TOKENS.value)
            if index:  # the first round compiles
                first.append(seconds[0])
                further.extend(np.diff(seconds))
            else:
                texts.setdefault(batch, []).append(ids)
    if _AGAINST.value == "transformers":
        differ = sum(any(own != text[0] for own in text) for ids in texts.values() for text in zip(*ids, strict=True))
        print(f"prompts whose texts differ: {differ}\n")
    print("| batch | side | tokens/s decoding | first token, ms: median, 90%, 99% | further token, ms | slower |")
    print("|---|---|---|---|---|---|")
    record = []
    for (batch, name), times in found.items():
        parts = [np.percentile(np.asarray(seconds) * 1e3, (50, 90, 99)) for seconds in times]
        record.append({"batch": batch, "side": name, "tokens_per_second": batch * 1e3 / parts[1][0],
                       "first_ms": parts[0].tolist(), "further_ms": parts[1].tolist()})  # fmt: skip
        least = min(row["further_ms"][0] for row in record if row["batch"] == batch)
        shown = " | ".join(", ".join(f"{value:.2f}" for value in part) for part in parts)
        rate = record[-1]["tokens_per_second"]
        print(f"| {batch} | {name} | {rate:.0f} | {shown} | {parts[1][0] / least:.2f} |")
    return record


def main(_):
    from moe_jax.inference import load
    from moe_jax.parallel.mesh import set_up_devices

    set_up_devices(_HOST_DEVICES.value)
    print(f"{_PROMPT_TOKENS.value} tokens a prompt, {_NEW_TOKENS.value} new ones, {_HOST_DEVICES.value} device(s)\n")
    with tempfile.TemporaryDirectory() as scratch:
        vocabulary = 256
        if _AGAINST.value == "transformers":
            sides, vocabulary = transformers_sides(pathlib.Path(scratch)), 32000
        elif _AGAINST.value == "experts":
            sides = {}
            for name, bindings in expert_models().items():
                generator, counts = fresh_generator((), bindings)
                print(f"{name}: {counts[0]:,} parameters, {counts[1]:,} activated")
                sides[name] = decoder(generator)
        elif _WORKDIR.value:
            sides = {"": decoder(load(_WORKDIR.value, bindings=_GIN_BINDINGS.value))}
        else:
            sides = {"": decoder(fresh_generator(_GIN_FILES.value, _GIN_BINDINGS.value)[0])}
        print(f"\n{json.dumps(measure(sides, vocabulary))}")


if __name__ == "__main__":
    app.run(main)
