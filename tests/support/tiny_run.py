"""A run small enough to compile in seconds: its bindings, its corpus, and two ways to carry it out."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
from support.quick_compiles import QUICK

from moe_jax.config.gin_files import parse_run_config
from moe_jax.jobs.hosts import Hosts
from moe_jax.jobs.start import start_hosts
from moe_jax.observe.metrics_file import read_metrics
from moe_jax.parallel.mesh import to_devices
from moe_jax.storage.checkpoint import Checkpointer
from moe_jax.training.program import build_session
from moe_jax.training.run import Start, evaluate_run, run

BINDINGS = (
    "ModelConfig.layers = 2",
    "ModelConfig.model_dim = 16",
    "ModelConfig.heads = 2",
    "ModelConfig.hidden_dim = 16",
    "ModelConfig.max_length = 16",
    "MoEConfig.num_experts = 8",
    "MoEConfig.bucket_slack = 16.0",  # holds all: one pass, which compiles faster
    "DataConfig.sequence_length = 16",
    "train.batch_size = 8",
    "train.steps = 6",
    "train.checkpoint_every = 3",
    "train.warmup_steps = 2",
    "train.evaluate_windows = 8",
    "train.loads_every = 3",
    "PlannerConfig.must_pay = False",  # replicas, whatever they cost so small a run
)


def write_corpus(folder) -> str:
    """Write two small documents, unless they stand there, and return the binding that reads them.

    Several processes call this with one folder while others read it: a file appears whole, and never changes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, step in (("a.txt", 7), ("b.txt", 11)):
        if not (folder / name).exists():
            part = folder.parent / f"{name}.{os.getpid()}"
            part.write_text(" ".join(f"{(i * step) % 97} apples" for i in range(600)))
            part.rename(folder / name)
    return f"DataConfig.path = {str(folder)!r}"


def bindings_of(folder, *changes: str) -> list[str]:
    """Return all bindings of a run whose corpus and cache lie under `folder`; later ones win."""
    own = [*BINDINGS, write_corpus(folder / "corpus"), f"DataConfig.cache_dir = {str(folder / 'cache')!r}"]
    if {"PlannerConfig.name = 'hecate'", "PlannerConfig.name = 'auto'"} & set(changes):  # the others read none
        own.append("Hecate.overlap_degree = 'paper'")
    return [*own, *changes]


def config_of(folder, *changes: str):
    """Return the config of the run."""
    return parse_run_config((), bindings_of(folder, *changes))[0]


def session_of(folder, devices: int, *changes: str):
    """Return the session of the run on so many devices."""
    return build_session(config_of(folder, *changes), jax.devices()[:devices])


def one_step(session, executable, state, step: int):
    """Return (state, metrics) of a step without a planner on the batch of this number."""
    batch = to_devices(session.feed.read(step), session.state_shardings.batch)
    return executable(state, batch, session.tables, session.host_signals(0))


def arrays_of(workdir, step: int) -> dict:
    """Return {name: leaf} of a checkpoint of the run."""
    return Checkpointer(workdir / "checkpoints", keep=1).read_arrays(step)


def assert_same_run(whole, parts, step: int, *fields: str):
    """Compare two run folders to the bit: fields of every step's record, and every leaf of the checkpoint of `step`."""
    records = read_metrics(whole), read_metrics(parts)
    for name in ("step", "loss", "grad_norm", *fields):
        np.testing.assert_array_equal(*([record.get(name) for record in side] for side in records), err_msg=name)
    want, got = arrays_of(whole, step), arrays_of(parts, step)
    assert want.keys() == got.keys() and len(want) > 20
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def evaluate_here(folder, workdir, *changes: str) -> None:
    """Evaluate the last checkpoint of the run."""
    config, text = parse_run_config((), bindings_of(folder, *changes))
    evaluate_run(config, text, Hosts(), str(workdir))


def run_here(folder, workdir, *changes: str, **options) -> bool:
    """Carry the run out in this process, on the first 2 devices' worth of mesh that the bindings ask for."""
    config, text = parse_run_config((), bindings_of(folder, *changes))
    return run(config, text, Hosts(), workdir=str(workdir), start=Start(**options))


def command(folder, workdir, *changes: str, devices: int = 2, flags=()) -> list[str]:
    """Return the command line of the same run."""
    bindings = [f"--gin_bindings={binding}" for binding in bindings_of(folder, *changes)]
    where = [f"--workdir={workdir}", f"--host_devices={devices}"]
    return [sys.executable, "-m", "moe_jax.train", *bindings, *where, *flags]


def start(arguments, **changes: str) -> subprocess.Popen:
    """Start a command from the repository's root with quiet output in pipes; changes: of the environment."""
    root, pipe = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")), subprocess.PIPE
    environment = {**os.environ, "XLA_FLAGS": QUICK, **changes}
    return subprocess.Popen(arguments, env=environment, cwd=root, stdout=pipe, stderr=pipe, text=True)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start_pair(arguments, changes=({}, {})) -> list[subprocess.Popen]:
    """Start a command as the two processes of one job; changes: of the environment of each."""
    job = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
    return [start([*arguments, *job, f"--process_id={index}"], **changes[index]) for index in range(2)]


def join_job(devices: int):
    """Return (first flag, hosts) as one of the two processes of `start_pair`, with so many CPU devices."""
    own, *words = sys.argv[1:]
    coordinator, count, index = (word.partition("=")[2] for word in words)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    return own, start_hosts(coordinator=coordinator, num_processes=int(count), process_id=int(index))


def finish(process: subprocess.Popen, seconds: float = 240):
    """Return (exit code, stdout, stderr)."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def finish_pair(processes) -> list[tuple]:
    """Return the same of both processes of a job, after both have ended."""
    return [finish(process) for process in processes]
