import io
import os

import pytest

from moe_jax.observe.progress import Progress


class Terminal(io.StringIO):
    """A terminal of a given width; `screen` plays carriage returns as a terminal would."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def fileno(self):
        return 99

    def screen(self):
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for piece in line.split("\r"):
                shown = piece + shown[len(piece) :]
            lines.append(shown.rstrip())
        return lines


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv("TERM", raising=False)
    set_width(monkeypatch, 100)
    return Terminal()


def set_width(monkeypatch, columns):
    monkeypatch.setattr("os.get_terminal_size", lambda fileno: os.terminal_size((columns, 24)))


def run(steps, total, stream, seconds=2.0, start_step=0, every=10):
    """Return a `Progress` that was updated at these steps, so many seconds apart."""
    clock = Clock()
    progress = Progress(total, stream, start_step, every, clock)
    update(progress, clock, steps, seconds)
    return progress, clock


def update(progress, clock, steps, seconds=2.0, **more):
    for step in steps:
        clock.now += seconds
        numbers = {"loss": 6.0 / step, "tokens_per_second": 1234.5, "device_load_max_over_mean": [1.0, 1.5]}
        progress.update(step, numbers | more)


def test_live_line_shows_all_numbers(terminal):
    progress, clock = run([1, 2, 3], 10, terminal)
    assert progress.live
    # Step 1 at 2 s and step 3 at 6 s: 2 s a step, 7 steps left.
    assert terminal.screen() == [
        "step  3/10  " + "=" * 9 + "." * 23 + "  loss 2.0000  1.23k tokens/s  load 1.25x  14s left"
    ]
    progress.note("held-out loss 3.2")
    assert terminal.screen()[0] == "held-out loss 3.2" and terminal.screen()[1].startswith("step  3/10")
    update(progress, clock, range(4, 11), plan_remark="tau 0")
    progress.close()
    last = "step 10/10  " + "=" * 32 + "  loss 0.6000  1.23k tokens/s  load 1.25x  tau 0  done"
    assert terminal.screen() == ["held-out loss 3.2", last, ""]


def test_time_left_leaves_the_first_compilation_out_and_has_its_two_largest_units(terminal):
    progress, clock = run([3], 10, terminal, seconds=60.0, start_step=2)
    assert "left" not in terminal.screen()[-1]
    update(progress, clock, [4], seconds=1.0)
    assert terminal.screen()[-1].endswith("6s left")
    for seconds, text in ((21, "2m 06s"), (31200, "2d 04h")):
        run([1, 2], 8, terminal, seconds)  # 6 more
        assert terminal.screen()[-1].endswith(f" {text} left")


@pytest.mark.parametrize("columns", (1, 11, 40, 81))
def test_live_line_never_reaches_the_last_column(terminal, monkeypatch, columns):
    set_width(monkeypatch, columns)
    run(range(1, 10), 10, terminal)
    (line,) = terminal.screen()
    assert len(line) <= columns - 1 and (columns != 40 or line == "step  9/10  loss 0.6667  2s left")  # before the bar
    assert line.startswith("step  9/10"[: columns - 1].rstrip())


def test_without_a_terminal_one_plain_line_every_n_steps():
    stream = io.StringIO()
    progress, _ = run(range(1, 26), 25, stream)
    progress.note("saved")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 10/25 | loss 0.6000 | 1.23k tokens/s | device load max/mean 1.25 | 30s left",
        "step 20/25 | loss 0.3000 | 1.23k tokens/s | device load max/mean 1.25 | 10s left",
        "step 25/25 | loss 0.2400 | 1.23k tokens/s | device load max/mean 1.25 | done",
        "saved",
    ]
    assert "\r" not in stream.getvalue()
