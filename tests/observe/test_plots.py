import struct
import subprocess
import sys

import numpy as np
import pytest

from moe_jax.observe import LoadsTrace, draw_all
from moe_jax.observe.report import device_load_figure, load_grid, loss_figure

from .conftest import write_run


@pytest.mark.parametrize(("layers", "experts"), [(1, 2), (24, 16)])
def test_draw_all_gives_pngs(tmp_path, layers, experts):
    run = write_run(tmp_path, layers=layers, experts=experts)
    drawn = draw_all(run)
    assert [path.name for path in drawn] == ["loss.png", "device_load.png", "expert_load.png"]
    for data in (path.read_bytes() for path in drawn):
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and b"matplotlib" not in data.lower() and len(data) > 10_000
        width, height = struct.unpack(">II", data[16:24])
        assert width == 1440 and 300 < height < 2600


def test_figures_of_one_step_and_of_non_finite_numbers():
    """Warnings are errors: a lone step or a NaN must not make matplotlib complain."""
    record = {"step": 1, "loss": float("nan"), "learning_rate": 0.0, "device_load_max_over_mean": [1.0, float("nan")]}
    for figure in (loss_figure([record], [{"step": 0, "held_out_loss": float("inf")}]), device_load_figure([record])):
        figure.canvas.draw()


def test_drawing_does_not_import_pyplot(tmp_path):
    code = (
        "import sys, moe_jax.observe as o; assert 'jax' not in sys.modules and 'matplotlib' not in sys.modules;"
        "w = o.MetricsWriter(sys.argv[1]); w.write(1, {'loss': 1.0, 'device_load_max_over_mean': [1.0]}); w.close();"
        "assert len(o.draw_all(sys.argv[1])) == 2; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_load_grid_divides_by_the_even_share_and_holds_over_gaps():
    # One layer, one source, two experts; samples at 10, 20 and 40: the column of 30 repeats the sample of 20.
    loads = np.array([[3, 1], [2, 2], [0, 4]], np.int32).reshape(3, 1, 1, 2)
    shares, first, last = load_grid(LoadsTrace(loads, np.array([10, 20, 40])))
    np.testing.assert_array_equal(shares, [[[1.5, 1.0, 1.0, 0.0], [0.5, 1.0, 1.0, 2.0]]])
    assert (first, last) == (10.0, 50.0)
