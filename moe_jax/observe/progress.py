"""The progress of a run: one line that is updated on a terminal, otherwise a plain line every n steps.

An odd terminal (no size, no Unicode, closed) never stops a run: what cannot be shown is logged once and left out.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

_BAR = ("━", "╸", "─")
_PLAIN_BAR = ("=", ">", ".")
_WIDTH_WITHOUT_ANSWER = 80
_SHORTEST_BAR, _LONGEST_BAR = 8, 32
_SECONDS_BETWEEN_DRAWS = 0.1
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}  # seconds of each
_log = logging.getLogger(__name__)


class Progress:
    """Step, loss, tokens/s, device load max/mean and time left, on one line."""

    def __init__(
        self, total_steps: int, stream: TextIO, start_step: int = 0, every: int = 10, *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Start after `start_step` of `total_steps`, drawing nothing yet; `every`: steps between two plain lines."""
        try:
            self.live = bool(stream.isatty()) and os.environ.get("TERM") != "dumb"
        except (AttributeError, ValueError, OSError):
            self.live = False
        self._total, self._stream, self._every, self._clock = total_steps, stream, max(1, every), clock
        self._step = start_step
        # The first update comes after the first step's compilation: the rate is measured between updates only.
        self._times: deque[tuple[int, float]] = deque(maxlen=64)
        self._line, self._drawn, self._drawn_at, self._broken = "", "", -float("inf"), False
        self._bar = _BAR
        try:
            "".join(_BAR).encode(getattr(stream, "encoding", None) or "ascii")
        except (UnicodeEncodeError, LookupError):
            self._bar = _PLAIN_BAR

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
        """Show a finished step; what is None, or no step at all, is left out.

        Args:
          device_load: max over mean of tokens per device, over all layers (1 is balanced).
          skipped_steps: left out so far because they were not finite; steps_run_again: because a bucket overflowed.
          plan: what the planner says of its plan.
        """
        now = self._clock()
        self._step = step
        self._times.append((step, now))
        numbers = (
            "" if loss is None else f"loss {loss:.4f}",
            f"skipped {skipped_steps}" if skipped_steps else "",
            f"run again {steps_run_again}" if steps_run_again else "",
            "" if tokens_per_second is None else f"{with_prefix(tokens_per_second)} tokens/s",
            "" if device_load is None else f"load {device_load:.2f}x",
            plan or "",
            self._time_left(),
        )
        last = step >= self._total
        if self.live:
            self._line = self._live_line(numbers)
            if last or now - self._drawn_at >= _SECONDS_BETWEEN_DRAWS:
                self._draw()
        elif last or step % self._every == 0:
            self._emit(" | ".join(filter(None, (f"step {step}/{self._total}", *numbers))) + "\n")

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

    def _time_left(self) -> str:
        """Return in words how long the steps that are left take, in the two largest units; '' without a rate."""
        (first_step, first_time), (step, now) = self._times[0], self._times[-1]
        if step >= self._total:
            return "done"
        if step <= first_step or now <= first_time:
            return ""
        left, words = round((self._total - step) * (now - first_time) / (step - first_step)), []
        for unit, seconds in _UNITS.items():
            count, left = divmod(left, seconds)
            if words or count or unit == "s":
                words.append(f"{count:02d}{unit}" if words else f"{count}{unit}")
        return f"{' '.join(words[:2])} left"

    def _live_line(self, numbers: Sequence[str]) -> str:
        """Fit into the terminal's width what it holds: the step, then loss, time left and the others, and the bar."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (AttributeError, ValueError, OSError):
            columns = 0
        # The last column stays free: writing into it makes many terminals wrap.
        width = (columns or _WIDTH_WITHOUT_ANSWER) - 1
        head = f"step {self._step:>{len(str(self._total))}}/{self._total}"
        room, fitting = width - len(head), set()
        for text in (*numbers[:3], numbers[-1], *numbers[3:-1]):  # time left has its room before speed, load and plan
            if text and len(text) + 2 <= room:
                fitting.add(text)
                room -= len(text) + 2
        tail = "".join("  " + text for text in numbers if text in fitting)
        length, bar = min(room - 2, _LONGEST_BAR), ""
        if length >= _SHORTEST_BAR:
            share = min(1.0, max(0.0, self._step / self._total)) if self._total > 0 else 1.0
            full, half = divmod(round(2 * length * share), 2)
            done, tip, rest = self._bar
            bar = "  " + done * full + tip * half + rest * (length - full - half)
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


def with_prefix(value: float) -> str:
    """Write a number in three digits and a prefix: 1234 -> 1.23k, 5.6e12 -> 5.60T."""
    # 999.5 of a unit reads as 1000, so the next prefix begins there
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    factor, prefix = next((pair for pair in prefixes if abs(value) >= 0.9995 * pair[0]), (1, ""))
    value = min(value, 10**300) / factor  # whole numbers have any size
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{prefix}"
