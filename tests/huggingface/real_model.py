"""The real model on one device with the parameters of a run folder: logits, loss, gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moe_jax.inference.conversion import file_shapes
from moe_jax.models import Batch, LanguageModel, make_loss
from moe_jax.models.loss import _make_trunk
from moe_jax.moe.bank import with_grad_sink
from moe_jax.moe.routing import even_tables
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.training.checkpoint import Checkpointer


class RealModel:
    """A model and its parameters, computed in float32.

    Attributes:
      run: the config of the run folder.
    """

    def __init__(self, run, folder):
        self.run = run
        config = dataclasses.replace(run.model, dtype="float32", attention="xla")
        moe = dataclasses.replace(run.moe, aux_loss_weight=0.0)
        roles = build_mesh(MeshConfig(), jax.devices()[:1])
        self.model = LanguageModel(config=config, moe=moe, vocab_size=config.vocab_size, roles=roles)
        self.layout = self.model.layout()
        arrays = Checkpointer(folder / "checkpoints", keep=1).read_arrays(0)
        self.params = jax.tree.map(np.asarray, _as_tree(arrays))

    def _tables(self):
        return {
            segment.name: even_tables(segment.config.moe_layers, segment.moe.num_experts, 1)
            for segment in self.model.expert_segments
        }

    def logits(self, tokens):
        """Return float32 [B, Sq, V] of int [B, Sq]."""
        rows, length = tokens.shape
        layout = self.layout
        trunk = _make_trunk(self.model, layout, rows, length, None)

        def body(dense, bank, grad_sink, inputs, tables, first_row):
            batch = Batch(inputs, None, None)
            x, table, _ = trunk((dense, bank, grad_sink), batch, tables, None, first_row)
            return jnp.concatenate(x) @ table.T

        specs = (
            layout.params["dense"], layout.params["bank"], layout.grad_sink, P(), self.model.tables_specs, P(),
        )  # fmt: skip
        mesh = self.model.roles.mesh
        sharded = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
        bank, grad_sink = with_grad_sink(self.params["bank"])
        rest = (self._tables(), np.int32(0))

        found = sharded(self.params["dense"], bank, grad_sink, np.asarray(tokens, np.int32), *rest)
        return np.asarray(found).reshape(rows, length, -1)

    def loss_and_gradients(self, tokens):
        """Return (float, {name of our leaf as in the file: array in the file's shape})."""
        tokens = np.asarray(tokens, np.int32)
        rows, length = tokens.shape[0], tokens.shape[1] - 1
        loss = make_loss(self.model, self.layout, rows, length)
        batch = Batch(tokens[:, :-1], tokens[:, 1:], np.ones((rows, length), np.float32))
        value, grads = jax.jit(jax.value_and_grad(lambda *a: loss(*a)[0]))(
            self.params, batch, self._tables(), None, np.int32(0), np.float32(rows * length)
        )
        flat = _flat(grads)
        shapes = file_shapes(self.model.config, self.model.moe)
        return float(value), {name: np.asarray(flat[name]).reshape(shape) for name, shape in shapes.items()}


def _as_tree(arrays):
    """Return {'dense', 'bank'} from {name: array}; on one device the bank's rows are [L E, ...]."""
    tree = {}
    for name, array in arrays.items():
        *keys, last = name.split("/")[1:]
        place = tree
        for key in keys:
            place = place.setdefault(key, {})
        place[last] = array.reshape(-1, *array.shape[2:]) if keys[0] == "bank" else array
    return tree


def _flat(tree, prefix="params"):
    found = {}
    for key, value in tree.items():
        name = f"{prefix}/{key}"
        found |= _flat(value, name) if isinstance(value, dict) else {name: value}
    return found
