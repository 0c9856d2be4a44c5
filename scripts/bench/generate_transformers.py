"""Time generation beside transformers: the same weights, the same prompts, the same cores, in turn.

What it says: whether one compiled program for a token is worth having on a CPU, where transformers runs each operation
by itself on the same matrices. A Mixtral with random weights is built by transformers, written as it writes models,
converted as a user would (`moe_jax.convert`), and both continue the same prompts greedily in float32; prompts whose
texts differ are counted. Rounds are interleaved, each side's first one, which compiles or warms up, is left out, and
what is reported are medians and their ratio. transformers runs with its key-value cache, in every way of computing
experts that is named, and the ratio is to the fastest of them. Needs torch, transformers and safetensors. Ends in one
JSON line. Run it as

    python scripts/bench/generate_transformers.py --batches=1,8
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import time

from absl import app, flags

_LAYERS = flags.DEFINE_integer("layers", 8, "Layers, all with experts.")
_MODEL_DIM = flags.DEFINE_integer("model_dim", 512, "M; heads of 64 features, half as many for keys and values.")
_HIDDEN_DIM = flags.DEFINE_integer("hidden_dim", 1024, "F of each expert.")
_EXPERTS = flags.DEFINE_integer("experts", 16, "Experts of a layer, of which a token takes two.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 32000, "Tokens of the vocabulary.")
_THREADS = flags.DEFINE_integer("threads", 2, "Cores of the machine; torch's threads.")
_BATCHES = flags.DEFINE_list("batches", ["1", "8"], "Prompts generated together.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "Tokens of a prompt.")
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 32, "Tokens that follow each.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Interleaved rounds.")
_EXPERTS_BY = flags.DEFINE_list("experts_by", ["default", "eager"], "Ways of transformers to compute experts.")
_CACHES = flags.DEFINE_list("caches", ["dynamic", "static"], "Key-value caches of transformers.")


def build(folder: pathlib.Path):
    """Return transformers' model with random weights, after writing it to a folder."""
    import torch
    import transformers

    torch.set_num_threads(_THREADS.value)
    torch.manual_seed(0)
    heads = _MODEL_DIM.value // 64
    config = transformers.MixtralConfig(
        vocab_size=_VOCABULARY.value, hidden_size=_MODEL_DIM.value, intermediate_size=_HIDDEN_DIM.value,
        num_hidden_layers=_LAYERS.value, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2),
        num_local_experts=_EXPERTS.value, num_experts_per_tok=2, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    with torch.no_grad():  # larger than its own, so that a token depends on those before it
        for leaf in model.parameters():
            if leaf.ndim > 1:
                leaf.copy_(torch.randn(leaf.shape) * leaf.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def theirs(model, way: str, cache: str):
    """Return generate(prompts, new) -> (new ids [B, N], seconds [N] since the prompts went in) by transformers."""
    import torch
    import transformers

    class Clock(transformers.StoppingCriteria):
        def __init__(self):
            self.seconds = []

        def __call__(self, ids, scores, **_):
            self.seconds.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool)

    @torch.inference_mode()
    def generate(prompts, new):
        model.set_experts_implementation(way)
        ids, clock = torch.tensor(prompts), Clock()
        started = time.perf_counter()
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
            pad_token_id=0, cache_implementation=cache, stopping_criteria=[clock],
        )  # fmt: skip
        return found[:, ids.shape[1] :].tolist(), [at - started for at in clock.seconds]

    return generate


def ours(folder: pathlib.Path, workdir: pathlib.Path):
    """Return generate(prompts, new) -> (new ids, seconds) by this project, from the folder that transformers wrote."""
    from moe_jax.inference import Sampling, load
    from moe_jax.inference.conversion import import_folder

    import_folder(folder, workdir)
    model = load(workdir)

    def generate(prompts, new):
        made = model.generate(prompts, new, Sampling(temperature=0), ignore_eos=True)
        return made.token_ids, list(made.seconds)

    return generate


def measure(sides: dict, prompts) -> tuple[dict, int]:
    """Return ({(side, batch): (seconds of first tokens, of further ones)}, prompts whose texts differ anywhere)."""
    import numpy as np

    found = {}
    different = 0
    for index in range(_ROUNDS.value + 1):
        for batch in map(int, _BATCHES.value):
            texts = {}
            for name, generate in sides.items():
                texts[name], seconds = generate(prompts[:batch], _NEW_TOKENS.value)
                if index:
                    first, further = found.setdefault((name, batch), ([], []))
                    first.append(seconds[0])
                    further.extend(np.diff(seconds))
            if not index:
                same = [len({tuple(text[row]) for text in texts.values()}) == 1 for row in range(batch)]
                different += same.count(False)
    return found, different


def main(_):
    try:
        import safetensors  # noqa: F401
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        print(f"error: {error.name} is missing; python -m pip install torch transformers safetensors", file=sys.stderr)
        sys.exit(2)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    import numpy as np

    from moe_jax.parallel.host_devices import set_up_devices

    set_up_devices(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        model = build(folder / "model")
        sides = {"moe_jax": ours(folder / "model", folder / "run")}
        own_choice = model.config._experts_implementation
        for way in _EXPERTS_BY.value:
            chosen = own_choice if way == "default" else way
            for cache in _CACHES.value:
                sides[f"transformers, {way} experts, {cache} cache"] = theirs(model, chosen, cache)
        size = (max(map(int, _BATCHES.value)), _PROMPT_TOKENS.value)
        prompts = np.random.default_rng(0).integers(3, _VOCABULARY.value, size).tolist()
        found, different = measure(sides, prompts)
    print(f"{sum(leaf.numel() for leaf in model.parameters()):,} parameters; prompts whose texts differ: {different}\n")
    print("| batch | side | tokens/s while decoding | first token, ms | further token, ms: median, 90%, 99% |")
    print("|---|---|---|---|---|")
    record = []
    for batch in map(int, _BATCHES.value):
        medians = {}
        for name in sides:
            first, further = (np.asarray(seconds) * 1e3 for seconds in found[name, batch])
            medians[name] = float(np.median(further))
            shown = ", ".join(f"{value:.2f}" for value in np.percentile(further, (50, 90, 99)))
            print(f"| {batch} | {name} | {batch * 1e3 / medians[name]:.1f} | {np.median(first):.1f} | {shown} |")
            record.append(
                {"batch": batch, "side": name, "first_ms": float(np.median(first)), "further_ms": medians[name]}
            )
        own = medians.pop("moe_jax")
        best = min(medians, key=medians.get)
        print(f"| {batch} | ratio to {best} | {medians[best] / own:.2f} | | |")
    print(f"\n{json.dumps(record)}")


if __name__ == "__main__":
    app.run(main)
