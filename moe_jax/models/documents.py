"""Documents packed into one sequence: who may attend to whom, and where each token is in its document.

Inputs: `Batch.documents`, int32 [b, Sq], equal exactly for tokens of one document, whose tokens are neighbours.
Outputs: a mask [b, 1, Sq, Sq], or positions [b, Sq]. Only attention mixes tokens, so a document of a packed sequence
gets the logits that it would have alone, as long as its tokens go to the same experts. They do in dropless layers;
routers that look at a whole batch, and capacities, see all documents of it.
Letters: docs/notation.md.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def same_document(documents):
    """Return bool [b, 1, Sq, Sq], True where query i and key j are of one document."""
    return documents[:, None, :, None] == documents[:, None, None, :]


def document_positions(documents):
    """Return int32 [b, Sq], the place of each token in its document, from 0 where it or the window begins."""
    index = jnp.broadcast_to(jnp.arange(documents.shape[1], dtype=jnp.int32), documents.shape)
    begins = jnp.concatenate([jnp.ones_like(documents[:, :1], bool), documents[:, 1:] != documents[:, :-1]], axis=1)
    return index - lax.cummax(jnp.where(begins, index, 0), axis=1)
