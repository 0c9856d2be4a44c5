"""The child process of the GPU benchmark: calls parts one after the other, and reports each to its parent.

    python -m gpu_day_items.child PIPE SCRATCH tiny|full '[["name", "module:function", {arguments}], ...]'

The first part that raises ends the process: results after an error of CUDA cannot be trusted.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import threading
import traceback

from gpu_day_items.context import Context, NotHere


def main() -> int:
    """Call the parts of the command line."""
    pipe, scratch, sizes, parts = sys.argv[1:]
    threading.Thread(target=end_with_parent, daemon=True).start()
    context = Context(int(pipe), pathlib.Path(scratch), sizes == "tiny")
    for _, call, arguments in json.loads(parts):
        module, _, function = call.partition(":")
        try:
            getattr(importlib.import_module(module), function)(context, **arguments)
        except NotHere as reason:
            context.send(end="skipped", reason=str(reason))
        except Exception as error:
            traceback.print_exc()
            context.send(end="failed", reason=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:500]}")
            return 1
        else:
            context.send(end="ok")
    return 0


def end_with_parent():
    """End this process when the parent is gone: it holds the other end of stdin and never writes."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing that a library does at exit may hold the GPU
