"""The page and the pictures of a run."""

import json
import re
import struct

import numpy as np
import pytest

from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsTrace
from moe_jax.observe.report import draw_loads, load_grid, page_of, without_absolute_paths, write_report
from moe_jax.storage.run_folder import RunFolder

from .conftest import write_run


def embedded(page: str) -> dict:
    """Return the data of a run that a report holds."""
    (text,) = re.findall(r'<script type="application/json" id="embedded">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_report_is_the_page_with_the_data_of_one_run(finished_run):
    page = write_report(finished_run, draw_loads(finished_run)).read_text()
    assert "http" not in page.replace("http://www.w3.org/", "").replace("http-equiv", "")
    for request in ("url(", "@import", " src=", '<link rel="stylesheet'):
        assert request not in page
    policy, data = re.search('content="(default-src[^"]*)"', page)[1], embedded(page)
    assert policy == page_of()[1] and policy.startswith("default-src 'none'; script-src 'sha256-")
    about = data.pop("about")
    assert about.pop("expert_load").startswith("iVBOR")
    said = json.dumps(about, ensure_ascii=False)
    assert str(finished_run.path.parent) not in json.dumps(data) + said and "ann" not in said
    for words in (".../books.txt", "5.000", "2.400", "loss ends 25% below it", "2.50G", "train.steps = 30", "4.5 s"):
        assert words in said
    assert about["environment"]["mesh"] == "expert 2" and data["name"] == "tiny" and data["modelled"] is None
    assert len(data["lines"]["loss"]["mean"]) == 30 and len(data["layers"]["mean"][0]) == 2
    assert "re-jit stall" not in said and "overflow steps" in said  # what is not recorded is left out


def test_report_of_a_run_without_a_step_says_so(tmp_path):
    run = RunFolder(tmp_path / "new")
    run.config.write_text("train.steps = 30")
    data = embedded(write_report(run, None).read_text())
    assert "no steps" in data["about"]["lead"] and not data["lines"]
    for damaged, message in (("[1]", "holds a list"), ("{", "is not JSON"), ("[" * 10**5, "is not JSON")):
        run.environment.write_text(damaged)
        with pytest.raises(UserError, match=message):
            write_report(run, None)
    run.environment.write_text('{"parameters": {"total": %s, "active": 1}}' % ("9" * 400))
    assert embedded(write_report(run, None).read_text())["about"]["numbers"][0][0] == "parameters"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("path = '/data/ann/books.txt'", "path = '.../books.txt'"),
        ("path = '~/texts/a b.txt'", "path = '.../a b.txt'"),
        ("path = '~ann/texts/'", "path = '.../texts'"),
        ("include 'configs/run/demo.gin'", "include 'configs/run/demo.gin'"),
        ("x = 1/2  # a/b", "x = 1/2  # a/b"),
        ("path = 'gs://bucket/key'", "path = 'gs://bucket/key'"),
        ("path = '../texts/a.txt'", "path = '../texts/a.txt'"),
    ],
)
def test_without_absolute_paths(text, shown):
    assert without_absolute_paths(text) == shown


@pytest.mark.parametrize(("layers", "experts"), [(1, 2), (24, 16)])
def test_draw_loads_gives_a_png(tmp_path, layers, experts):
    data = draw_loads(write_run(tmp_path, layers=layers, experts=experts)).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and b"matplotlib" not in data.lower() and len(data) > 10_000
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1440 and 300 < height < 2600


def test_load_grid_divides_by_the_even_share_and_holds_over_gaps():
    # One layer, one source, two experts; samples at 10, 20 and 40: the column of 30 repeats the sample of 20.
    loads = np.array([[3, 1], [2, 2], [0, 4]], np.int32).reshape(3, 1, 1, 2)
    shares, first, last = load_grid(LoadsTrace(loads, np.array([10, 20, 40])))
    np.testing.assert_array_equal(shares, [[[1.5, 1.0, 1.0, 0.0], [0.5, 1.0, 1.0, 2.0]]])
    assert (first, last) == (10.0, 50.0)
