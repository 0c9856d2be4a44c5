"""Options that the training step is compiled with, by platform, number of processes and jax version.

Inputs: a platform's name. Outputs: options for `lowered.compile(compiler_options=...)`. Each option of `GPU` was chosen
by comparing the reports of `python -m moe_jax.inspect` without it and with it; docs/bench/inspect.md has them, and what
did not help.
"""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)

# what holds for every jax that this package supports (0.10.2 to 0.12)
GPU: dict[str, str] = {}
# With several processes: one that compiles alone must not wait for the others' timings of kernels
# (`shared_program.py`). `distributed/hosts.py` sets the same for all other programs of the process.
ALONE = {"xla_gpu_shard_autotuning": "False"}
# Kernels that give the same bits every time, or an error where there is none.
DETERMINISTIC = {"xla_gpu_deterministic_ops": "True"}


def compiler_options(platform: str, processes: int = 1, deterministic: bool = False) -> dict[str, str]:
    """Return the options for devices of a platform ('cpu', 'gpu', 'cuda', ...).

    Args:
      processes: of the job.
      deterministic: whether the same program must give the same bits every time.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    return {**GPU, **(ALONE if processes > 1 else {}), **(DETERMINISTIC if deterministic else {})}


def compiled(lowered, options: dict[str, str]):
    """Return the executable of a lowered program; leave out an option of `ALONE` that this compiler does not have."""
    try:
        return lowered.compile(compiler_options=options)
    except Exception as error:
        unknown = [name for name in ALONE if name in options and f"No such compile option: '{name}'" in str(error)]
        if not unknown:
            raise
        _LOG.warning("this jax's compiler has no option %s, which is left out", ", ".join(unknown))
        return lowered.compile(compiler_options={name: v for name, v in options.items() if name not in unknown})
