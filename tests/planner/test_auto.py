"""`auto`: what it chooses, what it judges by, and when it leaves things as they are."""

import dataclasses
import logging

import numpy as np
import pytest
from support.options import layer_config, planner_config

from moe_jax.cluster import Cluster
from moe_jax.cluster.layer_seconds import LayerShape, ScheduleLine, schedule_line
from moe_jax.moe.build import layer_sizes, router_place
from moe_jax.moe.choosers import schedule_lines
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost, LayerPrices, home_seconds
from moe_jax.planning.placement import Placement
from moe_jax.replan import auto
from moe_jax.replan.auto import AutoSession, Setting, build_settings, step_seconds

L, D, E = 2, 4, 8
CLUSTER = Cluster(name="test", nodes=2, devices_per_node=2, flat=True, intra_bandwidth=3e9, flops=3e13)
PRICES = LayerPrices(cluster=CLUSTER, model_dim=512, hidden_dim=128)
COST = Cost(prices=PRICES, replica_slots=2)
START = Placement.even(L, E, D, 2)
ROWS = LayerShape(schedule="s1", tokens=4000, model_dim=2048, rows=1, ep_size=D, members_in_node=2)
LINES = (schedule_line(ROWS, CLUSTER), ScheduleLine("ring", 12e-3, 0.0))  # even loads take 8 ms, hot ones 23


def loads_of(kind, steps, seed=0):
    """Loads int [steps, L, D, E] of 4,000 choices a device, of which 2,600 are for the expert that is hot."""
    rng, loads = np.random.default_rng(seed), np.full((steps, L, D, E), 500)
    for step in range(steps):
        hot = {"even": None, "hot": 3, "moving": int(rng.integers(E)), "turning": step % E}[kind]
        if hot is not None:
            loads[step] = 200
            loads[step, :, :, hot] = 2600
    return loads


def run(session, loads, first=0):
    """Return the plan after each step's loads."""
    plans = []
    for step, now in enumerate(loads, first):
        session.observe(now)
        plans.append(session.propose(step + 1))
    return plans


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr(auto, "ROUND_STEPS", 8)


def session_of(cost=COST):
    return AutoSession(planner_config(name="auto", overlap_degree=8), START, cost)


def test_steady_skew_gets_the_plan_of_least_seconds_after_one_round(caplog):
    loads, session = loads_of("hot", 28), session_of()
    with caplog.at_level(logging.WARNING):
        plans = run(session, loads)
    assert [bool(plan.program) for plan in plans].index(True) == 16  # eight steps to settle, eight judged
    chosen = step_seconds(plans[-1], loads[0], session.cost, session.in_force.ahead)
    taken = [step_seconds(START, loads[0], COST, None)]
    for setting in build_settings(planner_config(name="auto", overlap_degree=8), START, COST):
        for now in loads[:8]:
            setting.observe(now)
            setting.make_plans(1)
        taken += setting.seconds(loads[0])
    assert chosen <= min(taken) * 1.01 < taken[0] * 0.9
    (table,) = [record.message for record in caplog.records]
    assert "mean of 8 steps" in table and " chosen" in table and " in force" in table


def test_even_loads_are_left_alone_after_eight_steps_and_cost_no_planning(caplog, monkeypatch):
    priced, seconds = [], Setting.seconds
    monkeypatch.setattr(Setting, "seconds", lambda own, loads: priced.append(own) or seconds(own, loads))
    monkeypatch.setattr(auto, "ROUND_STEPS", 16)
    session = session_of()
    with caplog.at_level(logging.WARNING):
        plans = run(session, loads_of("even", 9))
    assert all(plan.program == "" and plan == START for plan in plans)
    assert priced == [session.in_force] * 8  # the first step has no plan yet; others are not judged so early
    assert not session.judged and session.waits == 2 and not caplog.records


def test_loads_that_cannot_be_predicted_are_judged_by_what_plans_cost():
    """A plan for the expert that was hot does nothing for the next one, and its transfer is paid."""
    loads = loads_of("moving", 60)
    session = session_of()
    seconds, plain, plan, ahead = 0.0, 0.0, START, None
    for step, now in enumerate(loads):
        seconds += step_seconds(plan, now, session.cost, ahead)
        plain += step_seconds(START, now, COST, None)
        session.observe(now)
        plan = session.propose(step + 1)
        ahead = session.in_force.ahead
    assert seconds <= 1.01 * plain


def test_a_schedule_whose_time_no_skew_changes_wins_under_skew():
    cost = dataclasses.replace(COST, schedules=LINES, schedule="s1", replica_slots=0)
    assert run(session_of(cost), loads_of("hot", 20))[-1].program == "ring/0"
    assert run(session_of(cost), loads_of("even", 20))[-1].program == ""


def test_lines_are_those_of_the_layer_and_a_pipeline_hides_the_shorter_side():
    line, received = LINES[0], np.array([[300.0, 600, 0, 0]])
    np.testing.assert_allclose(line.seconds(200), 4 * PRICES.exchange(received)[0])
    assert line.start == pytest.approx(0.0, abs=1e-15)
    lines = (line, line._replace(name="pairwise", groups=2))
    plain = dataclasses.replace(COST, schedules=lines, schedule="s1")
    computed, zero = np.array([[9e4, 9e4, 9e4, 9e4]]), np.zeros(1)
    m, f = PRICES.exchange(received)[0], PRICES.compute(computed)[0]
    piped = dataclasses.replace(plain, schedule="pairwise")
    both = [cost.parts(computed, received, None, trans=zero)["others"][0] for cost in (plain, piped)]
    np.testing.assert_allclose(both, [4 * m + 3 * f, max(2 * m, m + f) + max(2 * m, m + 2 * f)])


TOGETHER = ({"capacity_factor": 1.0}, {"router": "base", "top_k": 1}, {"router": "topology", "remote_fraction": 0.1})


@pytest.mark.parametrize(("fields", "alike"), [({}, True), *((fields, False) for fields in TOGETHER)])
def test_no_choice_of_a_schedule_gates_other_tokens_together(fields, alike):
    """Where tokens compete, for places or for experts, those of an MP group together choose otherwise than apart."""
    roles, moe = build_mesh(MeshConfig(expert=D, model=2), D), layer_config(num_experts=E, schedule="auto", **fields)
    sizes = layer_sizes(moe, roles, 64, None, 16, 4)
    names = {line.name for line in schedule_lines(roles, sizes, CLUSTER, False)}
    assert names == {"s1", "pairwise", "ring"} | ({"s2", "deepspeed"} if alike else set())
    assert router_place(moe, roles).splits_tokens != alike  # by which a router checks how many it gates


def test_a_setting_pays_for_homes_that_move():
    cost = dataclasses.replace(COST, replica_slots=0)
    setting = Setting(PlannerConfig(name="smartmoe", replica_slots=0, interval=1000), START, cost)
    homes = [START.home]
    for step in range(2):
        now = np.full((L, D, E), 100)
        now[:, :, homes[-1][0] == 0] = 4000  # all that are together on the first device of layer 0
        setting.observe(now)
        setting.make_plans(1000 * step)
        homes.append(setting.plans[0].home)
        paid = float(home_seconds(*homes[-2:], D, cost.prices).sum())
        assert paid > 0 and setting.moved == (paid if step else 0.0)  # the first move is part of a change
    want = step_seconds(setting.plans[0], now, cost, None) + paid
    assert setting.seconds(now) == [want]
    setting.make_plans(1001)
    assert setting.moved == 0.0
