"""Text from trained models: `load` a run, then `generate`. See README.md."""

from moe_jax.inference.generator import Generated, Generator, load
from moe_jax.inference.programs import Sampling

__all__ = ["Generated", "Generator", "Sampling", "load"]
