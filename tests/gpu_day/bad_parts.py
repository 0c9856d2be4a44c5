"""Parts of a day that succeed, and parts that fail in each way that is handled."""

import os
import signal
import sys
import time

from gpu_day_items.context import NotHere


def well(context, value=1):
    context.record(value=value, process=os.getpid())
    context.row("what", f"a | result\nof {value}")


def raises(context):
    context.record(before=1)
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 41 GB\nmore")


def crashes(context):
    context.record(before=2)
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(context):
    context.record(before=3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (context.scratch / "hanging").write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(600)


def does_not_apply(context):
    raise NotHere("no such device")


def exits(context):
    os._exit(3)
