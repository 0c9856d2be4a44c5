"""One run's whole configuration: gin files and bindings in, one checked record out.

A name is imported at its first use: a command parses its flags (`command_line`) before anything imports jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_jax.config.gin_files import parse_run_config
    from moe_jax.config.run_config import (
        ABSENT,
        CONFIG_CLASSES,
        MAY_DIFFER,
        RunConfig,
        bound_in,
        check_resumable,
        config_differences,
        config_text,
        may_differ,
    )
    from moe_jax.config.train_config import DistillationConfig, TrainConfig

__all__ = [
    "ABSENT",
    "CONFIG_CLASSES",
    "MAY_DIFFER",
    "DistillationConfig",
    "RunConfig",
    "TrainConfig",
    "bound_in",
    "check_resumable",
    "config_differences",
    "config_text",
    "may_differ",
    "parse_run_config",
]

_DEFINED_IN = {  # the others: run_config
    "parse_run_config": "gin_files",
    "DistillationConfig": "train_config",
    "TrainConfig": "train_config",
}


def __getattr__(name: str):
    """Return one of the names in `__all__`, from the module that defines it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN.get(name, 'run_config')}"), name)
