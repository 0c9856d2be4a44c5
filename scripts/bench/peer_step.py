"""Time a training step on the CPU beside one of transformers: the same model, parameters, batches and optimizer.

What it says: what a user of either waits for on one machine without a GPU. The floor is the matmuls alone, printed in
GFLOP next to the rate that one square matmul reaches here. Both sides compute in float32, clip gradients by their norm
(--clip_norm) and update by AdamW; the gate has no loss of its own. The peer runs in a process and an environment of
its own (--peer, made where it is missing), as transformers is fastest on a CPU: grouped_mm experts, sdpa, fused AdamW.
Sides take turns, and the one that waits sleeps; the first steps, which compile, are left out; the ratio is that of the
medians of all steps. Ends in one JSON line for each model. Run it as

    python scripts/bench/peer_step.py --peer=/tmp/peer

    qwen    Qwen3-MoE, 64 experts, top 8        few     Qwen3-MoE, 8 experts, top 2
    shared  dots1, 64 experts, top 6, and two shared experts of the same size; its scores are sigmoids
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags, logging

_PEER = flags.DEFINE_string("peer", "", "Folder of the peer's environment; '' makes one that is lost at the end.")
_MODELS = flags.DEFINE_list("models", ["qwen", "few", "shared"], "Models to train: qwen, few, shared.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved rounds.")
_STEPS = flags.DEFINE_integer("steps", 3, "Steps of each side in a round.")
_WARMUP = flags.DEFINE_integer("warmup", 2, "Steps before the clock starts.")
_CLIP_NORM = flags.DEFINE_float("clip_norm", 1.0, "Largest gradient norm, of both; 0 clips neither.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Further binding of our side.")
_SERVE = flags.DEFINE_string("serve", "", "Folder of the exchange; set in the peer's own process alone.")

ROWS, LENGTH, VOCABULARY, LEARNING_RATE, DECAY, BETAS, EPSILON = 4, 512, 264, 1e-3, 0.1, (0.9, 0.95), 1e-8
PACKAGES = ("torch==2.13.0", "transformers", "absl-py")
SIZES = {  # {name: (model_type, keys of config.json)}
    "qwen": ("qwen3_moe", {"num_experts": 64, "num_experts_per_tok": 8}),
    "few": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "shared": ("dots1", {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
                         "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}),
}  # fmt: skip
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 256,
    "max_position_embeddings": 1024, "norm_topk_prob": True, "tie_word_embeddings": False, "router_aux_loss_coef": 0.0,
}  # fmt: skip


def batches() -> np.ndarray:
    """Return int32 [steps, B, Sq + 1], tokens of which a next one can be learned: a walk of small steps."""
    steps = _WARMUP.value + _ROUNDS.value * _STEPS.value
    moves = np.random.default_rng(0).integers(0, 4, (steps, ROWS, LENGTH + 1))
    return (np.cumsum(moves, axis=2) % VOCABULARY).astype(np.int32)


def serve(folder: pathlib.Path) -> None:
    """Run the peer: make its model, write it to `folder`, then train as many steps as each line of stdin says."""
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(os.cpu_count())
    torch.manual_seed(0)
    model_type, keys = SIZES[_MODELS.value[0]]
    keys = {key: value for key, value in COMMON.items() if model_type == "qwen3_moe" or "aux" not in key} | keys
    config = transformers.AutoConfig.for_model(model_type, **keys)
    config._experts_implementation, config._attn_implementation = "grouped_mm", "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    model.save_pretrained(folder / "model")
    # moe_jax decays neither norms nor gates
    plain = [leaf for name, leaf in model.named_parameters() if "norm" in name or ".gate." in name]
    decayed = [leaf for leaf in model.parameters() if all(leaf is not other for other in plain)]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)
    tokens = torch.from_numpy(batches()).long()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    used = model.config._experts_implementation, model.config._attn_implementation
    print(json.dumps({"versions": versions, "used": used}), flush=True)
    step = 0
    for line in sys.stdin:
        seconds, losses = [], []
        for _ in range(int(line)):
            started = time.perf_counter()
            logits = model(input_ids=tokens[step, :, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[step, :, 1:].flatten())
            loss.backward()
            if _CLIP_NORM.value:
                torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM.value)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            seconds.append(time.perf_counter() - started)
            step += 1
        print(json.dumps([seconds, losses]), flush=True)


class Peer:
    """The peer's process; called with a number of steps, it gives their seconds and losses."""

    def __init__(self, python: pathlib.Path, model: str, folder: pathlib.Path):
        own = ("rounds", "steps", "warmup", "clip_norm")
        given = [f"--{name}={flags.FLAGS[name].value}" for name in own]
        command = [python, __file__, f"--serve={folder}", f"--models={model}", *given]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with exit code {self.process.wait()}; its message stands above")
        return json.loads(line)

    def __call__(self, steps: int):
        print(steps, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def peer_python(folder: pathlib.Path) -> pathlib.Path:
    """Return the interpreter of the peer's environment, which is made in `folder` where it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def our_side(model: str, folder: pathlib.Path):
    """Return (run(steps) -> (seconds, losses), what the step runs with), from the model that the peer wrote."""
    import jax

    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.inference.conversion import import_folder
    from moe_jax.models import Batch
    from moe_jax.parallel.mesh import to_devices
    from moe_jax.storage.checkpoint import Checkpointer
    from moe_jax.training.program import build_session

    import_folder(folder / "model", folder / "run")
    train = {
        "batch_size": ROWS, "learning_rate": LEARNING_RATE, "learning_rate_schedule": "'constant'", "warmup_steps": 0,
        "weight_decay": DECAY, "beta1": BETAS[0], "beta2": BETAS[1], "epsilon": EPSILON, "clip_norm": _CLIP_NORM.value,
    }  # fmt: skip
    bindings = [f"train.{name} = {value}" for name, value in train.items()]
    # written out, few layers train faster on a CPU; the peer leaves the bias of a sigmoid router as it is
    bindings += [f"DataConfig.sequence_length = {LENGTH}", "ModelConfig.stack = 'unrolled'"]
    bindings += ["SigmoidBias.bias_rate = 0.0"] if SIZES[model][0] == "dots1" else []
    bindings += _GIN_BINDINGS.value
    config, _ = parse_run_config([str(folder / "run" / "config.gin")], bindings)
    session = build_session(config, jax.devices()[:1])
    executable, _ = session.compile_step()
    checkpoints = Checkpointer(folder / "run" / "checkpoints", keep=1)
    params = checkpoints.restore(0, session.abstract_state()["params"], session.model.even_homes, "params")
    checkpoints.close()
    held = {"state": session.fresh_state(params), "step": 0}
    signals, tokens = session.host_signals(0), batches()

    def run(steps: int):
        seconds, losses = [], []
        for _ in range(steps):
            started = time.perf_counter()
            own = tokens[held["step"]][None]
            batch = Batch(own[..., :-1], own[..., 1:], np.ones(own[..., 1:].shape, np.float32))
            batch = to_devices(batch, session.state_shardings.batch)
            held["state"], metrics = executable(held["state"], batch, session.tables, signals)
            losses.append(float(metrics["loss"]))
            jax.block_until_ready(held["state"])
            seconds.append(time.perf_counter() - started)
            held["step"] += 1
        return seconds, losses

    return run, session.resolved()


def matmul_rate() -> float:
    """Return the GFLOP/s of one square float32 matmul of 2,048, the best of five."""
    import jax

    a = jax.numpy.ones((2048, 2048), np.float32)
    product = jax.jit(lambda a: a @ a)
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        product(a).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return 2 * 2048**3 / min(seconds[1:]) / 1e9


def matmul_gflop(keys: dict) -> float:
    """Return the GFLOP of the matmuls of a step, three times those of a forward; of attention the causal half."""
    dim, size, tokens = COMMON["hidden_size"], COMMON["head_dim"], ROWS * LENGTH
    heads, key_heads = COMMON["num_attention_heads"], COMMON["num_key_value_heads"]
    experts = keys["num_experts_per_tok"] + keys.get("n_shared_experts", 0)
    projections = 2 * dim * size * (heads + key_heads)
    scores = size * heads * LENGTH
    ffns = 3 * experts * dim * COMMON["moe_intermediate_size"]
    layers = COMMON["num_hidden_layers"] * (projections + scores + ffns)
    return 6 * tokens * (layers + dim * VOCABULARY) / 1e9


def measure(model: str, python: pathlib.Path) -> dict:
    """Train one model on both sides, print its medians by round, and return what stands in the JSON line."""
    with tempfile.TemporaryDirectory() as scratch:
        peer = Peer(python, model, pathlib.Path(scratch))
        run, resolved = our_side(model, pathlib.Path(scratch))
        sides = {"moe_jax": run, "transformers": peer}
        print(f"{model}: {peer.facts}, {resolved}", flush=True)
        losses = {name: side(_WARMUP.value)[1] for name, side in sides.items()}
        times = {name: [] for name in sides}
        for _ in range(_ROUNDS.value):
            for name, side in sides.items():
                time.sleep(0.5)  # the other side's threads have stopped waiting in a loop
                seconds, own = side(_STEPS.value)
                times[name] += seconds
                losses[name] += own
            print("  " + ", ".join(f"{name} {statistics.median(times[name][-_STEPS.value :]):.3f} s" for name in sides))
        peer.close()
    apart = np.abs(np.subtract(*losses.values()))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "model": model, "seconds": medians, "ratio": medians["moe_jax"] / medians["transformers"],
        "matmul_gflop": matmul_gflop(SIZES[model][1]), "first_losses": {name: own[:3] for name, own in losses.items()},
        "first_losses_apart": float(apart[:3].max()), "losses_apart": float(apart.max()),
        "last_loss": losses["moe_jax"][-1], "samples": len(times["moe_jax"]), "clip_norm": _CLIP_NORM.value,
    }  # fmt: skip


def main(_):
    if _SERVE.value:
        serve(pathlib.Path(_SERVE.value))
        return
    from moe_jax.parallel.mesh import set_up_devices

    logging.set_verbosity(logging.WARNING)  # orbax says much at INFO
    set_up_devices(1)
    print(f"one square matmul: {matmul_rate():.0f} GFLOP/s")
    with tempfile.TemporaryDirectory() as scratch:
        python = peer_python(pathlib.Path(_PEER.value or scratch).absolute())
        records = [measure(model, python) for model in _MODELS.value]
    print("| model | moe_jax, s | transformers, s | ratio | matmuls, GFLOP | losses apart: first 3 steps, all |")
    print("|---|---|---|---|---|---|")
    for one in records:
        ours, theirs = one["seconds"].values()
        cells = one["model"], f"{ours:.3f}", f"{theirs:.3f}", f"{one['ratio']:.3f}", f"{one['matmul_gflop']:.0f}"
        print("| " + " | ".join(cells) + f" | {one['first_losses_apart']:.1e}, {one['losses_apart']:.1e} |")
    for one in records:
        print(json.dumps(one))


if __name__ == "__main__":
    app.run(main)
