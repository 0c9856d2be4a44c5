"""Options that the training step is compiled with, by platform and jax version.

Enters: a platform's name. Leaves: options for `lowered.compile(compiler_options=...)`. Each one stands here because
of a before and after of `python -m moe_jax.inspect`; docs/bench/inspect.md has them, those that did not help too.
"""

from __future__ import annotations

# what holds for every jax that this package supports (0.10.2 to 0.12)
GPU: dict[str, str] = {}


def compiler_options(platform: str) -> dict[str, str]:
    """Return the options for devices of a platform ('cpu', 'gpu', 'cuda', ...)."""
    return dict(GPU) if platform in ("gpu", "cuda") else {}
