"""The signal to stop: SIGTERM, Ctrl-C or a closed terminal end a run at a step that all processes agree on."""

# The agreement costs no extra communication. Every step takes this process' flag and returns the maximum over all
# processes among its metrics; the host reads a step's metrics a fixed number of steps later (`lag`). All processes read
# the same flags before the same steps, so they stop at the same one (`Loop.train`).

from __future__ import annotations

import contextlib
import os
import signal
import threading

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignal(contextlib.AbstractContextManager):
    """Handle SIGTERM, SIGINT and SIGHUP (not under nohup) from creation, in the main thread, to the end of `with`.

    Attributes:
      requested: whether this process was asked to stop; as an int the step's input.
    """

    def __init__(self, *, processes: int = 1, lag: int = 1):
        """processes: of the job; lag: a step's flag is observed before so many steps later, 1 is before the next."""
        self.lag, self._processes, self.requested, self._stop_step = lag, processes, False, None
        # Python runs a handler in the main thread only, and that may wait in a collective for ever. The wakeup pipe is
        # written by the C handler itself, so a thread sees every signal at once.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # a function in place of the default action, which ends the process
        listened = _SIGNALS[: 2 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 3]
        self._previous = {number: signal.signal(number, lambda _number, _frame: None) for number in listened}
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="moe_jax stop signal", daemon=True).start()

    def observe(self, global_flag: int, step: int) -> None:
        """Note the maximum of all processes' flags that step `step` returned; call it for every step, in order."""
        if global_flag and self._stop_step is None:
            self._stop_step = step + self.lag

    def should_stop(self, step: int) -> bool:
        """Say, before step `step` is dispatched, whether the run ends instead; alone at once, as asked."""
        return self.requested if self._processes == 1 else self._stop_step is not None and step >= self._stop_step

    def __exit__(self, *_error) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write_end)

    def _listen(self) -> None:
        is_first = True
        while data := os.read(self._read_end, 1):
            if data[0] in _SIGNALS:
                if not is_first and data[0] != signal.SIGHUP:  # a closed terminal and its shell send one each
                    os.write(2, b"\nmoe_jax: told to end once more, and ends without saving\n")
                    os._exit(128 + data[0])
                is_first, self.requested = False, True
        os.close(self._read_end)
