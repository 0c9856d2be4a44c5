"""From the corpus to the devices: batches as global arrays, the same on any number of hosts.

Inputs: a token cache and a step. Outputs: a `Batch` [Nm, B / Nm, Sq] of global arrays, for training or evaluation;
where devices cannot share B / Nm sequences evenly, with rows of weight 0 behind them.
Letters: docs/notation.md.
"""

# Rows keep the stream's order: microbatch m holds rows [m B / Nm, (m + 1) B / Nm). A process reads the rows that its
# own devices hold, which need not follow one another (the mesh may lay devices in any order, and an MP group may span
# processes).

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding

from moe_jax.config.train_config import TrainConfig
from moe_jax.data.cache import TokenCache
from moe_jax.data.chat import ANSWER, FIRST, ID_BITS
from moe_jax.data.corpus import DataConfig
from moe_jax.data.stream import (
    HeldOut,
    TokenStream,
    document_numbers,
    inside_documents,
    mask_tokens,
    token_numbers,
)
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.errors import UserError
from moe_jax.models import Batch, ModelConfig
from moe_jax.moe.routers import PADDING


def padded_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> int:
    """Return V of the model: as bound, or the tokenizer's size rounded up to a multiple of 128."""
    return config.vocab_size or -(-tokenizer.vocab_size // 128) * 128


class Feed:
    """Batches of one run; a pure function of the step."""

    def __init__(
        self, cache: TokenCache, tokenizer: Tokenizer, train: TrainConfig, model: ModelConfig, data: DataConfig,
        rows: int, sharding: NamedSharding,
    ):  # fmt: skip
        """Take what a batch depends on.

        Args:
          rows: sequences of a microbatch, those that only fill it up included; sharding: of arrays [Nm, rows, Sq].
        """
        self.cache, self.tokenizer, self.train, self.model = cache, tokenizer, train, model
        self.sequence_length = length = data.sequence_length
        # The id after which no target counts: a document's end in a model that keeps them apart. Masked tokens are
        # targets in their own place, whatever precedes them.
        apart = model.document_mask and model.kind == "gpt" and data.kind == "text"
        self.boundary_id = tokenizer.end_id if apart else None
        if data.kind == "chat" and model.kind != "gpt":
            raise UserError(
                f"ModelConfig.kind ({model.kind!r}) learns no answers; set it to 'gpt', or DataConfig.kind = 'text'"
            )
        packed = model.document_mask
        self.stream = TokenStream(
            cache, sequence_length=length, batch_size=train.batch_size, seed=train.seed, weights=data.weights,
            packed=packed,
        )  # fmt: skip
        self.evaluated = HeldOut(cache, length, limit=train.evaluate_windows, packed=packed)
        self.pads_held_out = bool(len(self.evaluated.windows) % rows) or not self.evaluated.are_full()
        self.sharding, self.rows = sharding, rows
        indices = sharding.addressable_devices_indices_map((1, self.rows, length)).values()
        # int64 [b], rows of a microbatch that the devices of this process hold, ascending
        self.local_rows = np.unique(np.concatenate([np.arange(self.rows)[index[1]] for index in indices]))

    def _examples(self, tokens, step, rows) -> Batch:
        """Return the batch [r, Sq] of tokens [r, Sq + 1] of global rows [r]."""
        if self.cache.meta.answers:
            documents = np.cumsum(tokens[:, :-1] & FIRST > 0, axis=1, dtype=np.int32)
            weights = (tokens[:, 1:] & ANSWER > 0).astype(self.model.param_dtype)
            inputs, targets = tokens[:, :-1] & ID_BITS, tokens[:, 1:] & ID_BITS
            return Batch(inputs, targets, weights, documents=documents if self.model.document_mask else None)
        if self.model.kind == "gpt":
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            weights = np.ones(targets.shape, np.float32)
        else:
            inputs, targets, weights = mask_tokens(tokens[:, :-1], step, rows, self.train.seed, self.tokenizer)
        if self.boundary_id is not None:
            weights = weights * inside_documents(tokens, self.boundary_id)
        masked = self.model.document_mask
        documents = document_numbers(tokens[:, :-1], self.tokenizer.end_id) if masked else None
        return Batch(inputs, targets, weights.astype(self.model.param_dtype), documents=documents)

    def read(self, step: int, rows: np.ndarray | None = None) -> Batch:
        """Return a step's batch as NumPy arrays [Nm, rows, Sq]; [Nm, b, Sq] of given rows, such as `local_rows`."""
        rows, real = np.arange(self.rows) if rows is None else rows, self.train.microbatch_size
        filled = rows >= real  # each a copy of the last one, of weight 0
        rows = (np.arange(self.train.grad_accum_steps)[:, None] * real + np.minimum(rows, real - 1)[None]).ravel()
        shape = (self.train.grad_accum_steps, -1, self.sequence_length)
        examples = self._examples(self.stream.batch(step, rows), step, rows)
        if self.cache.meta.answers:
            numbers = token_numbers(self.stream.sizes(step), self.sequence_length, rows, PADDING)
            examples = dataclasses.replace(examples, token_ids=numbers)
        batch = jax.tree.map(lambda array: array.reshape(shape), examples)
        batch.weights[:, filled] = 0
        if batch.token_ids is not None:
            batch.token_ids[:, filled] = PADDING
        return batch

    def held_out(self) -> Iterator[Batch]:
        """Yield this process' rows of the evaluation batches, [1, b, Sq]; always the same windows."""
        for tokens, real, windows, sizes in self.evaluated.batches(self.rows, self.local_rows):
            examples = self._examples(tokens, 0, np.maximum(windows, 0)[self.local_rows])  # masks are a window's own
            ids = token_numbers(sizes, self.sequence_length, self.local_rows, PADDING) if self.pads_held_out else None
            weights = examples.weights * real.astype(self.model.param_dtype)
            examples = dataclasses.replace(examples, weights=weights, token_ids=ids)
            yield jax.tree.map(lambda array: array[None], examples)

    @functools.cached_property
    def held_out_counts(self) -> np.ndarray:
        """How often each id is a target of an evaluation, int64 [ids]; of a masked language model, as if all were."""
        return self.evaluated.counts(self.boundary_id)

    def bits_per_byte(self, loss: float) -> float | None:
        """Return a held-out loss, nats per token, in bits per byte of text.

        None for masked tokens, where the tokenizer does not say how many bytes an id stands for, and without text.
        """
        sizes = self.tokenizer.byte_counts() if self.model.kind == "gpt" else None
        counts = self.held_out_counts
        held_out_bytes = 0 if sizes is None else int(sizes[: counts.size] @ counts)
        return loss / math.log(2) * int(counts.sum()) / held_out_bytes if held_out_bytes else None

    def to_devices(self, batch: Batch) -> Batch:
        """Return global arrays [Nm, rows, Sq] from this process' rows [Nm, b, Sq] of each."""
        shape = (len(batch.inputs), self.rows, self.sequence_length)
        place = functools.partial(jax.make_array_from_process_local_data, self.sharding, global_shape=shape)
        return jax.tree.map(place, batch)
