"""A trace as XLA's profiler writes it on GPUs, made from a program and the times that a device would have.

Kernels stand on threads 'Stream #N(Compute)' of the process '/device:GPU:0', each with the instruction in `hlo_op`
(behind the loops that it runs in, joined by '::'), the program in `hlo_module` and its launch in `kernel_details`.
Collectives have a stream of their own. Lines that a viewer derives ('XLA Ops', 'XLA Modules') repeat all of it, and
the host has its own process.
"""

import gzip
import json

from moe_jax.cluster.timeline import play

DEVICE, HOST, COMPUTE, LINKS, OPS, MODULES = 1, 701, 20, 31, 2, 3


def write_gpu_trace(folder, module, prices, steps):
    """Write a trace of some steps of a program on a device of these prices; return its path."""
    timeline = play(module, prices)
    events = [
        _named("process_name", DEVICE, 0, "/device:GPU:0"),
        _named("process_name", HOST, 0, "/host:CPU"),
        _named("thread_name", DEVICE, COMPUTE, f"Stream #{COMPUTE}(Compute)"),
        _named("thread_name", DEVICE, LINKS, f"Stream #{LINKS}(Compute)"),
        _named("thread_name", DEVICE, OPS, "XLA Ops"),
        _named("thread_name", DEVICE, MODULES, "XLA Modules"),
        _named("thread_name", HOST, 5, "python"),
    ]
    for step in range(steps):
        offset = step * timeline.seconds * 1.25
        events.append(_span(HOST, 5, "PjitFunction(train_step)", offset, timeline.seconds, {}))
        events.append(_span(DEVICE, MODULES, f"{module.name}(17)", offset, timeline.seconds, {}))
        for row, name, _, start, end in timeline.events:
            if row == "wait":
                continue
            stream = COMPUTE if row == "compute" else LINKS
            begin, length = offset + start, end - start
            kernel = name.replace(".", "_").replace("-", "_")
            events.append(_span(DEVICE, stream, kernel, begin, length, _fields(module, name)))
            again = {"hlo_op": name, "hlo_module": module.name, "group_id": step}
            events.append(_span(DEVICE, OPS, name, begin, length, again))
    path = folder / "plugins" / "profile" / "2026_11_22" / "host.trace.json.gz"
    path.parent.mkdir(parents=True)
    trace = {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": [*events, {}]}
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


def _named(what, process, thread, name):
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _span(process, thread, name, begin, length, fields):
    when = {"ts": begin * 1e6, "dur": length * 1e6}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, **when, "args": fields}


def _fields(module, name):
    return {
        "hlo_module": module.name,
        "hlo_op": name if name in module.entry.by_name else f"while.1::{name}",
        "kernel_details": "regs:40 static_shared:0 dynamic_shared:0 grid:264,1,1 block:128,1,1 occ_pct:56.25",
    }
