"""The optimizer of a run, by name, from optax: clipping by the global norm, then what makes an update of a gradient.

Inputs: TrainConfig. Outputs: a `GradientTransformation` over parameters {'dense': ..., 'bank': ...}, and where the
leaves of its state lie. Gradients are global arrays, so norms are those of whole leaves however they are laid out.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from moe_jax.config.train_config import TrainConfig
from moe_jax.errors import UserError
from moe_jax.models.language_model import flatten
from moe_jax.models.transformer import matrix_dims


def build_learning_rate(config: TrainConfig) -> optax.Schedule:
    """Return the learning rate of update n (from 0).

    It rises linearly from peak / warmup at update 0 to the peak at update `warmup`. Then 'constant' stays at the peak;
    the others fall to final_learning_rate x peak at update `steps`: 'cosine' by half a cosine, 'linear' linearly. 'wsd'
    (warm-up, stable, decay) stays at the peak until update steps - decay and then falls linearly, or by '1-sqrt', where
    the share of the fall that is done after k of `decay` updates is sqrt(k / decay).

    Source: WSD from Hu et al., "MiniCPM" (2024), section 4; 1-sqrt from Haegele et al., "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations" (2024).
    """
    warmup = min(config.warmup_steps, max(config.steps - 1, 0))
    steps = max(config.steps, warmup + 1)
    peak, last = config.learning_rate, config.learning_rate * config.final_learning_rate
    if config.learning_rate_schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(peak / max(warmup, 1), peak, warmup, steps, end_value=last)
    if config.learning_rate_schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.learning_rate_schedule == "linear":
        after = optax.linear_schedule(peak, last, steps - warmup)
    else:
        decay = config.decays_over
        fall = optax.linear_schedule(peak, last, decay)
        after = optax.join_schedules([optax.constant_schedule(peak), fall], [steps - warmup - decay])
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup), after], [warmup])


MUON_RMS = 0.2  # of an update's entries, about AdamW's; so one learning rate serves both


def decays(path: tuple, leaf) -> bool:
    """Say whether weight decay applies to the leaf at this tree path: not to norms, biases, gates and learned mixes."""
    names = [entry.key for entry in path]
    return not (names[-1].endswith(("bias", "w_mix")) or "gate" in names or any("norm" in name for name in names))


def build_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return the optimizer of a run.

    Source: Muon from Jordan et al. (2024), each hidden matrix orthogonalised by itself and AdamW for all other leaves,
    with updates of the size of Liu et al., "Muon is Scalable for LLM Training" (2025), equation 4, so that one learning
    rate serves all leaves.

    Raises:
      UserError: the installed optax does not have it.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    rate, dtype = build_learning_rate(config), config.first_moment_dtype or None
    beta1, beta2, weight_decay = config.beta1, config.beta2, config.weight_decay

    by_path = functools.partial(functools.partial, jax.tree_util.tree_map_with_path)  # of a leaf -> of trees
    decay_mask = by_path(decays)
    try:
        if config.optimizer == "adamw":
            update = optax.adamw(
                rate, beta1, beta2, config.epsilon, mu_dtype=dtype, weight_decay=weight_decay, mask=decay_mask
            )
        else:
            numbers = by_path(lambda path, _: optax.contrib.MuonDimensionNumbers(*muon_dims(path)))
            muon = optax.contrib.scale_by_muon(
                beta=beta1, eps=config.epsilon, mu_dtype=dtype, weight_dimension_numbers=numbers
            )
            adam = optax.scale_by_adam(b1=beta1, b2=beta2, eps=config.epsilon, mu_dtype=dtype)
            labels = by_path(lambda path, _: "muon" if muon_dims(path) else "adam")
            resized = optax.stateless(by_path(_resized))
            scale = optax.partition({"muon": optax.chain(muon, resized), "adam": adam}, labels)
            decay = optax.add_decayed_weights(weight_decay, decay_mask)  # by the learning rate, as AdamW's is
            update = optax.chain(scale, decay, optax.scale_by_learning_rate(rate))
        return optax.chain(clip, update)
    except AttributeError as error:
        raise UserError(
            f"train.optimizer ({config.optimizer!r}) needs what optax {importlib.metadata.version('optax')} lacks "
            f"({error}); install optax 0.2.8 or newer, or choose another optimizer"
        ) from error


def _resized(path: tuple, update, _param):
    """Return Muon's update with entries of MUON_RMS in root mean square."""
    fans = [math.prod(update.shape[dim] for dim in dims) for dims in muon_dims(path)]
    return MUON_RMS * math.sqrt(max(fans)) * update


def muon_dims(path: tuple) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the dims (in, out) of the matrices stacked in the leaf at this tree path, None where Muon does not apply.

    Hidden matrices only (`matrix_dims`), of experts [D Rb, in, out] and of units [U, ...]: not embeddings, norms,
    biases, gates and adapters.
    """
    names = [entry.key for entry in path]
    if names[0] != "bank" and (names[1] != "units" or "norm" in names or "gate" in names):
        return None
    dims = matrix_dims(names[-1])
    return dims and tuple(tuple(dim + 1 for dim in side) for side in dims)


def state_specs(opt_state, shapes, specs):
    """Return the PartitionSpec of every leaf of an optimizer's state: one shaped like its parameter lies as moments do.

    The rest, small, is whole on every device.

    Args:
      opt_state, shapes: pytrees with shapes, of the state and of the parameters.
      specs: matching `shapes`: PartitionSpec of the parameters' moments.
    """
    moments = {
        (name, shape.shape): spec
        for (name, shape), spec in zip(flatten(shapes).items(), jax.tree.leaves(specs), strict=True)
    }
    leaves = []
    for name, leaf in flatten(opt_state).items():  # a name ends in its parameter's
        keys = name.split("/")
        ends = (("/".join(keys[at:]), leaf.shape) for at in range(len(keys)))
        leaves.append(next((moments[end] for end in ends if end in moments), P()))
    return jax.tree.unflatten(jax.tree.structure(opt_state), leaves)


def state_bytes(config: TrainConfig, shapes, specs, sizes: dict[str, int]) -> int:
    """Return the bytes of the optimizer's state on one device; nothing is computed.

    Args:
      shapes: the parameters as ShapeDtypeStructs; specs: matching PartitionSpecs of moments.
      sizes: {mesh axis: size}.
    """
    with jax.enable_x64(any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(shapes))):
        opt_state = jax.eval_shape(build_optimizer(config).init, shapes)
    total = 0
    for leaf, spec in zip(
        jax.tree.leaves(opt_state), jax.tree.leaves(state_specs(opt_state, shapes, specs)), strict=True
    ):
        axes = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
        total += leaf.size * jnp.dtype(leaf.dtype).itemsize // math.prod(sizes[axis] for axis in axes)
    return total
