"""Turns SIGTERM and SIGINT into one agreed last step. No arrays, no jax.

Inputs: the signals of this process and, when there are several processes, the maximum of all their flags as the step
itself computes it. Outputs: `should_stop`, true at the same step everywhere. It saves nothing and ends nothing by
itself, except that a second signal ends the process at once.

The agreement costs no extra communication. Every step takes this process' flag and returns the maximum over all
processes among its metrics; the host reads a step's metrics a fixed number of steps later (`lag`), when they have long
arrived. All processes read the same flags before the same steps, so they stop at the same one:

    stop = StopSignal(processes=hosts.process_count)
    for step in range(first, last):
        if step - stop.lag >= first:
            stop.observe(int(metrics[step - stop.lag].stop_wanted), step - stop.lag)
        if stop.should_stop(step):
            break                                     # save; `step` is the first step that was not made
        state, metrics[step] = train_step(state, batch, stop.local_flag())
"""

import os
import signal
import threading

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Handle SIGTERM and SIGINT from creation until `close`; create it in the main thread.

    Args:
      processes: number of processes of the job. With one, `should_stop` follows the own flag and `observe` is idle.
      lag: a step's flag is observed before this many steps later; 1 = before the next step.
    """

    def __init__(self, *, processes: int = 1, lag: int = 1):
        if lag < 1:
            raise ValueError(f"lag ({lag}) must be at least 1: a step's flag is known after the step")
        self.lag = lag
        self._processes = processes
        self._received: list[int] = []
        self._stop_step: int | None = None
        self._last_allowed: int | None = None
        # Python runs a handler in the main thread only, and that may wait in a collective for ever. The wakeup pipe is
        # written by the C handler itself, so a thread sees every signal at once.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous = {number: signal.signal(number, _do_nothing) for number in _SIGNALS}
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="moe_jax stop signal", daemon=True).start()

    @property
    def received(self) -> int | None:
        """The number of the signal that asked this process to stop, if one did."""
        return self._received[0] if self._received else None

    def local_flag(self) -> int:
        """Return 1 once this process was asked to stop, else 0: the step's input."""
        return int(bool(self._received))

    def observe(self, global_flag: int, step: int) -> None:
        """Note the maximum of all processes' flags that step `step` returned; call it for every step, in order."""
        if self._processes == 1 or not global_flag or self._stop_step is not None:
            return
        self._stop_step = step + self.lag
        if self._last_allowed is not None and self._last_allowed >= self._stop_step:
            raise RuntimeError(
                f"the flag of step {step} must be observed before step {self._stop_step} is allowed, but step "
                f"{self._last_allowed} already was: other processes may have stopped there"
            )

    def should_stop(self, step: int) -> bool:
        """Say, before step `step` is dispatched, whether the run ends instead."""
        if self._processes == 1:
            return bool(self._received)
        if self._stop_step is not None and step >= self._stop_step:
            return True
        self._last_allowed = step
        return False

    def close(self) -> None:
        """Restore the previous signal handlers."""
        if self._write_end < 0:
            return
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write_end)
        self._write_end = -1

    def __enter__(self) -> "StopSignal":
        return self

    def __exit__(self, *_error) -> None:
        self.close()

    def _listen(self) -> None:
        while data := os.read(self._read_end, 1):
            if data[0] not in _SIGNALS:
                continue
            if self._received:
                os._exit(128 + data[0])
            self._received.append(data[0])
        os.close(self._read_end)


def _do_nothing(_number, _frame) -> None:
    """Replace the default action, which ends the process."""
