"""Hide tokens for a masked language model.

Inputs: tokens [b, Sq], the rows of one process. Outputs: inputs and targets [b, Sq] int32, weights [b, Sq] float32.
Whether a token is hidden depends on (seed, step, global row, column) alone, so the split of rows over hosts changes
nothing. Which rows a batch holds is decided elsewhere.

Letters: docs/notation.md.
"""

from collections.abc import Sequence

import numpy as np

from moe_jax.data.keyed_random import hash64, uniform

_PURPOSE = 2  # keeps these numbers apart from those of stream.py


def mask_tokens(
    tokens: np.ndarray,
    step: int,
    rows: int | np.ndarray,
    seed: int,
    vocab_size: int,
    mask_id: int,
    rate: float = 0.15,
    special_ids: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hide `rate` of the tokens: 80% become the mask, 10% a random token, and 10% stay as they are.

    Args:
      tokens: integers [b, Sq].
      step: the training step.
      rows: the global row of each, int [b]; or of tokens[0], where they follow one another.
      seed: `train.seed`.
      vocab_size: the tokenizer's, so that a random token is one of its tokens.
      mask_id: the tokenizer's.
      rate: the chance of each token to be hidden.
      special_ids: ids that are neither hidden nor drawn, such as the end of a document.

    Returns:
      inputs: int32 [b, Sq], tokens with some hidden.
      targets: int32 [b, Sq], the tokens as they were.
      weights: float32 [b, Sq], 1 where a token was chosen and the loss counts, else 0.

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018), section 3.1.
    """
    row = (rows + np.arange(len(tokens)) if isinstance(rows, int) else rows)[:, None]
    column = np.arange(tokens.shape[1])[None, :]
    special = np.unique([mask_id, *special_ids])

    chosen = (uniform(_PURPOSE, seed, step, 0, row, column) < rate) & ~np.isin(tokens, special)
    fate = uniform(_PURPOSE, seed, step, 1, row, column)
    drawn = (hash64(_PURPOSE, seed, step, 2, row, column) % np.uint64(vocab_size - special.size)).astype(np.int64)
    for skipped in special:  # ascending, so that each id that is not special is reached exactly once
        drawn += drawn >= skipped

    inputs = np.where(chosen & (fate < 0.8), mask_id, tokens)
    inputs = np.where(chosen & (fate >= 0.8) & (fate < 0.9), drawn, inputs)
    return inputs.astype(np.int32), tokens.astype(np.int32), chosen.astype(np.float32)
