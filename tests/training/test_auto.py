"""A run with `auto` goes from plain expert parallelism to another program, as a run that is given its plans does."""

import jax
import numpy as np
from support.tiny_run import config_of

from moe_jax.replan import auto
from moe_jax.replan.auto import AutoSession
from moe_jax.training.stepper import build_stepper

SIZES = (
    "ModelConfig.model_dim = 64", "ModelConfig.hidden_dim = 128", "MoEConfig.num_experts = 8", "MoEConfig.top_k = 1",
    "train.batch_size = 16", "MeshConfig.expert = 4", "train.zero_stage = 0", "MoEConfig.schedule = 'auto'",
    "PlannerConfig.name = 'auto'", "PlannerConfig.replica_slots = 2", "PlannerConfig.swap_after = 2",
    "PlannerConfig.cluster = 'configs/cluster/flat_3gbs_30tflops.gin'",
)  # fmt: skip
STEPS = 9


def test_a_change_of_schedule_is_a_new_program_and_the_run_goes_on(tmp_path, monkeypatch):
    config, prepare, given = config_of(tmp_path, *SIZES), AutoSession.prepare, []

    def noted(self, iteration):
        prepare(self, iteration)
        given.append((self.proposal, self.cost, self.planner))

    monkeypatch.setattr(AutoSession, "prepare", noted)
    monkeypatch.setattr(auto, "MARGIN", 0.0)
    monkeypatch.setattr(auto, "ROUND_STEPS", 2)
    chosen = build_stepper(config, jax.devices()[:4])
    records, shapes = chosen.run(STEPS), dict(chosen.engine.shape)
    chosen.engine.close()
    assert shapes["segment_0"].program and shapes["segment_0"].schedule != "s1"
    plans = [record["plan_id"] for record in records]
    assert plans[0] == 0 < plans[-1]

    turn = iter(given)

    def told(self, iteration):
        self.proposal, self.cost, self.planner = next(turn)

    monkeypatch.setattr(AutoSession, "prepare", told)
    monkeypatch.setattr(AutoSession, "observe", lambda self, loads: self.predictor.observe(loads))
    again = build_stepper(config, jax.devices()[:4])
    for want, got in zip(records, again.run(STEPS), strict=True):
        assert np.array_equal(want["loss"], got["loss"]) and want["plan_id"] == got["plan_id"]
        np.testing.assert_array_equal(want["loads"], got["loads"])
    again.engine.close()
    for want, got in zip(jax.tree.leaves(chosen.state["params"]), jax.tree.leaves(again.state["params"]), strict=True):
        np.testing.assert_array_equal(want, got)
