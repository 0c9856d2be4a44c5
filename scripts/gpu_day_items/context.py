"""What a part of the GPU benchmark is given, and what it raises where it does not apply. Standard library alone."""

from __future__ import annotations

import json
import os
import pathlib
import time

OF_THE_PARENT = frozenset(("name", "status", "seconds", "reason", "rows", "stderr", "killed"))


class NotHere(Exception):
    """What a part raises if it does not apply to this machine, jax or commit."""


class Context:
    """What a part is given.

    Attributes:
      tiny: whether sizes are those of the tests.
      scratch: folder for temporary files that the children of this day share.
    """

    def __init__(self, pipe: int, scratch: pathlib.Path, tiny: bool):
        self.pipe, self.scratch, self.tiny = pipe, scratch, tiny

    def send(self, **message):
        os.write(self.pipe, json.dumps(message, default=float).encode() + b"\n")

    def record(self, **values):
        """Keep values in the day's JSON under this part, beside what the parent says of it."""
        taken = values.keys() & OF_THE_PARENT
        if taken:
            raise ValueError(f"{sorted(taken)} are what the parent says of a part; choose other names")
        self.send(values=values)

    def row(self, what: str, result: str):
        """Add a row to the page's table of this item."""
        self.send(row=[what, result])

    def kill_me(self):
        """Have this process killed by SIGKILL; the part counts as done."""
        self.send(end="kill")
        time.sleep(3600)

    def of_size(self, full, tiny):
        return tiny if self.tiny else full
