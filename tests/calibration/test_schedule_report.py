"""The hit rates of parm's rules in a sweep's report, from times made by hand."""

import json

from bench.schedule_report import hit_rates, report

from moe_jax.analysis.timed_layers import LayerCase
from moe_jax.cluster import ParmChoice


def case(mp_size):
    return LayerCase(mp_size, 2, 64, 16, 16, 1.0, 1)


def test_a_rule_hits_where_its_choice_is_the_shortest_measured():
    """Shortest are s2, s1, deepspeed; within 3% of it in a fourth; without MP only the question of three is asked."""
    judged = [
        (case(2), {"deepspeed": 3.0, "s1": 2.0, "s2": 1.0}, ParmChoice("s2", 5.0, 4.0)),
        (case(2), {"deepspeed": 3.0, "s1": 1.0, "s2": 1.5}, ParmChoice("s2", 5.0, 4.0)),
        (case(2), {"deepspeed": 1.0, "s1": 2.0, "s2": 3.0}, ParmChoice("deepspeed", 4.0, 5.0, 3.0, "layers")),
        (case(1), {"deepspeed": 1.0, "s1": 1.02, "s2": 1.02}, ParmChoice("s1", 0.0, 0.0)),
    ]
    assert hit_rates(judged) == {
        "of_three_layers": 4,
        "of_three": 0.5,
        "of_three_within_3_percent": 0.75,
        "of_three_behind_mean": 0.13,
        "of_s1_and_s2_layers": 3,
        "of_s1_and_s2": 0.6667,
        "of_s1_and_s2_within_3_percent": 0.6667,
        "of_s1_and_s2_behind_mean": 0.1667,
    }
    assert hit_rates(judged[3:])["of_s1_and_s2_layers"] == 0


def test_a_report_of_two_layers(tmp_path, capsys):
    """From the calibration of this project's own page: the line that scripts read, with both rules judged."""
    samples = {"deepspeed": [0.03, 0.031], "s1": [0.02, 0.021], "s2": [0.025, 0.026]}
    longer = {name: [2 * second for second in seconds] for name, seconds in samples.items()}
    rows = {LayerCase(2, 2, 256, 64, 64, 1.0, 1): samples, LayerCase(4, 2, 512, 64, 64, 1.0, 2): longer}
    report(tmp_path / "sweep.csv", rows, "docs/bench/cluster_host.json")
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["layers"] == 2 and set(answer["rules"]) == {"equations", "layers"}
    assert answer == json.loads((tmp_path / "sweep_summary.json").read_text())
