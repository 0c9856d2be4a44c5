"""What all papers' tables are made of: loads by name, the rule that fits them to a row, a system's step, verdicts; and
simulation past the papers."""

import dataclasses

import numpy as np
import pytest
from matplotlib.figure import Figure
from support.commands import run_command_here

from moe_jax.cluster import Cluster
from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsTrace
from moe_jax.papers.loads import CHOICES, SYNTHETIC, find_loads, fit_loads
from moe_jax.papers.scale import PLANNED, TOKENS, costs, step, zipf_loads
from moe_jax.papers.systems import DEEPSPEED, Model, Setting, System, pipelined, run
from moe_jax.papers.table import (
    LEVELS,
    NO_NUMBER,
    UNEXPLAINED,
    WITHIN,
    Claim,
    Found,
    Inputs,
    Tables,
    bars,
    counted,
)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_loads_are_whole_and_repeat_by_seed(name):
    trace = find_loads(name, seed=3)
    assert trace.loads.shape == (50, 12, 32, 32) and trace.loads.min() >= 0
    np.testing.assert_array_equal(trace.loads, find_loads(name, seed=3).loads)
    of_source = trace.loads.sum(axis=(2, 3)) / 32
    np.testing.assert_allclose(of_source, CHOICES, rtol=0.01)
    assert name.startswith("W") or (trace.loads != find_loads(name, seed=4).loads).any()


def test_named_workloads_are_what_their_names_say():
    loads = {name: find_loads(name).loads.sum(axis=2) for name in SYNTHETIC if name.startswith("W")}
    assert np.ptp(loads["W0_balanced"]) == 0
    for name, devices in (("W1_hot_expert_set", 2), ("W2_hot_rank", 1), ("W3_spread_hot_experts", 4)):
        hot = loads[name] == 4 * loads[name].mean(axis=-1, keepdims=True)  # the same heat in all three
        assert (hot.sum(axis=-1) == 4).all()
        assert (hot.reshape(*hot.shape[:2], 8, 4).any(axis=-1).sum(axis=-1) == devices).all(), name
    assert (loads["W5_zero_expert_rank"][..., :4] == 0).all() and (loads["W5_zero_expert_rank"][..., 4:] > 0).all()
    assert (loads["W6_rotating_hotspot"][:32].argmax(axis=-1) == np.arange(32)[:, None]).all()
    assert loads["W7_burst"][0].max() > 20 * loads["W7_burst"][5].max()
    sources = find_loads("W4_source_ragged").loads.sum(axis=3)
    assert sources.max() > 2 * sources.min()


def test_loads_are_fitted_to_a_row_by_one_rule():
    loads = np.arange(2 * 2 * 4 * 4).reshape(2, 2, 4, 4)  # [n, L, S, E]
    trace = LoadsTrace(loads, np.arange(2))
    fewer, said = fit_loads(trace, devices=2, experts=2, choices=1000)
    added = loads.reshape(2, 2, 2, 2, 2, 2).sum(axis=(3, 5))
    assert fewer.loads.shape == added.shape and "4 sources x 4 experts to 2 x 2" in said
    np.testing.assert_array_equal(fewer.loads.sum(axis=(2, 3)), 2000)
    np.testing.assert_allclose(fewer.loads / 2000, added / added.sum(axis=(2, 3), keepdims=True), atol=1e-3)
    more = fit_loads(trace, devices=8, experts=8, choices=1000)[0].loads
    np.testing.assert_allclose(more[:, :, 0], more[:, :, 1])  # one source stands for two devices
    beside = np.concatenate([loads, loads[:, ::-1]], axis=3)  # the other layer's experts
    np.testing.assert_allclose(more[:, :, ::2] / 8000, beside / beside.sum(axis=(2, 3), keepdims=True) / 2, atol=1e-3)
    with pytest.raises(UserError, match="4 devices do not fit the table's 3"):
        fit_loads(trace, devices=3, experts=4, choices=8)


def row(**changes):
    cluster = Cluster(name="two", nodes=1, devices_per_node=4, intra_bandwidth=1e9, flops=1e12, source="test")
    model = Model(name="m", layers=6, model_dim=64, hidden_dim=128)
    given = {"cluster": cluster, "model": model, "tokens": 4096, "top_k": 2, "experts": 4, "item": 4}
    return Setting(**{**given, "trace": find_loads("W0_balanced"), **changes})


def test_a_step_of_plain_expert_parallelism_is_worked_out_by_hand():
    step = run(DEEPSPEED, row())
    choices = 4096 * 2 / 4
    experts = 3 * choices * 4 * 64 * 128 / 1e12  # forward and twice that, two matrices of two FLOPs a number
    exchanges = 4 * choices * 3 / 4 * 64 * 4 / 1e9
    np.testing.assert_allclose(step.layers, experts + exchanges, rtol=1e-6)
    attention = 3 * 1024 * (8 * 64**2 + 4 * 1024 * 64) / 1e12  # projections, and scores over 1,024 tokens
    np.testing.assert_allclose(step.iterations, 6 * (experts + exchanges + attention), rtol=1e-6)


def test_a_schedule_in_groups_hides_all_but_one_group_of_the_shorter_side():
    np.testing.assert_allclose(pipelined(np.array([4.0, 1.0]), np.array([2.0, 3.0]), 4), [4.5, 3.25])
    nodes = dataclasses.replace(row().cluster, nodes=2, devices_per_node=2, inter_bandwidth=1e9)
    plain, cut = (run(System(planner="none", groups=own), row(cluster=nodes)).layers for own in (False, True))
    assert (cut < plain).all()


def test_a_verdict_follows_from_the_numbers():
    near, far = {"near": (1.9,)}, {"far": (1.2,)}
    assert Claim("a", (2.0,), (1.7,)).verdict == WITHIN
    assert Claim("a", (1.0, 2.0), (1.1, 1.6)).verdict == UNEXPLAINED  # one end is off
    assert Claim("a", (2.0,), (1.0,), experiments=far).verdict == f"{UNEXPLAINED}; nearest by far: 1.2"
    assert Claim("a", (2.0,), (1.0,), experiments={"away": (0.9,)}).verdict == UNEXPLAINED
    assert Claim("a", (2.0,), (1.0,), experiments=far | near).verdict.startswith("explained by near")
    assert Claim("a", None, (1.0,)).verdict == NO_NUMBER
    # no ratio measures a gap from 0: only what comes within a fifth explains it
    anything, right = {"anything": (1e-6, 1e9)}, {"right": (7.5, 16.0)}
    assert Claim("a", (7.5, 16.9), (0.0, 0.0), experiments=anything).verdict.startswith(UNEXPLAINED)
    assert Claim("a", (7.5, 16.9), (0.0, 0.0), experiments=anything | right).verdict.startswith("explained by right")


@pytest.mark.parametrize(
    ("paper", "ours", "verdict"),
    [
        ((1, 1.8, 3), (1.1, 1.3, 2.9), WITHIN),  # one of three cells is off, and ends and mean are not
        ((1, 2, 3), (2, 1, 3), UNEXPLAINED),  # two of three are off, in a range that fits
        ((1, 1, 1, 1, 3), (1, 1, 1, 2.9, 3), UNEXPLAINED),  # the mean is
        ((1, 2, 3), (1, 2, 3.7), UNEXPLAINED),  # an end is
    ],
)
def test_cells_are_within_by_ends_mean_and_half_of_them(paper, ours, verdict):
    assert Claim("a", paper, ours, cells=True).verdict == verdict
    assert max(ours) == 3.7 or Claim("a", paper, ours).verdict == WITHIN


@pytest.mark.parametrize(
    ("paper", "verdict", "tried"), [(1.1, WITHIN, []), (2.0, "explained by near: 1.9", [1.9, 1.2]),
                                    (9.0, "unexplained; nearest by near: 1.9", [1.9, 1.2])],
)  # fmt: skip
def test_experiments_are_tried_where_the_numbers_leave_a_claim_open(paper, verdict, tried):
    text = {"title": "Title", "columns": ["row", "one", "two"], "notes": ["first"]}
    texts = {"found": text | {"claims": {"claim": paper, "none (beside)": "-"}}}
    calls, tables = [], Tables("scale", "modelled", {"near": 1.9, "far": 1.2}, lambda inputs: ("last",))
    tables.texts = texts

    @tables.add(bars("unit", "two"))
    def found(inputs, ours=1.0):
        calls.append((inputs.level, ours))
        dear = 1.5 if inputs.level == "high" else 1.0
        return Found([("a", ours, 2.0 * dear), ("b", ours, 3.0)], [ours, (4 * dear, 5)], ("second",))

    table = tables["found"](Inputs(None))
    assert calls == [*((level, 1.0) for level in LEVELS), *(("middle", ours) for ours in tried)]
    assert [claim.verdict for claim in table.claims] == [verdict, NO_NUMBER]
    assert table.rows[0] == ("a", 1.0, 2.0) and table.notes == ("first", "second", "last")
    assert table.texts()[1:] == [("a", "1", "2 (2 to 3)"), ("b", "1", "3")]
    assert table.verdicts()[2][2] == "4 to 5 (4 to 6)"
    assert table.verdicts()[2][0] == "none (beside)"
    rows, beside = counted([table, table]).split(".")[:2]
    assert rows.startswith("2 rows: ") and beside.startswith(" 2 numbers beside: ") and ", 2 no number" in beside
    axes = Figure().subplots()
    table.draw(table, axes)
    assert [bar.get_height() for bar in axes.patches] == [2.0, 3.0] and axes.get_ylabel() == "unit"


@pytest.mark.parametrize(
    "arguments, message",
    {
        "unknown paper": (["--paper=other", "--out=x"], "pro_prophet"),
        "unknown table": (["--paper=pro_prophet", "--table=table_9", "--out=x"], "has table_1, table_4"),
        "no file": (["--paper=pro_prophet", "--table=figure_12", "--trace=nothing", "--out=x"], "no file and no run"),
        "one sample": (["--paper=pro_prophet", "--table=figure_12", "--trace=one.npz", "--out=x"], "two at least"),
        "other sizes": (["--paper=pro_prophet", "--table=figure_12", "--trace=odd.npz", "--out=x"], "do not fit"),
        "cut off": (["--paper=pro_prophet", "--table=figure_12", "--trace=cut.npz", "--out=x"], "cut.npz"),
        "no folder": (["--paper=pro_prophet", "--table=figure_12", "--out=odd.npz/x"], "odd.npz/x .*: move it away"),
    }.values(),
)
def test_bad_input_is_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("one.npz", loads=np.ones((1, 2, 4, 4), np.int32), iterations=np.arange(1))
    np.savez("odd.npz", loads=np.ones((3, 2, 5, 5), np.int32), iterations=np.arange(3))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "odd.npz").read_bytes()[:200])
    with pytest.raises(UserError, match=message) as error:
        run_command_here("reproduce", *arguments)
    assert "\n" not in str(error.value)


def test_a_table_is_printed_and_written(tmp_path, capsys):
    arguments = ["--paper=pro_prophet", "--table=figure_12", "--trace=stationary", f"--out={tmp_path}"]
    run_command_here("reproduce", *arguments)
    printed = capsys.readouterr().out
    assert "Figure 12" in printed and "over FasterMoE, mean" in printed and "1.34" in printed
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"pro_prophet.md", "pro_prophet_figure_12.csv", "pro_prophet_figure_12.png"}
    lines = (tmp_path / "pro_prophet_figure_12.csv").read_text().splitlines()
    assert len(lines) == 1 + 3 * 49 and lines[0].startswith("prices,sample,")
    assert "rows: " in (tmp_path / "pro_prophet.md").read_text().splitlines()[-1]


def test_loads_repeat_by_seed_and_keep_their_order_from_sample_to_sample():
    one, two = (zipf_loads(64, 128, TOKENS, 1.5, sample) for sample in (1, 2))
    np.testing.assert_array_equal(one, zipf_loads(64, 128, TOKENS, 1.5, 1))
    assert (one != two).any() and one.sum(axis=(0, 1)).argmax() == two.sum(axis=(0, 1)).argmax()
    np.testing.assert_allclose(one.sum(axis=2).mean(), TOKENS, rtol=0.05)


def test_replicas_pay_by_skew_and_a_plan_without_any_costs_nothing():
    found = {}
    for skew in (0.0, 1.5):
        loads = [zipf_loads(64, 128, TOKENS, skew, sample) for sample in (1, 2)]
        found[skew] = {system: step(system, cost, loads) for system, cost in costs(64, "middle").items()}
    assert found[0.0]["FasterMoE"][0] == found[0.0]["EP"][0] and found[0.0]["FasterMoE"][2] == 4 * 128
    for name in PLANNED:
        assert found[1.5][name][0] < found[1.5]["EP"][0] and found[1.5][name][2] > 4 * 128
