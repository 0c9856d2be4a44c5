"""A run small enough to compile in seconds: its bindings, its corpus, and two ways to carry it out."""

import os
import subprocess
import sys

from support.quick_compiles import QUICK

from moe_jax.config import parse_run_config
from moe_jax.training.run import evaluate_run, run
from moe_jax.training.watchdog import Hosts

BINDINGS = (
    "ModelConfig.layers = 2",
    "ModelConfig.model_dim = 16",
    "ModelConfig.heads = 2",
    "ModelConfig.hidden_dim = 16",
    "ModelConfig.max_length = 16",
    "MoEConfig.num_experts = 8",
    "DataConfig.sequence_length = 16",
    "train.batch_size = 8",
    "train.steps = 6",
    "train.checkpoint_every = 3",
    "train.warmup_steps = 2",
    "train.evaluate_windows = 8",
    "train.loads_every = 2",
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
    return [*BINDINGS, write_corpus(folder / "corpus"), f"DataConfig.cache_dir = {str(folder / 'cache')!r}", *changes]


def evaluate_here(folder, workdir, *changes: str) -> None:
    """Evaluate the last checkpoint of the run."""
    config, text, _ = parse_run_config((), bindings_of(folder, *changes))
    evaluate_run(config, text, Hosts(), str(workdir))


def run_here(folder, workdir, *changes: str, **options) -> bool:
    """Carry the run out in this process, on the first 2 devices' worth of mesh that the bindings ask for."""
    config, text, operative = parse_run_config((), bindings_of(folder, *changes))
    return run(config, text, operative, Hosts(), workdir=str(workdir), **options)


def command(folder, workdir, *changes: str, devices: int = 2, flags=()) -> list[str]:
    """Return the command line of the same run."""
    bindings = [f"--gin_bindings={binding}" for binding in bindings_of(folder, *changes)]
    return [
        sys.executable,
        "-m",
        "moe_jax.train",
        *bindings,
        f"--workdir={workdir}",
        f"--host_devices={devices}",
        *flags,
    ]


def start(arguments, **keywords) -> subprocess.Popen:
    """Start a command from the repository's root with quiet output in pipes."""
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "XLA_FLAGS": QUICK, "PYTHONPATH": python_path}
    return subprocess.Popen(
        arguments,
        env=environment,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keywords,
    )


def finish(process: subprocess.Popen, seconds: float = 240):
    """Return (exit code, stdout, stderr)."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err
