"""Packed documents on a mesh, next to each document alone: batches, and the logits that a mesh computes.

A window of LENGTH tokens holds whole documents, each with its end id, and perhaps a part of one at either end.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from support.equality_cases import BATCH, LENGTH, VOCAB

from moe_jax.data.stream import document_numbers, inside_documents
from moe_jax.models import Batch
from moe_jax.models.layer_loop import make_trunk
from moe_jax.models.loss import by_segment
from moe_jax.models.model_group import make_model_group
from moe_jax.moe.bank import with_grad_sink

END = VOCAB - 1
# of each window, the places of its end ids; one in the last place closes the last document, else the window cuts it
ENDS = [(2, 5), (7,), (), (0, 1, 2), (3,), (0, 7), (1, 4, 6), (6, 7)]


def packed_batch():
    """Return (Batch [B, Sq] with documents, one for each row of ENDS)."""
    tokens = np.random.default_rng(5).integers(0, END, (BATCH, LENGTH + 1)).astype(np.int32)
    for row, places in enumerate(ENDS):
        tokens[row, list(places)] = END
    weights = inside_documents(tokens, END).astype(np.float64)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, documents=document_numbers(tokens[:, :-1], END))


def alone(batch):
    """Return (Batch of one document a row, filled up behind it with weight 0; where each one's tokens were).

    The places are int [rows, 3]: row of the window, first token, one past the last.
    """
    places = []
    for row, numbers in enumerate(batch.documents):
        cuts = [0, *np.flatnonzero(np.diff(numbers)) + 1, LENGTH]
        places += [(row, first, last) for first, last in zip(cuts[:-1], cuts[1:], strict=True)]
    inputs, targets = np.zeros((2, len(places), LENGTH), np.int32)
    weights = np.zeros((len(places), LENGTH))
    for here, (row, first, last) in enumerate(places):
        for own, packed in ((inputs, batch.inputs), (targets, batch.targets), (weights, batch.weights)):
            own[here, : last - first] = packed[row, first:last]
    return Batch(inputs, targets, weights), np.array(places)


def make_mesh_logits(model, layout):
    """Return logits(params, batch) -> NumPy array [B, Sq, V] of the whole model, in the order of the batch."""
    roles = model.roles
    group = make_model_group(model.config, roles, BATCH, LENGTH)
    trunk = make_trunk(model, layout, BATCH, LENGTH, None)
    number = np.arange(BATCH * LENGTH, dtype=np.int32).reshape(BATCH, LENGTH)

    def body(dense, bank, grad_sink, inputs, documents, number, tables):
        batch = Batch(inputs, None, None, documents=documents)
        x, table, *_ = trunk((dense, bank, by_segment(model, grad_sink)), batch, tables, None, jnp.int32(0))
        x = jnp.concatenate(x)
        return x @ table.T.astype(x.dtype), group.own_flat(number)

    dense_rows, own = P(roles.dense), P(roles.dense + roles.model)
    specs = (layout.params["dense"], layout.params["bank"], layout.grad_sink, *[dense_rows] * 3, model.tables_specs)
    run = jax.jit(jax.shard_map(body, mesh=roles.mesh, in_specs=specs, out_specs=(own, own)))

    def logits(params, batch):
        bank = with_grad_sink(params["bank"])
        found, order = run(params["dense"], *bank, batch.inputs, batch.documents, number, model.even_tables())
        ordered = np.zeros(found.shape, np.asarray(found).dtype)
        ordered[np.asarray(order)] = found
        return ordered.reshape(BATCH, LENGTH, -1)

    return logits
