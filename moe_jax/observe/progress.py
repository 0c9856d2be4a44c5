"""The progress of a run: one line that is updated on a terminal, otherwise a plain line every n steps.

An odd terminal (no size, closed) never stops a run: what cannot be shown is logged once and left out.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

import numpy as np

_WIDTH_WITHOUT_ANSWER = 80
_SHORTEST_BAR, _LONGEST_BAR = 8, 32
_SECONDS_BETWEEN_DRAWS = 0.1
_SHOWN = ("loss", "skipped", "again", "speed", "load", "plan", "left")  # in this order, as far as they fit
_log = logging.getLogger(__name__)


class Progress:
    """Step, loss, tokens/s, device load max/mean and time left, on one line."""

    def __init__(self, total_steps: int, stream: TextIO, start_step: int, every: int, clock=time.monotonic) -> None:
        """Start after `start_step` of `total_steps`, drawing nothing yet.

        Args:
          every: steps between two plain lines; clock: returns seconds.
        """
        try:
            self.live = bool(stream.isatty()) and os.environ.get("TERM") != "dumb"
        except (AttributeError, ValueError, OSError):
            self.live = False
        self._total, self._stream, self._every, self._clock = total_steps, stream, every, clock
        self._step = start_step
        # The first update comes after the first step's compilation: the rate is measured between updates only.
        self._times: deque[tuple[int, float]] = deque(maxlen=64)
        self._line, self._drawn, self._drawn_at, self._broken = "", "", -float("inf"), False

    def update(self, step: int, record: Mapping[str, Any]) -> None:
        """Show a finished step by its record in metrics.jsonl, and the time left.

        Device load is max over mean of tokens per device, over all layers (1 is balanced).
        """
        now, load = self._clock(), float(np.mean(record["device_load_max_over_mean"]))
        self._step = step
        self._times.append((step, now))
        first_step, first_time = self._times[0]
        last, left = step >= self._total, None
        if last:
            left = "done"
        elif step > first_step and now > first_time:
            seconds = (self._total - step) * (now - first_time) / (step - first_step)
            left = f"{_in_units(round(seconds))} left"
        numbers = {
            "loss": f"loss {record['loss']:.4f}",
            "skipped": f"skipped {record['skipped_steps']}" if record.get("skipped_steps") else None,
            "again": f"run again {record['steps_run_again']}" if record.get("steps_run_again") else None,
            "left": left,
            "speed": f"{with_prefix(record['tokens_per_second'])} tokens/s",
            "load": f"load {load:.2f}x",
            "plan": record.get("plan_remark"),
        }
        if self.live:
            self._line = self._live_line(numbers)
            if last or now - self._drawn_at >= _SECONDS_BETWEEN_DRAWS:
                self._draw()
        elif last or step % self._every == 0:
            words = numbers | {"step": f"step {step}/{self._total}", "load": f"device load max/mean {load:.2f}"}
            self._emit(" | ".join(words[name] for name in ("step", *_SHOWN) if words[name]) + "\n")

    def note(self, text: str) -> None:
        """Print a line of its own (an evaluation, a checkpoint) above the updated one."""
        if self.live and self._drawn:
            self._emit("\r" + " " * len(self._drawn) + "\r")
        self._emit(text + "\n")
        if self.live and self._line:
            self._drawn = ""
            self._draw()

    def close(self) -> None:
        """Leave the last line in place."""
        if self.live and self._line:
            self._draw()
            self._emit("\n")
        self._line = self._drawn = ""

    def _live_line(self, numbers: dict[str, str | None]) -> str:
        """Fit what the terminal's width holds: the step first, then loss, time left, speed, load, and the bar last."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (AttributeError, ValueError, OSError):
            columns = 0
        # The last column stays free: writing into it makes many terminals wrap.
        width = (columns or _WIDTH_WITHOUT_ANSWER) - 1
        head = f"step {self._step:>{len(str(self._total))}}/{self._total}"
        kept, room = {}, width - len(head)
        for name, text in numbers.items():
            if text and len(text) + 2 <= room:
                kept[name] = text
                room -= len(text) + 2
        tail = "".join("  " + kept[name] for name in _SHOWN if name in kept)
        length, bar = min(room - 2, _LONGEST_BAR), ""
        if length >= _SHORTEST_BAR:
            done = length * self._step // self._total
            bar = f"  {'=' * done}{'.' * (length - done)}"
        return (head + bar + tail)[: max(width, 0)]

    def _draw(self) -> None:
        self._emit("\r" + self._line + " " * max(0, len(self._drawn) - len(self._line)))
        self._drawn, self._drawn_at = self._line, self._clock()

    def _emit(self, text: str) -> None:
        if self._broken:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as error:  # a closed pipe or stream, a text that the stream cannot encode
            self._broken = True
            _log.warning("progress is no longer shown: its stream fails (%s)", error)


def _in_units(seconds: int) -> str:
    """Write a duration in its two largest units: 126 -> 2m 06s."""
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{seconds // size}{unit} {seconds % size // part:02d}{smaller}"
    return f"{seconds}s"


def with_prefix(value: float) -> str:
    """Write a number in three digits and a prefix: 1234 -> 1.23k, 5.6e12 -> 5.60T."""
    # 999.5 of a unit reads as 1000, so the next prefix begins there
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    factor, prefix = next((pair for pair in prefixes if abs(value) >= 0.9995 * pair[0]), (1, ""))
    value = min(value, 10**300) / factor  # whole numbers have any size
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{prefix}"
