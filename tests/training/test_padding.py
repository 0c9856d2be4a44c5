"""What fills up a window changes nothing: no choice, load, loss, gradient, draw or drop, whatever the windows' length.

The same conversations in the same order, one in each row, in windows of two lengths: two steps in float64.
"""

import jax
import numpy as np
import pytest
from support.chat_cases import write_chats
from support.marks import slow_but
from support.tiny_run import config_of, session_of

from moe_jax.errors import UserError
from moe_jax.models.language_model import flatten
from moe_jax.training.loop import evaluate
from moe_jax.training.stepper import build_stepper

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

LENGTHS = (110, 200)  # the longest conversation has 108 tokens
BINDINGS = (
    "ModelConfig.dtype = 'float64'", "ModelConfig.max_length = 200", "ModelConfig.layers = 1", "train.steps = 4",
    "train.warmup_steps = 0", "train.learning_rate = 0.01", "MeshConfig.expert = 2", "train.evaluate_windows = 0",
)  # fmt: skip
DROPS = ("MoEConfig.capacity_factor = 0.8", "MoEConfig.min_capacity = 1")
# together they have every router that takes padding, every schedule, and planners ahead of the gate and after it
CASES = {
    "sigmoid_bias, halves, hecate": (
        "MoEConfig.router = 'sigmoid_bias'", "SigmoidBias.bias_rate = 0.1", "ModelConfig.overlap = 'halves'",
        "PlannerConfig.name = 'hecate'", "MoEConfig.schedule = 's1'", "MoEConfig.gate_noise = 0.3",
    ),
    "topk, drops by probability, microbatches, sequences": (
        *DROPS, "MoEConfig.drop = 'probability'", "train.grad_accum_steps = 2", "MoEConfig.balance_over = 'sequence'",
        "MoEConfig.schedule = 'pairwise'",
    ),
    "gshard, drops, prefetch, flexmoe": (
        *DROPS, "MoEConfig.router = 'gshard'", "ModelConfig.prefetch = 'pro_prophet'", "PlannerConfig.name = 'flexmoe'",
    ),
    "topology, drops, ring": (
        *DROPS, "MoEConfig.router = 'topology'", "Topology.remote_fraction = 0.3", "MeshConfig.devices_per_node = 1",
        "MoEConfig.schedule = 'ring'",
    ),
    "noisy_topk, deduplicated, step, after the gate": (
        "MoEConfig.router = 'noisy_topk'", "MoEConfig.schedule = 'deduplicated'", "PlannerConfig.name = 'balanced'",
        "PlannerConfig.when = 'after_gate'", "MoEConfig.balance_over = 'step'", "train.grad_accum_steps = 2",
    ),
    "forced_balance, s2, model parallel, llep": (
        "MoEConfig.router = 'forced_balance'", "MoEConfig.schedule = 's2'", "MeshConfig.model = 2",
        "PlannerConfig.name = 'llep'", "MeshConfig.expert_shard = 2",
    ),
    "group_limited, dp": (
        "MoEConfig.router = 'group_limited'", "MoEConfig.expert_groups = 2", "MoEConfig.schedule = 'dp'",
        "MeshConfig.expert = 1", "MeshConfig.data = 2",
    ),
    "switch, parm, shadows": (
        "MoEConfig.router = 'switch'", "MoEConfig.top_k = 1", "MoEConfig.schedule = 'parm'",
        "PlannerConfig.name = 'fastermoe'", "PlannerConfig.when = 'after_gate'",
    ),
    "topk, eplb without slots": (
        "PlannerConfig.name = 'eplb'", "PlannerConfig.replica_slots = 0", "PlannerConfig.interval = 1",
    ),
    "topk, smartmoe, sequence parallel": (
        "PlannerConfig.name = 'smartmoe'", "PlannerConfig.interval = 1", "ModelConfig.sequence_parallel = True",
        "MeshConfig.model = 2",
    ),
}  # fmt: skip


@pytest.fixture
def float64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("case", slow_but(CASES, *list(CASES)[1:3]))
def test_windows_of_any_length_train_the_same(case, tmp_path, float64):
    bindings, found = (*write_chats(tmp_path), *BINDINGS, *CASES[case]), []
    for length in LENGTHS:
        config = config_of(tmp_path, *bindings, f"DataConfig.sequence_length = {length}")
        stepper = build_stepper(config, jax.devices()[: 2 * config.mesh.expert_shard])
        records = stepper.run(2)
        session, params = stepper.session, stepper.state["params"]
        rows = [row for step in range(2) for row in session.feed.read(step).inputs.reshape(-1, length)]
        tokens = sum(np.trim_zeros(row, "b").size for row in rows)  # no conversation ends with id 0
        assert sum(int(record["loads"].sum()) for record in records) == tokens * config.moe.top_k
        if stepper.engine is None:
            records.append({"loss": evaluate(session, session.evaluation_step(), params)})
        found.append((records, flatten(jax.tree.map(np.asarray, params))))
    (records, params), *others = found
    for more, others_params in others:
        for name in ("loss", "loads", "dropped"):
            got, want = ([record.get(name, 0) for record in side] for side in (more, records))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, err_msg=name), got, want)  # noqa: B023
        for name, leaf in params.items():
            np.testing.assert_allclose(others_params[name], leaf, rtol=0, atol=1e-9 * np.abs(leaf).max(), err_msg=name)
    if "capacity_factor" in " ".join(bindings):
        assert all(record["dropped"].sum() > 0 for record in records[:2])


def test_a_router_that_cannot_leave_padding_out_is_refused_before_the_text_is_read(tmp_path):
    bindings = (*write_chats(tmp_path), "MoEConfig.router = 'base'", "MoEConfig.top_k = 1")
    (tmp_path / "chats.jsonl").unlink()
    with pytest.raises(UserError, match="'base'.*takes no padding, and windows of conversations .*kind = 'text'"):
        session_of(tmp_path, 1, *bindings)
