"""The optimizer of a run, by name, from optax: clipping by the global norm, then what makes an update of a gradient.

Inputs: TrainConfig. Outputs: a `GradientTransformation` over parameters {'dense': ..., 'bank': ...}, and where the
leaves of its state lie. Gradients are global arrays, so norms are those of whole leaves however they are laid out. An
expert's matrix is a parameter of its own: nothing is ever summed over the rows of the bank, whose order follows the
experts' homes, or over the layers, by which the units are stacked.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from moe_jax.config.train_config import TrainConfig
from moe_jax.errors import UserError
from moe_jax.training.learning_rate import build_learning_rate
from moe_jax.training.per_matrix import per_matrix

MUON_RMS = 0.2  # of an update's entries, about AdamW's; so one learning rate serves both


def finished_updates(opt_state):
    """Return int32 [], the updates that an optimizer's state has seen: the step that its learning rate is taken at."""
    is_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
    return next(node.count for node in jax.tree.leaves(opt_state, is_leaf=is_schedule) if is_schedule(node))


def decays(path: tuple, leaf) -> bool:
    """Say whether weight decay applies to the leaf at this tree path: not to norms, biases and gates."""
    names = [entry.key for entry in path]
    return not (names[-1].endswith("bias") or "gate" in names or any("norm" in name for name in names))


def _decay_mask(params):
    return jax.tree_util.tree_map_with_path(decays, params)


def build_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return the optimizer of a run.

    Raises:
      UserError: the installed optax does not have it.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    try:
        return optax.chain(clip, _BUILDERS[config.optimizer](config))
    except AttributeError as error:
        raise UserError(
            f"train.optimizer ({config.optimizer!r}) needs what optax {importlib.metadata.version('optax')} lacks "
            f"({error}); install optax 0.2.8 or newer, or choose another optimizer"
        ) from error


def _adamw(config: TrainConfig) -> optax.GradientTransformation:
    return optax.adamw(
        build_learning_rate(config),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        mu_dtype=config.first_moment_dtype or None,
        weight_decay=config.weight_decay,
        mask=_decay_mask,
    )


def _lion(config: TrainConfig) -> optax.GradientTransformation:
    """Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2."""
    return optax.lion(
        build_learning_rate(config),
        b1=config.beta1,
        b2=config.beta2,
        mu_dtype=config.first_moment_dtype or None,
        weight_decay=config.weight_decay,
        mask=_decay_mask,
    )


def _scaled(config: TrainConfig, *scale: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the updates that `scale` makes, with decoupled weight decay, times the learning rate."""
    decay = optax.add_decayed_weights(config.weight_decay, _decay_mask)
    return optax.chain(*scale, decay, optax.scale_by_learning_rate(build_learning_rate(config)))


def _adafactor(config: TrainConfig) -> optax.GradientTransformation:
    """Return Adafactor without momentum; the learning rate is relative to the size of each matrix.

    Each expert's and each layer's matrix has its own factors and sizes. Weight decay is decoupled as AdamW's is, by the
    learning rate; that of `optax.adafactor` is not multiplied by it.
    Source: Shazeer, Stern, "Adafactor" (2018), algorithms 4 and 5.
    """
    one_matrix = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=config.min_dim_size_to_factor),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    return _scaled(config, per_matrix(one_matrix))


def _muon(config: TrainConfig) -> optax.GradientTransformation:
    """Return Muon for hidden matrices, each orthogonalised by itself, and AdamW's update for all other leaves.

    Source: Jordan et al., "Muon" (2024); the size of the update from Liu et al., "Muon is Scalable for LLM Training"
    (2025), equation 4, so that one learning rate serves all leaves.
    """
    contrib = optax.contrib

    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if muon_dims(path) else "adam", params)

    def numbers(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: contrib.MuonDimensionNumbers(*muon_dims(path)), params)

    def resize(updates, params=None):
        def one(path, update):
            fans = [math.prod(update.shape[dim] for dim in dims) for dims in muon_dims(path)]
            return MUON_RMS * math.sqrt(max(fans)) * update

        return jax.tree_util.tree_map_with_path(one, updates)

    dtype = config.first_moment_dtype or None
    muon = contrib.scale_by_muon(
        beta=config.beta1, eps=config.epsilon, mu_dtype=dtype, weight_dimension_numbers=numbers
    )
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon, mu_dtype=dtype)
    parts = {"muon": optax.chain(muon, optax.stateless(resize)), "adam": adam}
    return _scaled(config, optax.partition(parts, labels))


def muon_dims(path: tuple) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the dims (in, out) of the matrices stacked in the leaf at this tree path, None where Muon does not apply.

    Hidden matrices only: experts [D Rb, in, out]; of the units attention's qkv [U, M, 3, H, Dh], three matrices [M, H
    Dh] (or q [U, M, H, Dh] and kv [U, M, 2, Hkv, Dh]), its out [U, H, Dh, M], and dense FFNs [U, in, out]. Not
    embeddings, norms, biases and gates.
    """
    names = [entry.key for entry in path]
    if names[0] == "bank":
        return (1,), (2,)
    if names[1] != "units" or "norm" in names or "gate" in names:
        return None
    of_attention = {"qkv": ((1,), (3, 4)), "kv": ((1,), (3, 4)), "q": ((1,), (2, 3)), "out": ((1, 2), (3,))}
    return of_attention.get(names[-1], ((1,), (2,)) if names[-1] in ("w_in", "w_gate", "w_out") else None)


_BUILDERS: dict[str, Callable[[TrainConfig], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "muon": _muon,
    "lion": _lion,
}


def state_specs(opt_state, shapes, specs):
    """Return the PartitionSpec of every leaf of an optimizer's state.

    A leaf shaped like its parameter lies as moments do; any other that belongs to the bank (factored moments) is split
    over the bank's rows alone, and the rest, small, is whole on every device.

    Args:
      opt_state: pytree with shapes, from `jax.eval_shape(optimizer.init, shapes)`.
      shapes: the parameters, pytree with shapes.
      specs: matching pytree of PartitionSpec, of moments.
    """
    is_spec = lambda node: isinstance(node, P)  # noqa: E731
    known = {
        _keys(path): (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree.leaves_with_path(shapes), jax.tree.leaves(specs, is_leaf=is_spec), strict=True
        )
    }

    def one(path, leaf):
        keys = _keys(path)
        own = next((keys[start:] for start in range(len(keys)) if keys[start:] in known), None)
        if own is None:
            return P()
        shape, spec = known[own]
        if leaf.shape == shape:
            return spec
        return P(spec[0], *[None] * (leaf.ndim - 1)) if own[0] == "bank" else P()

    return jax.tree_util.tree_map_with_path(one, opt_state)


def state_bytes(config: TrainConfig, shapes, specs, sizes: dict[str, int]) -> int:
    """Return the bytes of the optimizer's state on one device; nothing is computed.

    Args:
      shapes: the parameters as ShapeDtypeStructs; specs: matching PartitionSpecs of moments.
      sizes: {mesh axis: size}.
    """
    opt_state = jax.eval_shape(build_optimizer(config).init, shapes)
    laid = state_specs(opt_state, shapes, specs)
    is_spec = lambda node: isinstance(node, P)  # noqa: E731
    total = 0
    for leaf, spec in zip(jax.tree.leaves(opt_state), jax.tree.leaves(laid, is_leaf=is_spec), strict=True):
        axes = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
        total += leaf.size * jnp.dtype(leaf.dtype).itemsize // math.prod(sizes[axis] for axis in axes)
    return total


def _keys(path: tuple) -> tuple[str, ...]:
    """Return a tree path as text, whatever it goes through."""
    return tuple(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path)
