"""Item 7: does the same come out again? A gradient three times, and a run that was killed against one that was not.

Each part is a process; those of one kind have the same XLA_FLAGS. What is compared is every bit: losses, gradient
norms and parameters of the resumed run are those of the straight one, or the first step that differs is named.
"""

from __future__ import annotations

import json
import os
from unittest import mock

from gpu_day_items import configs
from gpu_day_items.context import NotHere


def _config(context):
    steps = context.of_size(20, 6)
    return configs.small(context, steps=steps, checkpoint_every=steps // 2, loads_every=steps)


def gradient(context):
    """Record which leaves of a gradient differ when it is computed again."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from moe_jax.models import make_loss
    from moe_jax.models.language_model import flatten
    from moe_jax.parallel.mesh import to_devices
    from moe_jax.training.program import build_session

    session = build_session(_config(context), jax.devices()[:1])
    loss = make_loss(
        session.model, session.model.layout(), session.config.train.batch_size, session.config.data.sequence_length
    )

    def gradients(params, batch, tables):
        first = jax.tree.map(lambda array: array[0], batch)
        weight = jnp.maximum(jnp.sum(first.weights), 1)
        return jax.grad(loss, has_aux=True)(params, first, tables, jax.random.key(0), jnp.int32(0), weight)[0]

    state = session.fresh_state()
    batch = to_devices(session.feed.read(0), session.state_shardings.batch)
    compiled = jax.jit(gradients).lower(state["params"], batch, session.tables).compile()
    found = [jax.tree.map(np.asarray, compiled(state["params"], batch, session.tables)) for _ in range(3)]
    names, differing = list(flatten(state["params"])), {}
    for other in found[1:]:
        for name, a, b in zip(names, jax.tree.leaves(found[0]), jax.tree.leaves(other), strict=True):
            if not np.array_equal(a, b):
                worst = float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30))
                differing[name] = max(differing.get(name, 0.0), worst)
    context.record(leaves=len(names), differing=differing)
    listed = ", ".join(f"{name} ({worst:.1g})" for name, worst in list(differing.items())[:6])
    context.row(
        f"gradient three times{_flags()}",
        f"all {len(names)} leaves equal to the bit" if not differing else f"{len(differing)} leaves differ: {listed}",
    )


def straight(context, kind: str):
    """Train all steps in one go."""
    if context.tiny and _flags():
        raise NotHere("xla_gpu_deterministic_ops means nothing to a CPU")
    _run(context, "straight", kind)


def until_killed(context, kind: str):
    """Train past the first checkpoint and have this process killed."""
    from moe_jax.training.loop import Loop

    config, take_in = _config(context), Loop.take_in
    last = config.train.checkpoint_every + 2

    def take_in_and_die(self, step, metrics):
        take_in(self, step, metrics)
        if step == last:
            self.checkpoints.wait()
            context.record(killed_after_step=step)
            context.kill_me()

    with mock.patch.object(Loop, "take_in", take_in_and_die):
        _run(context, "killed", kind)
    raise AssertionError("the run ended before it was killed")


def resumed(context, kind: str):
    """Go on with the killed run, and compare it with the straight one."""
    import numpy as np

    from moe_jax.storage.checkpoint import Checkpointer
    from moe_jax.storage.run_folder import RunFolder

    _run(context, "killed", kind)
    lines, states = {}, {}  # a state: {leaf: array} of the last checkpoint, the optimizer's among them
    for name in ("straight", "killed"):
        folder = _workdir(context, name, kind)
        lines[name] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        checkpoints = Checkpointer(RunFolder(str(folder), create=False).checkpoints, keep=9)
        states[name] = checkpoints.read_arrays(_config(context).train.steps)
        checkpoints.close()
    steps = [
        step
        for step, (a, b) in enumerate(zip(lines["straight"], lines["killed"], strict=True), 1)
        if (a["loss"], a["grad_norm"]) != (b["loss"], b["grad_norm"])
    ]
    unequal = {
        name: float(np.abs(a - states["killed"][name]).max() / max(np.abs(a).max(), 1e-30))
        for name, a in states["straight"].items()
        if not np.array_equal(a, states["killed"][name])
    }
    context.record(steps=len(lines["straight"]), differing_steps=steps, differing_leaves=unequal)
    half = _config(context).train.checkpoint_every
    context.row(
        f"{half} steps, killed, resumed, against {2 * half} straight{_flags()}",
        f"losses, gradient norms and all {len(states['straight'])} leaves of the state equal to the bit"
        if not steps and not unequal
        else f"steps that differ: {steps or 'none'}; {len(unequal)} of {len(states['straight'])} leaves differ, by "
        f"{max(unequal.values(), default=0):.2g} of the largest entry at most",
    )


def _flags() -> str:
    return ", xla_gpu_deterministic_ops" if "xla_gpu_deterministic_ops" in os.environ.get("XLA_FLAGS", "") else ""


def _workdir(context, name: str, kind: str):
    return context.scratch / f"{name}_{kind.replace(' ', '_')}"


def _run(context, name: str, kind: str):
    import moe_jax.training.run as training_run
    from moe_jax.config.run_config import config_text
    from moe_jax.jobs.hosts import Hosts

    config = _config(context)
    with mock.patch.object(training_run, "report_run"):  # no pictures
        training_run.run(config, config_text(config), Hosts(), workdir=str(_workdir(context, name, kind)))
