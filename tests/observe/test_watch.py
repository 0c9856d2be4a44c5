"""The page that follows runs: its numbers, and who may ask for it."""

import http.client
import json
import threading
from contextlib import closing

import numpy as np
import pytest

from moe_jax.observe.metrics_file import MetricsWriter
from moe_jax.observe.report import MOST_PLANS, MOST_POINTS, FollowedRun
from moe_jax.storage.run_folder import RunFolder
from moe_jax.watch import WatchServer


def test_a_run_is_followed_while_it_is_written(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics.write_text(
        '{"step": 1, "loss": 4.0, "device_load_max_over_mean": [1.5, 2.0], "plan_id": 0, "replicas": 0}\n'
        '{"step": 2, "loss": "nan", "device_load_max_over_mean": [1.25, 1.0], "plan_id": 1, "replicas": 3, '
        '"reshard_seconds": 0.5}\n{"step": 3, "lo'
    )
    run.evaluations.write_text('{"step": 0, "held_out_loss": 5.5}\n')
    run.environment.write_text('{"modelled": {"segments": []}}')
    followed = FollowedRun(run)
    data = followed.refresh()
    assert data["lines"]["loss"] == {"width": 1, "last": 2, "steps": [1], "low": [4.0], "high": [4.0], "mean": [4.0]}
    assert data["lines"]["held_out_loss"]["steps"] == [0] and data["lines"]["held_out_loss"]["mean"] == [5.5]
    assert data["lines"]["device_load_max_over_mean"]["mean"] == [2.0, 1.25]
    assert data["layers"] == {"width": 1, "last": 2, "steps": [1, 2], "mean": [[1.5, 2.0], [1.25, 1.0]]}
    sides = {"before": {"replicas": 0, "load": 2.0}, "now": {"replicas": 3, "load": 1.25}}
    assert data["changes"] == 1 and data["plans"] == [{"step": 2, **sides, "seconds": {"reshard_seconds": 0.5}}]
    assert data["modelled"] == {"segments": []} and followed.refresh(data["version"]) is None

    with open(run.metrics, "a") as file:
        file.write('ss": 3.0}\nno record\n{"step": 4, "loss": 2.0}\n')
    assert followed.refresh(data["version"])["lines"]["loss"]["mean"] == [4.0, 3.0, 2.0]
    MetricsWriter(run, resume_step=3).write(4, {"loss": 1.0, "note": "x" * 99})  # cut, and longer again than it was
    assert followed.refresh()["lines"]["loss"]["mean"] == [4.0, 3.0, 1.0]
    run.metrics.unlink()
    assert "loss" not in followed.refresh()["lines"]


def test_long_runs_keep_their_extremes_and_their_means(tmp_path):
    steps, random = 5 * MOST_POINTS + 7, np.random.default_rng(0)
    loss, loads = random.normal(size=steps), random.random((steps, 3))
    writer = MetricsWriter(tmp_path)
    for at in range(steps):
        record = {"loss": loss[at], "device_load_max_over_mean": loads[at], "plan_id": at, "replicas": 0}
        writer.write(at + 1, record)
    data = FollowedRun(tmp_path).refresh()
    line, places = data["lines"]["loss"], np.arange(1, steps + 1) // 8
    assert line["width"] == 8 and line["last"] == steps and line["steps"] == (np.unique(places) * 8).tolist()
    for name, reduce in (("low", np.min), ("high", np.max), ("mean", np.mean)):
        np.testing.assert_allclose(line[name], [reduce(loss[places == at]) for at in np.unique(places)], rtol=1e-4)
    expected = [loads[places == at].mean(axis=0) for at in np.unique(places)]
    np.testing.assert_allclose(data["layers"]["mean"], expected, rtol=1e-4)
    assert data["changes"] == steps - 1 and len(data["plans"]) == MOST_PLANS and data["plans"][-1]["step"] == steps
    assert len(json.dumps(data)) < 150_000


@pytest.fixture
def server(finished_run):
    with WatchServer([FollowedRun(finished_run)], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, method="GET", hosts=None):
    """Return (status, headers, text) of an answer; `hosts` replaces the Host lines."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)) as connection:
        connection.putrequest(method, path, skip_host=hosts is not None)
        for host in hosts or ():
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def test_the_page_and_its_data(server, finished_run):
    status, headers, page = ask(server, "/")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    for directive in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "script-src 'sha256-"):
        assert directive in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    for way_in in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):  # a run's text stays text
        assert way_in not in page
    assert "http" not in page.replace("http://www.w3.org/", "").replace("http-equiv", "")
    assert str(finished_run.path) not in page
    assert ask(server, "/runs")[2] == "1"
    status, headers, text = ask(server, "/run?at=0")
    assert status == 200 and headers["X-Content-Type-Options"] == "nosniff"
    data = json.loads(text)
    assert data["name"] == str(finished_run.path) and len(data["lines"]["loss"]["mean"]) == 30
    assert ask(server, f"/run?at=0&seen={data['version']}")[0] == 204
    for path in ("/run?at=1", "/run?at=-1", "/run?at=x", "/run", "/../setup.py", "/nothing"):
        assert ask(server, path)[0] == 404, path
    finished_run.metrics.unlink()
    finished_run.metrics.mkdir()
    status, _, text = ask(server, "/run?at=0")
    assert status == 500 and "cannot read" in text and "\n" not in text


def test_only_this_machine_asks_and_only_by_get(server):
    port = server.server_port
    assert server.server_address[0] == "127.0.0.1"
    for hosts in (["evil.example"], [f"evil.example:{port}"], ["localhost"], [f"127.0.0.1:{port}", "evil.example"], []):
        assert ask(server, "/run?at=0", hosts=hosts)[0] == 403, hosts
    assert ask(server, "/runs", hosts=[f"localhost:{port}"])[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "CONNECT"):
        status, headers, _ = ask(server, "/run?at=0", method)
        assert status == 405 and headers["Allow"] == "GET"
