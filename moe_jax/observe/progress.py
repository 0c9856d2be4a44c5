"""The progress of a run: one line that is updated on a terminal, otherwise a plain line every n steps.

Inputs: host numbers of a step. Outputs: text on a stream. An odd terminal (no size, no Unicode, closed) never stops a
run: what cannot be shown is logged once and left out.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

_BAR = ("━", "╸", "─")
_PLAIN_BAR = ("=", ">", ".")
_WIDTH_WITHOUT_ANSWER = 80
_SHORTEST_BAR, _LONGEST_BAR = 8, 32
_SECONDS_BETWEEN_DRAWS = 0.1
_SHOWN = ("loss", "skipped", "again", "speed", "load", "plan", "left")  # in this order, as far as they fit
_log = logging.getLogger(__name__)


class Progress:
    """Step, loss, tokens/s, device load max/mean and time left, on one line."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO,
        start_step: int = 0,
        every: int = 10,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start at `start_step`, drawing nothing yet.

        Args:
          total_steps: the step at which the run ends.
          stream: where to draw; if it is a terminal, one line that is updated.
          start_step: steps already done, when resuming.
          every: steps between two plain lines.
          clock: returns monotonic seconds.
        """
        self.live = _is_terminal(stream)
        self._total, self._stream, self._every, self._clock = total_steps, stream, max(1, every), clock
        self._step = start_step
        # The first update comes after the first step's compilation: the rate is measured between updates only.
        self._times: deque[tuple[int, float]] = deque(maxlen=64)
        self._line, self._drawn, self._drawn_at, self._broken = "", "", -float("inf"), False
        self._bar = _BAR if _can_encode(stream, "".join(_BAR)) else _PLAIN_BAR

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens_per_second: float | None = None,
        device_load: float | None = None,
        skipped_steps: int = 0,
        steps_run_again: int = 0,
        plan: str | None = None,
    ) -> None:
        """Show a finished step.

        Args:
          step: steps done.
          loss: of this step.
          tokens_per_second: of this step.
          device_load: max over mean of tokens per device, over all layers (1 is balanced).
          skipped_steps: left out so far because they were not finite; shown where there are any.
          steps_run_again: so far, because a bucket overflowed; shown where there are any.
          plan: what the planner says of its plan.
        """
        now = self._clock()
        self._step = step
        self._times.append((step, now))
        numbers = {
            "loss": None if loss is None else f"loss {loss:.4f}",
            "skipped": f"skipped {skipped_steps}" if skipped_steps else None,
            "again": f"run again {steps_run_again}" if steps_run_again else None,
            "left": self._time_left(now),
            "speed": None if tokens_per_second is None else f"{with_prefix(tokens_per_second)} tokens/s",
            "load": None if device_load is None else f"load {device_load:.2f}x",
            "plan": plan,
        }
        last = step >= self._total
        if self.live:
            self._line = self._live_line(numbers)
            if last or now - self._drawn_at >= _SECONDS_BETWEEN_DRAWS:
                self._draw()
        elif last or step % self._every == 0:
            load = None if device_load is None else f"device load max/mean {device_load:.2f}"
            words = (
                f"step {step}/{self._total}",
                numbers["loss"],
                numbers["skipped"],
                numbers["again"],
                numbers["speed"],
                load,
                plan,
                numbers["left"],
            )
            self._emit(" | ".join(word for word in words if word) + "\n")

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

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _time_left(self, now: float) -> str | None:
        if self._step >= self._total:
            return "done"
        (first_step, first_time), (last_step, _) = self._times[0], self._times[-1]
        if last_step <= first_step or now <= first_time:
            return None
        return short_time((self._total - self._step) * (now - first_time) / (last_step - first_step)) + " left"

    def _live_line(self, numbers: dict[str, str | None]) -> str:
        """Fit what the terminal's width holds: the step first, then loss, time left, speed, load, and the bar last."""
        # The last column stays free: writing into it makes many terminals wrap.
        width = _terminal_width(self._stream) - 1
        head = f"step {self._step:>{len(str(self._total))}}/{self._total}"
        kept, room = {}, width - len(head)
        for name, text in numbers.items():
            if text and len(text) + 2 <= room:
                kept[name] = text
                room -= len(text) + 2
        tail = "".join("  " + kept[name] for name in _SHOWN if name in kept)
        length = min(room - 2, _LONGEST_BAR)
        bar = "  " + self._drawn_bar(length) if length >= _SHORTEST_BAR else ""
        return (head + bar + tail)[: max(width, 0)]

    def _drawn_bar(self, length: int) -> str:
        done, tip, rest = self._bar
        halves = round(2 * length * min(1.0, max(0.0, self._step / self._total))) if self._total > 0 else 2 * length
        full, half = divmod(halves, 2)
        return done * full + tip * half + rest * (length - full - half)

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


def with_prefix(value: float) -> str:
    """Write a number in three digits and a prefix: 1234 -> 1.23k, 5.6e12 -> 5.60T."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.5 of a unit reads as 1000, so the next prefix begins there.
        if abs(value) >= 0.9995 * factor:
            return f"{_three_digits(value / factor)}{prefix}"
    return _three_digits(value)


def short_time(seconds: float) -> str:
    """Write a duration in its two largest units: 7s, 2m 05s, 3h 12m, 2d 04h."""
    whole = int(round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError, OSError):
        return False


def _terminal_width(stream: TextIO) -> int:
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, ValueError, OSError):
        columns = 0
    return columns or _WIDTH_WITHOUT_ANSWER


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
