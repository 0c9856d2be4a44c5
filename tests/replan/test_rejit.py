"""The re-jit engine by itself: a run whose steps are simulated, so that plans and swaps can be counted.

The simulated session compiles nothing: an executable is the shape that it is for, and a compilation lasts until the
test lets it end.
"""

import dataclasses
import threading
import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.options import planner_config

from moe_jax.config.run_config import RunConfig
from moe_jax.config.train_config import TrainConfig
from moe_jax.data.corpus import DataConfig
from moe_jax.errors import UserError
from moe_jax.models import ModelConfig
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.parallel.static_sizes import BucketRows
from moe_jax.planning import buckets, routing
from moe_jax.planning import plan as plan_module
from moe_jax.planning.fastermoe import Shadowing
from moe_jax.planning.plan import enlarge
from moe_jax.planning.plan_shape import misfits
from moe_jax.replan import auto
from moe_jax.replan import engine as engine_module
from moe_jax.replan.engine import build_engine
from moe_jax.replan.segments import build_model, build_sessions
from moe_jax.storage.bank_order import reshard

DEVICES, LAYERS, EXPERTS = 4, 2, 8
FLAT = "configs/cluster/flat_3gbs_30tflops.gin"


class Pretended(types.SimpleNamespace):
    """A session whose executables are shapes."""

    def compile_programs(self, shape=None):
        self.gate.wait(30)
        self.compiled.append(shape)
        return types.SimpleNamespace(shape=shape, seconds=0.5)

    def compared(self, function):
        MOVES.append(function)
        return function


MOVES = []  # functions that were asked for
SEGMENTS = ("layers=1 num_experts=2", "layers=2")
ONE = "segment_0"


def session_of(schedule="deepspeed", expert_shard=1, model=1, devices_per_node=0, segments=(), **planner):
    mesh = MeshConfig(expert=DEVICES, expert_shard=expert_shard, model=model, devices_per_node=devices_per_node)
    counts = (2, EXPERTS) if segments else (EXPERTS,)
    roles = build_mesh(mesh, jax.devices()[: DEVICES * expert_shard], experts=counts)
    sizes = {"layers": 3 if segments else LAYERS, "model_dim": 32, "heads": 4, "hidden_dim": 32, "max_length": 32}
    own = {"calibrate": False, "overlap_degree": 4} if planner.get("name") in ("hecate", "auto") else {}
    planner = {"replica_slots": 2, "interval": 1, "must_pay": False, **own, **planner}
    config = RunConfig(
        train=TrainConfig(batch_size=8),
        data=DataConfig(sequence_length=32),
        model=ModelConfig(segments=segments, **sizes),
        moe=MoEConfig(num_experts=EXPERTS, schedule=schedule),
        planner=planner_config(**planner),
    )
    model = build_model(config, roles, vocab_size=64)
    tables = {name: NamedSharding(roles.mesh, spec) for name, spec in model.tables_specs.items()}
    shardings = types.SimpleNamespace(tables=tables, host_signals=NamedSharding(roles.mesh, P(roles.all)))
    gate = threading.Event()
    gate.set()
    placed = {"roles": roles, "model": model, "state_shardings": shardings}
    return Pretended(config=config, **placed, lag=1, gate=gate, compiled=[])


@pytest.fixture(autouse=True)
def no_state(monkeypatch):
    def moved(state, *given):
        *_, share = given
        return {**state, "moved by": share(reshard)}

    monkeypatch.setattr(engine_module, "reshard", moved)
    monkeypatch.setattr(auto, "MARGIN", 0.0)  # a change for any gain
    monkeypatch.setattr(auto, "ROUND_STEPS", 3)


@pytest.fixture
def started():
    """Return a function of a session's settings that starts its engine, after what `restore` gives it."""
    engines = []

    def start(restore=None, **settings):
        engines.append(build_engine(session_of(**settings)))
        engines[-1].left_out = engines[-1].restore(restore)
        engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def drifting_loads(steps, seed=0):
    """Loads [L, S, E] whose heavy experts change slowly."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(EXPERTS, 0.5), LAYERS)
    for _ in range(steps):
        p = np.clip(p + rng.normal(0, 0.02, p.shape), 1e-3, None)
        p /= p.sum(axis=1, keepdims=True)
        yield np.stack([[rng.multinomial(512 // DEVICES, q) for _ in range(DEVICES)] for q in p])


def segment_loads(steps):
    """The same of `SEGMENTS`, with zeros where the first layer has no expert or source."""
    for loads in drifting_loads(steps):
        yield np.concatenate([np.pad(loads[:1, :2, :2], ((0, 0), (0, 2), (0, 6))), loads])


def drive(engine, all_loads, first=0, whole=False):
    """Run steps as the loop does on a CPU (lag 1); return per step (shape, placement, record).

    Shape and placement are those of the first segment, or `whole` those of all by name.
    """
    state, seen = {}, []
    flight = None
    for step, loads in enumerate(all_loads, first):
        if flight is not None:
            engine.observe(*flight)
        programs, tables, host_signals, state = engine.before_step(step, state, 0)
        assert programs.shape == engine.shape
        for name, placement in engine.placement.items():
            assert not misfits(engine.shape[name], placement)
            np.testing.assert_array_equal(engine.stored[name].home, placement.home)
        engine.after_dispatch(step)
        _, ready, plan_hash = np.asarray(host_signals).T  # of each device, as the step sees them
        hashes = {"plan_hash_least": plan_hash.min(), "plan_hash_most": plan_hash.max()}
        flight = step, {"ready": ready.min(), "loads": loads, **hashes}
        placement, record, _ = engine.records[step]
        seen.append((engine.shape, placement, record) if whole else (engine.shape[ONE], placement[ONE], record))
    engine.observe(*flight)
    return seen


def test_plans_change_every_step_and_compile_a_few_times(started):
    engine = started(name="hecate", swap_after=1, shard_every=50)
    MOVES.clear()
    seen = drive(engine, drifting_loads(200))
    assert MOVES == [reshard]  # asked for once, by the first of several moves
    assert len(engine.session.compiled) <= 6 and engine.plan_id > 100
    last = [shape for shape, *_ in seen].index(seen[-1][0])
    assert all(record["rejit_stall_seconds"] == 0 for *_, record in seen[last + 1 :])


def test_a_slow_compilation_stalls_nothing_and_the_old_plan_goes_on(started):
    engine = started(name="topk_all", top_k=1)
    engine.session.gate.clear()
    loads = list(drifting_loads(30))
    before = drive(engine, loads[:20])
    assert not any(len(placement.replicas) for _, placement, _ in before)
    engine.session.gate.set()
    engine.executables[tuple(engine.pending.shape.values())].result()
    after = drive(engine, loads[20:], first=20)
    assert sum(r["rejit_stall_seconds"] for *_, r in before + after) < 0.1
    # `ready` enters step 20 and is read before step 21, so step 21 is the first with replicas
    assert [bool(len(placement.replicas)) for _, placement, _ in after[:3]] == [False, True, True]


def test_swap_after_is_exact(started):
    engine = started(name="balanced", swap_after=3)
    seen = drive(engine, drifting_loads(10))
    # loads of step 0 are read before step 1, planned with during step 1
    assert [shape.ahead is not None for shape, *_ in seen].index(True) == 1 + 3


AUTO = {"name": "auto", "schedule": "auto", "cluster": FLAT}


@pytest.mark.parametrize("own, cut", [({}, 2), ({}, 6), ({"segments": SEGMENTS}, 9), (AUTO, 3), (AUTO, 7), (AUTO, 12)])
def test_resume_continues_with_the_same_plans(started, own, cut):
    segments = own.get("segments", ())
    loads = list(segment_loads(16) if segments else drifting_loads(16))
    settings = {"name": "hecate", "shard_every": 4, "swap_after": 3, **own}
    whole = started(**settings)
    want = drive(whole, loads, whole=True)
    first = started(**settings)
    drive(first, loads[:cut])
    second = started(first.state(), **settings)
    got = drive(second, loads[cut:], first=cut, whole=True)
    for (shape, placement, record), (shape_, placement_, record_) in zip(want[cut:], got, strict=True):
        assert shape == shape_ and placement == placement_ and record["plan_id"] == record_["plan_id"]
    if own is AUTO:
        programs = [placement[ONE].program for _, placement, _ in want]
        assert programs[0] == "" != programs[-1], "no change was made"
        assert all(shape[ONE].program == placement[ONE].program for shape, placement, _ in want)
    else:
        assert all(len(placement.replicas) for placement in want[-1][1].values())
    assert len(want[-1][1]) == max(len(segments), 1)


def test_auto_is_left_for_another_planner_with_a_step_of_its_own(started):
    first = started(**AUTO, swap_after=1)
    drive(first, drifting_loads(16))
    assert first.shape[ONE].program
    second = started(first.state(), name="topk_all", schedule="s1", swap_after=1)
    assert second.shape[ONE].program == "" and "PlannerConfig.name was 'auto'" in second.left_out
    assert len(drive(second, drifting_loads(6))[-1][1].replicas)
    with pytest.raises(UserError, match="MoEConfig.schedule = 'auto' is chosen by PlannerConfig.name = 'auto', not"):
        session_of(schedule="auto", name="topk_all")


def test_plan_of_another_mesh_is_left_out_and_named():
    engine = build_engine(session_of(name="hecate"))
    state = engine.state()
    assert engine.restore(None) is None and engine.restore(state) is None
    state["shape"][ONE]["devices"] = 8
    text = engine.restore(state)
    assert text == "plan: devices was 8 and is 4; experts start at even homes, and the planner sees new loads only"


@pytest.mark.parametrize("saved, asked", [(0.1, True), (0.0, False)])
def test_a_shape_is_asked_for_only_where_its_plan_gains(started, monkeypatch, saved, asked):
    def seconds(placement, *_):
        return np.full(LAYERS, 3.0 - saved if len(placement.replicas) else 3.0)

    monkeypatch.setattr(plan_module, "predicted_layer_seconds", seconds)
    engine = started(name="topk_all", top_k=1, swap_after=9)
    drive(engine, drifting_loads(4))
    assert (engine.asked, engine.pending is not None) == (asked, asked)


def test_a_transfer_that_pays_no_more_leaves_the_program_and_comes_back(started):
    """Hot, even, hot and even loads: an idle transfer is no part of the step, and the programs are those before."""
    engine = started(name="topk_all", top_k=1, cluster=FLAT, must_pay=True, swap_after=2)
    hot, even = np.full((LAYERS, DEVICES, EXPERTS), 2), np.full((LAYERS, DEVICES, EXPERTS), 16)
    hot[:, :, 1] = 114
    seen = drive(engine, [*[hot] * 5, *[even] * 5, *[hot] * 5, *[even] * 5, *[hot] * 5])
    sends = [shape.ahead is not None for shape, *_ in seen]
    assert sends == [False] * 3 + ([True] * 5 + [False] * 5) * 2 + [True] * 2
    assert all(len(placement.replicas) == 0 for _, placement, _ in seen[8:13]) and len(seen[-1][1].replicas)
    assert len(engine.session.compiled) == len({tuple(shape.items()) for shape in engine.session.compiled}) <= 4


def test_different_plans_are_an_error():
    with pytest.raises(RuntimeError, match="step 4: the processes ran different plans"):
        build_engine(session_of(name="topk_all", top_k=1)).observe(3, {"plan_hash_least": 1, "plan_hash_most": 2})


def test_none_needs_no_engine_and_dp_refuses_planners():
    assert build_engine(session_of(name="none")) is None
    with pytest.raises(UserError, match=r"PlannerConfig.name \('eplb'\) needs experts spread"):
        build_engine(session_of(name="eplb", schedule="dp"))
    with pytest.raises(UserError, match="replica_slots to the most that you want"):
        build_engine(session_of(name="fastermoe", when="after_gate", bounded=False))


@pytest.mark.parametrize(
    "away, want",
    [
        # 128 rows are the worst case; with headroom 8 rows are 10, which makes 16
        (0, dict.fromkeys((1.0, 2.0, 100.0), BucketRows(own=128, node=16, far=16))),
        # at 1.0 the bucket without a plan (slack 1.5: 48) is larger already
        (1, {1.0: None, 2.0: BucketRows(own=16, node=64, far=16), 100.0: BucketRows(own=16, node=128, far=16)}),
    ],
)
def test_planned_buckets_are_as_large_as_predicted_within_their_limit(away, want, monkeypatch):
    """Each device's tokens go to two experts of one device: into one bucket, four times the mean of 32.

    That of the own device has no limit: it does not travel.
    """
    loads = np.zeros((LAYERS, DEVICES, EXPERTS), np.int64)
    for device in range(DEVICES):
        expert = 2 * ((device + away) % DEVICES)
        loads[:, device, expert : expert + 2] = 64
    for limit, rows in want.items():
        monkeypatch.setattr(buckets, "BUCKET_LIMIT", limit)
        session = session_of(name="hecate")
        segment = build_sessions(session.config, session.roles)[ONE]
        segment.observe(loads)
        asked = segment.asked()
        assert enlarge(asked, segment.start, segment.first_shape).bucket_rows == rows


LATE = {"cluster": "configs/cluster/host_devices.gin", "when": "after_gate"}


def test_shadowing_after_the_gate_needs_no_new_slots(started):
    """The host plans nothing but buckets; all executables have the slots, and records count what the step decided."""
    engine = started(name="fastermoe", **LATE)
    loads = list(drifting_loads(6))
    seen = drive(engine, loads)
    shapes = [dataclasses.replace(compiled[ONE], bucket_rows=None) for compiled in engine.session.compiled]
    assert len(set(shapes)) == 1
    shape = engine.session.compiled[0][ONE]
    assert shape.late.slots == 2 and shape.ahead is None and isinstance(shape.after_gate, Shadowing)
    assert not any(len(placement.replicas) for _, placement, _ in seen)
    records = [engine.record(step, step_loads) for step, step_loads in enumerate(loads)]
    assert max(record["replicas"] for record in records) >= DEVICES - 1
    plans = engine.plans[ONE]
    want = plans.planner.refine(loads[3], seen[3][1], plans.cost)
    assert records[3]["replicas"] == len(want.replicas)
    got = records[3]["device_load_max_over_mean"]
    tokens = routing.pair_loads(want, loads[3]).sum(axis=1)
    np.testing.assert_allclose(got, tokens.max(1) / tokens.mean(1))


def test_each_segment_decides_after_the_gate(started):
    """Each has slots for what it decides, and what it decided counts in the records of its own layers."""
    engine = started(name="fastermoe", segments=SEGMENTS, **LATE)
    loads = list(segment_loads(6))
    drive(engine, loads)
    assert [shape.late.slots for shape in engine.session.compiled[0].values()] == [2, 2]
    records = [engine.record(step, step_loads) for step, step_loads in enumerate(loads)]
    assert all(len(record["device_load_max_over_mean"]) == 3 for record in records)
    assert max(record["replicas"] for record in records) >= DEVICES - 1


def test_a_warm_start_gives_the_first_step_its_replicas():
    loads = list(drifting_loads(8))
    session = session_of(name="topk_all", top_k=1)
    engine = build_engine(session)
    engine.warm_start(loads)
    engine.start()
    seen = drive(engine, loads)
    assert all(len(placement.replicas) for _, placement, _ in seen)
    assert session.compiled == [{ONE: seen[0][0]}]
