"""Train what DeepSpeed-MoE's claims on quality need, at the demo's size: MoE beside dense models, PR-MoE, its students.

    nice -n 10 python scripts/bench/train_sizes.py --out=runs/train_sizes --result=docs/bench/train_sizes.json

What it says: held-out cross-entropy after equal steps on equal batches of the demo's text, for each seed, of

    dense_M, moe_M    every second FFN one expert of 4 M, or 32 of them and top-1: the same program otherwise
    moe, pr_moe       four MoE layers of 16 experts; of 4, 4, 8, 8 and a residual FFN (configs/run/pr_moe.gin)
    alone, taught, staged   PR-MoE of three layers: no teacher; the seed's pr_moe in all steps; that until step 200

with the parameters of each and the FLOPs of one token's training. One learning rate for all sizes, not tuned. Runs are
commands of the trainer in folders below --out, so a command that was stopped goes on where it was; --result is written
anew after each, and what it has is not trained again, though a student needs its teacher's folder.
`python -m moe_jax.reproduce --paper=deepspeed_moe` reads it. 33 runs, 70 minutes of one core.
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import app, flags
from held_out_curves import train

from moe_jax.data.tokenizer import build_tokenizer
from moe_jax.models.counts import flops_per_token, parameter_counts
from moe_jax.storage.checkpoint import run_config
from moe_jax.training.feed import padded_vocabulary

_OUT = flags.DEFINE_string("out", None, "Folder of the runs.", required=True)
_RESULT = flags.DEFINE_string("result", None, "JSON file of losses and sizes; below --out when not given.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each kind.")
_KINDS = flags.DEFINE_list("kinds", [], "Which kinds to train; all by default.")
_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding of all runs; may repeat.")


def sized(model_dim: int, experts: int) -> tuple[str, ...]:
    """Return the bindings of a model of which every second FFN has so many experts."""
    return (
        f"ModelConfig.model_dim = {model_dim}",
        f"ModelConfig.hidden_dim = {4 * model_dim}",
        f"ModelConfig.heads = {model_dim // 32}",
        "ModelConfig.moe_every = 2",
        f"MoEConfig.num_experts = {experts}",
        "MoEConfig.top_k = 1",
        "MoEConfig.renormalize = False",
        "train.batch_size = 16",
    )


SMALL = ("train.batch_size = 8",)
NO_RESIDUAL = ("ModelConfig.segments = ()", "MoEConfig.num_experts = 16", "MoEConfig.shared_experts = 0")
THREE = ("ModelConfig.layers = 3", "ModelConfig.segments = ('layers=1 num_experts=4', 'layers=2 num_experts=8')")
STUDENTS = {
    "staged": 200,
    "taught": None,
    "alone": 0,
}  # step at which the teacher leaves; None: stays, 0: there is none
KINDS = {  # run file, bindings
    "pr_moe": ("pr_moe", SMALL),
    **dict.fromkeys(STUDENTS, ("pr_moe", SMALL + THREE)),
    **{name: ("demo", sized(*sizes)) for name, sizes in {
        "moe_64": (64, 32), "dense_64": (64, 1), "dense_96": (96, 1), "moe_96": (96, 32), "dense_128": (128, 1),
        "dense_192": (192, 1)}.items()},
    "moe": ("pr_moe", SMALL + NO_RESIDUAL),
}  # fmt: skip


def main(_) -> None:
    out = Path(_OUT.value)
    result = Path(_RESULT.value or out / "train_sizes.json")
    record: dict = {"bindings": _BINDINGS.value, "kinds": {}}
    if result.exists() and (found := json.loads(result.read_text()))["bindings"] == _BINDINGS.value:
        record = found
    for seed in range(_SEEDS.value):
        for kind in _KINDS.value or KINDS:
            if len(record["kinds"].get(kind, {}).get("curves", ())) > seed:
                continue
            file, bindings = KINDS[kind]
            # a student's batches come in another order than its teacher's
            own = ["train.evaluate_every = 100", *bindings, f"train.seed = {seed + 100 * (kind in STUDENTS)}"]
            if (until := STUDENTS.get(kind, 0)) != 0:
                own += [f"DistillationConfig.teacher = '{out}/pr_moe_{seed}'", f"DistillationConfig.until = {until}"]
            curve = train(out / f"{kind}_{seed}", f"configs/run/{file}.gin", [*_BINDINGS.value, *own], 1)
            entry = record["kinds"].setdefault(kind, {"bindings": bindings, **sizes(out / f"{kind}_{seed}")})
            entry.setdefault("curves", []).append(curve)  # [step, held-out loss], a list for each seed
            result.write_text(json.dumps(record) + "\n")


def sizes(folder: Path) -> dict[str, int]:
    """Return a run's parameters, those that one token uses, and the FLOPs of one token's training."""
    run = run_config(str(folder))
    vocab_size = padded_vocabulary(build_tokenizer(run.data), run.model)
    parameters, active, *_ = parameter_counts(run.model, run.moe, vocab_size)
    _, flops = flops_per_token(run.model, run.moe, vocab_size, run.data.sequence_length)
    return {"parameters": parameters, "active": active, "flops_per_token": flops}


if __name__ == "__main__":
    app.run(main)
