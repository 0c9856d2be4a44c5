"""The report of a sweep, from times made by hand."""

import json

from bench.schedule_report import report

from moe_jax.analysis.timed import LayerCase


def test_a_report_of_two_layers(tmp_path, capsys):
    """From the calibration of this project's own page: the line that scripts read, with both rules judged."""
    samples = {"deepspeed": [0.03, 0.031], "s1": [0.02, 0.021], "s2": [0.025, 0.026]}
    longer = {name: [2 * second for second in seconds] for name, seconds in samples.items()}
    rows = {LayerCase(2, 2, 256, 64, 64, 1.0, 1): samples, LayerCase(4, 2, 512, 64, 64, 1.0, 2): longer}
    report(tmp_path / "sweep.csv", rows, "docs/bench/cluster_host.json")
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["layers"] == 2 and set(answer["rules"]) == {"equations", "layers"}
    assert answer == json.loads((tmp_path / "sweep_summary.json").read_text())
