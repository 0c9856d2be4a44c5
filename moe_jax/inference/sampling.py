"""From logits to the next token: greedy, or drawn with temperature, top-k and top-p.

Inputs: logits float [b, V] and a key for each sequence. Outputs: int32 [b].

A draw depends on the seed, the prompt, how many equal prompts precede it, and the token's position; neither on the mesh
nor on what else is generated. Noise is drawn for every token of the vocabulary and added to the scaled logits (the
largest sum is a draw from their softmax), so it belongs to a token whatever top-k and top-p leave.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    Attributes:
      temperature: logits are divided by it; 0 takes the most probable token (greedy).
      top_k: only the k most probable tokens may be drawn; 0 is all.
      top_p: only the fewest tokens whose probabilities sum to at least this; 1 is all. After top_k.
      seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature ({self.temperature}) must be 0 (greedy) or positive; 1 leaves logits alone")
        if self.top_k < 0:
            raise UserError(f"top_k ({self.top_k}) must be at least 0; 0 lets every token be drawn")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p ({self.top_p}) must lie above 0 and at most at 1; 1 lets every token be drawn")
        if not 0 <= self.seed < 1 << 32:
            raise UserError(f"seed ({self.seed}) must lie between 0 and {(1 << 32) - 1}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def compiled(self) -> tuple[bool, int, bool]:
        """What a program is compiled for: greedy, top_k, whether top_p cuts."""
        return (True, 0, False) if self.greedy else (False, self.top_k, self.top_p < 1)


def prompt_keys(prompts: Sequence[Sequence[int]], seed: int) -> np.ndarray:
    """Return uint32 [B, 3], from which each prompt's draws follow: seed, hash of its ids, equal ones before it."""
    seen: dict[bytes, int] = {}
    keys = []
    for prompt in prompts:
        data = np.asarray(prompt, np.int32).tobytes()
        keys.append((seed, zlib.crc32(data), seen.get(data, 0)))
        seen[data] = seen.get(data, 0) + 1
    return np.asarray(keys, np.uint32).reshape(-1, 3)


def choose_tokens(logits, keys, positions, compiled: tuple[bool, int, bool], temperature, top_p):
    """Return int32 [b], the tokens that follow.

    Args:
      logits: float [b, V], -inf where a token may not come.
      keys: uint32 [b, 3] of `prompt_keys`; positions: int32 [b], of the tokens to be chosen.
      compiled: of a `Sampling`; temperature, top_p: float32 [], its own.
    """
    greedy, top_k, cuts = compiled
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = logits / temperature.astype(logits.dtype)
    noisy = scaled + jax.vmap(_noise, in_axes=(0, 0, None))(keys, positions, logits.shape[1:]).astype(logits.dtype)
    size = logits.shape[1]
    if not top_k and not cuts:
        return jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    best, token_ids = jax.lax.top_k(scaled, min(top_k or size, size))
    noisy = jnp.take_along_axis(noisy, token_ids, axis=-1)
    if cuts:
        probs = jax.nn.softmax(best, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        noisy = jnp.where(before < top_p.astype(probs.dtype), noisy, -jnp.inf)
    picked = jnp.argmax(noisy, axis=-1)[:, None]
    return jnp.take_along_axis(token_ids, picked, axis=-1)[:, 0].astype(jnp.int32)


def _noise(key, position, shape):
    """Return Gumbel noise of one sequence's token at one position."""
    seed, prompt, number = key
    folded = jax.random.key(seed)
    for value in (prompt, number, position.astype(jnp.uint32)):
        folded = jax.random.fold_in(folded, value)
    return jax.random.gumbel(folded, shape, jnp.float32)
