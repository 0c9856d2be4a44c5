"""How far a bfloat16 run's gradients are from a float32 run's, leaf by leaf, and what of it rounding allows.

    python scripts/checks/precision_report.py --out=after.json
    python scripts/checks/precision_report.py --out=now.json --before=before.json

One step of the demo's model (configs/run/demo.gin) from one start and one batch, on 8 CPU devices, three times: in
float32, in bfloat16, and as `rounded`: one device in float64 that rounds forward and backward values to bfloat16 where
the model casts them, and sums everything in float64. An error is |difference| / |float32 gradient| in the Euclidean
norm of a leaf, or of a row of the embedding. Its floor is what `rounded` has; what is clearly above is made by sums.
Where the gate is close, rounding changes a choice of experts, in both; so ratios a little off 1 mean nothing.
Rows of the embedding stand by how often their token occurs; a row that does not occur has gradients of the head alone.

Prints Markdown; the last line is one JSON object. `--before` puts the errors of an earlier run beside these.
"""

from __future__ import annotations

import functools
import json
import pathlib
import subprocess
import sys

from absl import app, flags

_GIN = flags.DEFINE_string("gin_file", "configs/run/demo.gin", "The run.")
_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "More gin bindings.")
_CHUNK = flags.DEFINE_integer("loss_chunk", 32, "Tokens of a chunk of the head: 16 chunks of a device's 512 tokens.")
_OUT = flags.DEFINE_string("out", "", "JSON file to write.")
_BEFORE = flags.DEFINE_string("before", "", "JSON file of an earlier run.")
CLASSES = ((0, 0), (1, 9), (10, 99), (100, 499), (500, 1 << 30))


def text_batch(rows: int, length: int):
    """Return int32 [rows, length + 1], bytes of Python's own sources."""
    import os

    import numpy as np

    folder = pathlib.Path(os.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])
    starts = np.linspace(0, len(text) - length - 1, rows).astype(int)
    return np.stack([np.frombuffer(text, np.uint8, length + 1, start) for start in starts]).astype(np.int32)


def model_gradients(config, dtype: str, batch, params=None):
    """Return (parameters, gradients) of the real model on all devices, as NumPy."""
    import dataclasses

    import jax
    import numpy as np

    from moe_jax.data import build_tokenizer
    from moe_jax.models import LanguageModel, make_loss
    from moe_jax.moe.tables import even_tables
    from moe_jax.parallel.mesh import build_mesh
    from moe_jax.training.feed import padded_vocabulary

    roles = build_mesh(config.mesh, jax.devices())
    changed = dataclasses.replace(config.model, dtype=dtype, loss_chunk=_CHUNK.value)
    vocabulary = padded_vocabulary(build_tokenizer(config.data), changed)
    model = LanguageModel(
        config=changed, moe=config.moe, vocab_size=vocabulary, roles=roles, zero_stage=config.train.zero_stage
    )
    layout = model.layout()
    place = functools.partial(
        jax.tree.map, lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(roles.mesh, spec))
    )
    params = jax.jit(model.init)(jax.random.key(config.train.seed)) if params is None else params
    loss = make_loss(model, layout, *batch.inputs.shape)
    tables = even_tables(changed.moe_layers, config.moe.num_experts, roles.size(roles.expert))
    step = jax.jit(jax.grad(loss, has_aux=True))
    total = np.float32(batch.weights.sum())
    grads, _ = step(place(params, layout.params), batch, tables, jax.random.key(0), np.int32(0), total)
    return jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, grads)


def rounding():
    """Return (both, forward): functions that round to bfloat16 both ways, or on the way forward alone."""
    import jax
    import jax.numpy as jnp

    def to_bfloat16(x):
        return x.astype(jnp.bfloat16).astype(x.dtype)

    both = jax.custom_vjp(to_bfloat16)
    both.defvjp(lambda x: (to_bfloat16(x), None), lambda _, d: (to_bfloat16(d),))
    forward = jax.custom_vjp(to_bfloat16)
    forward.defvjp(lambda x: (to_bfloat16(x), None), lambda _, d: (d,))
    return both, forward


def rounded_loss(params, batch, config):
    """Return the loss of the GPT model on one device, rounded where the bfloat16 model casts.

    Args:
      params: {'dense': as in the real model, 'bank': {name: [L, E, ...]}}, in float64.
    """
    import jax
    import jax.numpy as jnp

    from moe_jax.models.reference import normalize
    from moe_jax.moe.reference import reference_weights

    r, w = rounding()
    model, moe, dense = config.model, config.moe, params["dense"]
    length = batch.inputs.shape[1]
    x = r(dense["embedding"]["tokens"][batch.inputs] + dense["embedding"]["positions"][None, :length])
    gate_loss = 0.0
    causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
    for layer in range(model.moe_layers):
        unit = jax.tree.map(lambda leaf, at=layer: leaf[at], dense["units"])
        p, gate = unit["attention"], unit["gate"]
        qkv = r(jnp.einsum("bsm,mchd->cbshd", r(normalize(x, p["norm"], model)), w(p["qkv"])))
        q, k, v = r(qkv + w(p["qkv_bias"])[:, None, None])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * model.head_size**-0.5
        weights = r(jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), -1))
        mixed = r(jnp.einsum("bhqk,bkhd->bqhd", weights, v))
        x = r(x + r(r(jnp.einsum("bshd,hdm->bsm", mixed, w(p["out"]))) + w(p["out_bias"])[None, None]))
        h = r(normalize(x, gate["norm"], model)).reshape(-1, x.shape[-1])
        logits = h @ gate["w_gate"]
        probs = jax.nn.softmax(logits, -1)
        factor, chosen = reference_weights(probs, moe, 1)
        y = jnp.zeros_like(h)
        for e in range(moe.num_experts):
            hidden = r(jax.nn.gelu(r(h @ w(params["bank"]["w_in"][layer, e]))))
            y = y + factor[:, e : e + 1] * r(hidden @ w(params["bank"]["w_out"][layer, e]))
        x = r(x + r(y).reshape(x.shape))
        share = jnp.sum(chosen, axis=0) / (moe.top_k * h.shape[0])
        balance = moe.num_experts * jnp.sum(jax.lax.stop_gradient(share) * jnp.mean(probs, axis=0))
        z = jnp.mean(jax.scipy.special.logsumexp(logits, axis=1) ** 2)
        gate_loss = gate_loss + moe.aux_loss_weight * balance + moe.z_loss_weight * z
    x = r(normalize(x, dense["norm"], model))
    log_probs = jax.nn.log_softmax(x @ w(dense["embedding"]["tokens"]).T, -1)
    picked = jnp.take_along_axis(log_probs, batch.targets[..., None], -1)[..., 0]
    return -jnp.sum(picked * batch.weights) / jnp.sum(batch.weights) + gate_loss


def rounded_gradients(config, params, batch, devices: int):
    """Return the gradients of `rounded_loss` for the real model's parameters, in the real model's layout."""
    import jax
    import numpy as np

    layers, held = config.model.moe_layers, config.moe.num_experts // devices

    def by_layer(leaf):
        return np.swapaxes(leaf.reshape(devices, layers, held, *leaf.shape[1:]), 0, 1).reshape(
            layers, devices * held, *leaf.shape[1:]
        )

    def as_bank(leaf):
        return np.swapaxes(leaf.reshape(layers, devices, held, *leaf.shape[2:]), 0, 1).reshape(-1, *leaf.shape[2:])

    with jax.enable_x64(True):
        in_float64 = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        in_float64 = {
            "dense": in_float64["dense"],
            "bank": {name: by_layer(leaf) for name, leaf in in_float64["bank"].items()},
        }
        grads = jax.jit(jax.grad(functools.partial(rounded_loss, batch=batch, config=config)))(in_float64)
        grads = jax.tree.map(np.asarray, grads)
    return {"dense": grads["dense"], "bank": {name: as_bank(leaf) for name, leaf in grads["bank"].items()}}


def errors_of(got, want) -> dict[str, float]:
    """Return {leaf: |got - want| / |want|}."""
    import jax
    import numpy as np

    out = {}
    for (path, a), b in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        name = "/".join(str(entry.key) for entry in path)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        out[name] = float(np.linalg.norm(b - a) / np.linalg.norm(a))
    return out


def row_errors(got, want, counts) -> dict[str, list[float]]:
    """Return {rows' count: [rows, median error, worst error]} of the embedding's rows."""
    import numpy as np

    a, b = (np.asarray(tree["dense"]["embedding"]["tokens"], np.float64) for tree in (want, got))
    error = np.linalg.norm(b - a, axis=1) / np.maximum(np.linalg.norm(a, axis=1), 1e-30)
    out = {}
    for low, high in CLASSES:
        at = error[(counts >= low) & (counts <= high)]
        if at.size:
            name = str(low) if low == high else (f"{low}-{high}" if high < 1 << 30 else f"{low} and more")
            out[name] = [int(at.size), float(np.median(at)), float(at.max())]
    return out


def report(leaves, floor, rows, floor_rows, before) -> str:
    """Return the Markdown tables."""
    percent = "{:.2f}%".format
    head = ["leaf", *(["before"] if before else []), "bfloat16", "rounding alone", "ratio"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, error in leaves.items():
        cells = [name, *([percent(100 * before["leaves"][name])] if before else [])]
        cells += [percent(100 * error), percent(100 * floor[name]), f"{error / floor[name]:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    head = ["token occurs", "rows", *(["median before", "worst before"] if before else [])]
    head += ["median", "worst", "median, rounding alone", "worst, rounding alone"]
    lines += ["", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, (number, *error) in rows.items():
        cells = [name, str(number), *(map(percent, (100 * e for e in before["rows"][name][1:])) if before else ())]
        cells += map(percent, (100 * e for e in (*error, *floor_rows[name][1:])))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(_):
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    import numpy as np

    from moe_jax.config import parse_run_config
    from moe_jax.models import Batch

    config = parse_run_config([_GIN.value], _BINDINGS.value, [])[0]
    if config.model.document_mask:
        sys.exit(
            "ModelConfig.document_mask = True is not covered: the report is about whole sequences; set it to False"
        )
    tokens = text_batch(config.train.batch_size, config.data.sequence_length)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.ones(tokens[:, 1:].shape, np.float32))
    params, want = model_gradients(config, "float32", batch)
    _, got = model_gradients(config, "bfloat16", batch, params)
    floor = rounded_gradients(config, params, batch, 8)
    counts = np.bincount(tokens[:, :-1].ravel(), minlength=params["dense"]["embedding"]["tokens"].shape[0])
    leaves, floor_leaves = errors_of(got, want), errors_of(floor, want)
    rows, floor_rows = row_errors(got, want, counts), row_errors(floor, want, counts)
    before = json.loads(pathlib.Path(_BEFORE.value).read_text()) if _BEFORE.value else None
    print(report(leaves, floor_leaves, rows, floor_rows, before))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {"commit": commit, "jax": jax.__version__, "loss_chunk": _CHUNK.value, "leaves": leaves, "rows": rows}
    result |= {"rounding": floor_leaves, "rounding_rows": floor_rows}
    if _OUT.value:
        pathlib.Path(_OUT.value).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
