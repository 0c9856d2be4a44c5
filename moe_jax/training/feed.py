"""From the corpus to the devices: batches as global arrays, the same on any number of hosts.

Enters: a token cache and a step. Leaves: a `Batch` [n, B / n, Sq] of global arrays, for training or evaluation. Rows
keep the stream's order: microbatch m holds rows [m B / n, (m + 1) B / n).
Letters: n microbatches, B global sequences of a step, Sq positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from moe_jax.data import Tokenizer, TokenStream, held_out_batches, mask_tokens
from moe_jax.data.cache import TokenCache
from moe_jax.models import Batch, ModelConfig
from moe_jax.training.config import TrainConfig


def padded_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> int:
    """Return V of the model: as bound, or the tokenizer's size rounded up to a multiple of 128."""
    return config.vocab_size or -(-tokenizer.vocab_size // 128) * 128


class Feed:
    """Batches of one run; a pure function of the step."""

    def __init__(
        self, cache: TokenCache, tokenizer: Tokenizer, train: TrainConfig, model: ModelConfig, sequence_length: int
    ):
        self.cache, self.tokenizer, self.train, self.model = cache, tokenizer, train, model
        self.sequence_length = sequence_length
        self.stream = TokenStream(cache, sequence_length=sequence_length, batch_size=train.batch_size, seed=train.seed)

    def _hide(self, tokens, step):
        """Turn [B, Sq + 1] tokens into (inputs, targets, weights): next tokens, or masked ones."""
        if self.model.kind == "gpt":
            return tokens[:, :-1], tokens[:, 1:], np.ones(tokens[:, 1:].shape, np.float32)
        return mask_tokens(
            tokens[:, :-1],
            step,
            0,
            self.train.seed,
            self.tokenizer.vocab_size,
            self.tokenizer.mask_id,
            self.model.mask_rate,
            [self.tokenizer.end_id],
        )

    def read(self, step: int) -> Batch:
        """Return the batch of a step as NumPy arrays [n, B / n, Sq]."""
        inputs, targets, weights = self._hide(self.stream.batch(step), step)
        shape = (self.train.accumulate, -1, self.sequence_length)
        return Batch(inputs.reshape(shape), targets.reshape(shape), self._weights(weights).reshape(shape))

    def held_out(self) -> Iterator[tuple[Batch, float]]:
        """Yield evaluation batches [1, B / n, Sq] with the sum of their weights; always the same ones."""
        batches = held_out_batches(
            self.cache,
            sequence_length=self.sequence_length,
            batch_size=self.train.batch_size // self.train.accumulate,
            limit=self.train.evaluate_windows,
        )
        for step, (tokens, real) in enumerate(batches):
            inputs, targets, weights = self._hide(tokens, step)
            weights = self._weights(weights * real)
            yield Batch(inputs[None], targets[None], weights[None]), float(weights.sum())

    def _weights(self, weights):
        return weights.astype(self.model.param_dtype)


def to_devices(arrays, shardings):
    """Return NumPy arrays as global arrays; every process gives the same arrays and places its own part.

    Args:
      arrays: pytree of NumPy arrays.
      shardings: matching pytree, or one sharding for all.
    """

    def one(array, sharding):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda array: one(array, shardings), arrays)
    return jax.tree.map(one, arrays, shardings)
