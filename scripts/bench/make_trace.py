"""Train a GPT-MoE without a balance loss on the demo's text; keep the loads of every tenth step and the one before.

What it makes is shipped as configs/trace/top_1.npz, top_2.npz and, of 64 experts, top_2_of_64.npz:

    loads       uint16 [101, 12, 32, 32]   choices of each of 32 devices' 1,024 tokens, by layer and expert
    iterations  int64 [101]                0, 9, 10, 19, 20, ..., 499, 500

One device trains, on 32 sequences of 128 a step. At these steps the model as it then is routes a batch of 32 x 8
sequences, of which the first 8 are those of device 0: a router does not see where a token lies. Run it as

    python scripts/bench/make_trace.py --top_k=1 --out=configs/trace/top_1.npz
    python scripts/bench/make_trace.py --top_k=2 --experts=64 --out=configs/trace/top_2_of_64.npz
"""

from __future__ import annotations

import time

import numpy as np
from absl import app, flags

_TOP_K = flags.DEFINE_integer("top_k", 1, "Experts of a token.")
_OUT = flags.DEFINE_string("out", None, "File to write.", required=True)
_STEPS = flags.DEFINE_integer("steps", 500, "Optimizer steps.")
_EVERY = flags.DEFINE_integer("every", 10, "Steps from one sample to the next; the step before it is kept too.")
_EXPERTS = flags.DEFINE_integer("experts", 32, "Experts of a layer.")
_SEED = flags.DEFINE_integer("seed", 0, "Of parameters and of the order of the text.")

DEVICES, SEQUENCES, TRAINED, LENGTH = 32, 8, 32, 128


def bindings(sequences: int, record_choices: bool) -> list[str]:
    """Return the bindings of the run, with so many sequences in a batch."""
    model = {
        "kind": "'gpt'", "layers": 12, "moe_every": 1, "model_dim": 64, "heads": 2, "hidden_dim": 64,
        "max_length": LENGTH,
    }  # fmt: skip
    moe = {
        "num_experts": _EXPERTS.value, "top_k": _TOP_K.value, "renormalize": False, "aux_loss_weight": 0.0,
        "z_loss_weight": 0.0, "record_choices": record_choices,
    }  # fmt: skip
    train = {
        "batch_size": sequences, "steps": _STEPS.value, "learning_rate": 3e-3, "warmup_steps": 20, "seed": _SEED.value,
    }  # fmt: skip
    named = {"ModelConfig": model, "MoEConfig": moe, "train": train, "DataConfig": {"sequence_length": LENGTH}}
    return [f"{scope}.{name} = {value}" for scope, values in named.items() for name, value in values.items()]


def main(_):
    from moe_jax.parallel.mesh import set_up_devices

    set_up_devices(1)
    import jax
    import jax.numpy as jnp

    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.models.loss import make_loss
    from moe_jax.training.program import build_session

    def session_of(*args):
        return build_session(parse_run_config([], bindings(*args))[0], jax.devices()[:1])

    session, routed = session_of(TRAINED, False), session_of(DEVICES * SEQUENCES, True)
    loss = make_loss(routed.model, routed.model.layout(), DEVICES * SEQUENCES, LENGTH)

    @jax.jit
    def loads_of(params, batch, tables):
        one = jax.tree.map(lambda a: a[0], batch)
        choices = loss(params, one, tables, None, jnp.int32(0), jnp.float32(1))[1].choices  # [L, N, K]
        by_device = choices.reshape(choices.shape[0], DEVICES, -1)
        return jax.nn.one_hot(by_device, _EXPERTS.value, dtype=jnp.int32).sum(axis=2)

    step, _ = session.compile_step()
    state, signals, samples, kept = session.fresh_state(), session.host_signals(0), [], []
    started = time.monotonic()
    for number in range(_STEPS.value + 1):
        if number % _EVERY.value in (0, _EVERY.value - 1):
            batch = routed.feed.to_devices(routed.feed.read(number))
            samples.append(np.asarray(loads_of(state["params"], batch, session.tables)))
            kept.append(number)
        batch = session.feed.to_devices(session.feed.read(number))
        state, metrics = step(state, batch, session.tables, signals)
        if number % 20 == 0:
            worst = (samples[-1].sum(axis=1).max(axis=1) / samples[-1].sum(axis=1).mean(axis=1)).mean()
            print(f"step {number}: loss {float(metrics['loss']):.3f}, fullest expert over mean {worst:.2f}, "
                  f"{time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
    np.savez_compressed(_OUT.value, loads=np.stack(samples).astype(np.uint16), iterations=np.array(kept))


if __name__ == "__main__":
    app.run(main)
