"""Loss and gradients of the real model, on one device with the parameters of a run folder, against golden ones."""

import dataclasses
import json

import jax
import numpy as np
from huggingface.random_models import places_of

from moe_jax.inference.conversion import file_shapes
from moe_jax.models import Batch, LanguageModel, make_loss
from moe_jax.moe.routing import even_tables
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.training.checkpoint import Checkpointer


def loss_and_gradients(run, folder, tokens):
    """Return (float, {name of our leaf as in the file: array in the file's shape}), computed in float32.

    Args:
      run: the config of the run folder `folder`; tokens: int [B, Sq + 1].
    """
    config = dataclasses.replace(run.model, dtype="float32", attention="xla")
    moe = dataclasses.replace(run.moe, aux_loss_weight=0.0)
    roles = build_mesh(MeshConfig(), jax.devices()[:1])
    model = LanguageModel(config=config, moe=moe, vocab_size=config.vocab_size, roles=roles)
    arrays, params = Checkpointer(folder / "checkpoints", keep=1).read_arrays(0), {}
    for name, array in arrays.items():
        *keys, last = name.split("/")[1:]
        place = params
        for key in keys:
            place = place.setdefault(key, {})
        # on one device the bank's rows are [L E, ...]
        place[last] = array.reshape(-1, *array.shape[2:]) if keys[0] == "bank" else array
    tables = {s.name: even_tables(s.config.moe_layers, s.moe.num_experts, 1) for s in model.expert_segments}
    tokens = np.asarray(tokens, np.int32)
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    loss = make_loss(model, model.layout(), rows, length)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.ones((rows, length), np.float32))
    rest = tables, None, np.int32(0), np.float32(rows * length)
    value, grads = jax.jit(jax.value_and_grad(lambda *a: loss(*a)[0]))(params, batch, *rest)
    found = {}
    for path, leaf in jax.tree.leaves_with_path(grads):
        name = "/".join(("params", *(entry.key for entry in path)))
        found[name] = np.asarray(leaf).reshape(arrays[name].shape)
    assert {name: leaf.shape for name, leaf in found.items()} == file_shapes(config, moe)
    return float(value), found


def compare_with(golden, run, folder, source):
    """Return how far the loss and, relative to its norm, the worst gradient of a run folder are from golden ones.

    Args:
      golden: {'tokens', 'loss', 'gradient NAME'}, NAME as in the files of the folder `source`.
    """
    loss, grads = loss_and_gradients(run, folder, golden["tokens"])
    worst = 0.0
    for place in places_of(json.loads((source / "config.json").read_text())):
        got, want = place.to_tensor(grads[place.leaf][place.index]), golden[f"gradient {place.name}"]
        norm = np.linalg.norm(want)
        if norm == 0:
            assert not np.any(got), place.name
            continue
        error = np.linalg.norm(got - want) / norm
        assert error < 1e-5, (place.name, error)
        worst = max(worst, error)
    assert abs(loss - golden["loss"]) < 1e-6
    return worst
