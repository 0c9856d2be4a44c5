"""A student that learns from a frozen teacher: the distance of their next-token probabilities, a chunk at a time.

Inputs: final activations of the student [t, M] and of the teacher [t, M'], their output tables [V, M] and [V, M'],
targets and weights [t]. Outputs: the weighted sums of the cross-entropy and of KL(teacher || student), in at least
float32; the caller divides by the global number of target tokens. Both logits of a chunk are formed in the same pass,
so neither is ever in memory as [t, V]. Temperature 1. Source: DeepSpeed-MoE (Rajbhandari et al. 2022), on its mixture
of students: the divergence of the two predictions, times alpha, is added to the student's own loss.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.collectives.varying import cast_varying, match_varying, varying_axes
from moe_jax.models.cross_entropy import in_chunks, token_losses
from moe_jax.models.language_model import LanguageModel, Layout
from moe_jax.models.param_dtype_gradients import in_dtype, project


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """A frozen model that a student learns from; its parameters are an input of the step.

    Attributes:
      model: on the student's mesh, with the student's vocabulary.
      layout: where its parameters lie.
      alpha: weight of the divergence beside the cross-entropy.
    """

    model: LanguageModel
    layout: Layout
    alpha: float

    @property
    def home(self) -> np.ndarray:
        """int32 [L, E], home device of every expert of the teacher; its experts stay where they are."""
        devices, experts = self.model.roles.size(self.model.roles.expert), self.model.moe.num_experts
        even = np.repeat(np.arange(devices, dtype=np.int32), experts // devices)
        return np.tile(even, (self.model.config.moe_layers, 1))

    def shardings(self) -> dict:
        """Return where every leaf of the parameters lies, as NamedShardings."""
        mesh = self.model.roles.mesh
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.layout.params, is_leaf=is_spec)

    def stored_params(self) -> dict:
        """Return the parameters as they stand in a checkpoint, as ShapeDtypeStructs with shardings."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.model.shapes(),
            self.shardings(),
        )

    def held_params(self) -> dict:
        """Return the parameters as a step takes them: the bank in the compute dtype, since nobody updates it."""
        stored = self.stored_params()
        dtype = jnp.dtype(self.model.config.dtype)
        return {**stored, "bank": {name: leaf.update(dtype=dtype) for name, leaf in stored["bank"].items()}}


def divergence(teacher_logits, logits):
    """Return KL(teacher || student) [n] in nats, sum_v p (log p - log q), of logits [n, V] of teacher and student.

    The gradient goes to the student's logits alone: q - p.
    """
    teacher = jax.nn.log_softmax(lax.stop_gradient(teacher_logits), axis=-1)
    return jnp.sum(jnp.exp(teacher) * (teacher - jax.nn.log_softmax(logits, axis=-1)), axis=-1)


def chunked_distillation(x, table, teacher_x, teacher_table, targets, weights, chunk: int):
    """Return (sum_i weights_i CE_i, sum_i weights_i KL_i), with at most `chunk` rows of each logits in memory.

    Args:
      x: [t, M]; table: [V, M], as `chunked_cross_entropy` takes them.
      teacher_x: [t, M'] of the same tokens; teacher_table: [V, M']. Neither gets a gradient.
      targets: int32 [t]; weights: float [t], 0 where a token is no target.
      chunk: tokens per chunk; the last chunk is padded with weight 0.
    """
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    held = in_dtype(table, x.dtype)
    teacher_x, teacher_table = lax.stop_gradient((teacher_x, teacher_table))
    teacher_held = in_dtype(teacher_table, teacher_x.dtype).held
    if held.grad_sink is not None:  # else the table's gradient would be summed over devices inside the loop
        x, held = match_varying(x, held)

    @jax.checkpoint  # the backward computes a chunk's logits again, so that none are kept
    def piece(totals, rows):
        x, teacher_x, targets, weights = rows
        logits = project("tm,vm->tv", x, held, out=acc_dtype)
        losses, _ = token_losses(logits, targets)
        teacher_logits = jnp.einsum("tm,vm->tv", teacher_x, teacher_held, preferred_element_type=acc_dtype)
        counted = weights.astype(acc_dtype)
        by_token = losses, divergence(teacher_logits, logits)
        return tuple(total + jnp.sum(each * counted) for total, each in zip(totals, by_token, strict=True)), None

    axes = varying_axes(x, table, teacher_x, teacher_table, targets, weights)
    zero = cast_varying(jnp.zeros((), acc_dtype), axes)
    return lax.scan(piece, (zero, zero), in_chunks(chunk, x, teacher_x, targets, weights))[0]
