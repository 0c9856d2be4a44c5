"""The loss of one global microbatch on a mesh, as a function to be differentiated.

One `shard_map` encloses the whole stack, so every collective of forward and backward is explicit in the code; the
gradient is taken outside it.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.errors import UserError
from moe_jax.models.attention import check_document_mask, resolve_attention
from moe_jax.models.config import Segment
from moe_jax.models.language_model import Batch, LanguageModel, Layout, StepStats, own_layers, own_specs
from moe_jax.models.layer_loop import make_trunk
from moe_jax.models.model_group import make_model_group
from moe_jax.moe.bank import start_sums, with_grad_sink
from moe_jax.moe.passes import most_of_all
from moe_jax.moe.routers import PADDING, GateStats, build_router
from moe_jax.moe.schedule import MOST_ROWS
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.ordering import wait_for
from moe_jax.parallel.varying import cast_varying, match_varying, varying_axes
from moe_jax.planning.plan_shape import Shapes
from moe_jax.registry import ROUTERS


def check_step(model: LanguageModel, batch_size: int, length: int, microbatches: int = 1) -> None:
    """Raise the UserError that `make_loss` raises for the sizes of a step; arguments as there, attention resolved.

    Raises:
      UserError: as `make_model_group` and `check_document_mask`, where choices of a step cannot be counted, or padding
        meets a router that takes none.
    """
    uneven = make_model_group(model.config, model.roles, batch_size, length).padded
    for segment in model.expert_segments:
        if (uneven or model.padded) and not ROUTERS[segment.moe.router].takes_padding:
            why, change = "windows of conversations are filled up with it", "set DataConfig.kind = 'text'"
            if not model.padded:
                devices = model.roles.size(model.roles.dense)
                why = f"{devices} data-parallel devices cannot share {batch_size} sequences evenly"
                change = "change train.batch_size or train.grad_accum_steps"
            raise UserError(
                f"MoEConfig.router ({segment.moe.router!r}) takes no padding, and {why}; {change}, or choose another "
                "router"
            )
    check_document_mask(model.config, length)
    top_k = max(segment.moe.top_k for segment in model.expert_segments)
    choices = batch_size * microbatches * length * top_k
    if choices > MOST_ROWS:
        raise UserError(
            f"train.batch_size ({batch_size * microbatches}) x DataConfig.sequence_length ({length}) x MoEConfig.top_k "
            f"({top_k}) = {choices} choices of experts in a step must be at most {MOST_ROWS}, so that int32 can count "
            "them; lower one of the three"
        )


def make_loss(
    model: LanguageModel, layout: Layout, batch_size: int, length: int, *, microbatches: int = 1,
    plan: Shapes | None = None, teacher: LanguageModel | None = None,
) -> Callable:  # fmt: skip
    """Return the loss of one global microbatch as a function to be jitted and differentiated.

    Args:
      layout: where the parameters lie, from `model.layout()`. Gradients of `layout.own` are not summed over devices.
      batch_size: B, global sequences of a microbatch; where devices cannot share them evenly a `Batch` has more rows
        (`rows_of` of each device), of weight 0, which count nowhere; length: Sq.
      microbatches: number of them in one step; each one's gate losses are divided by it.
      plan: {segment: slots and buckets of the placements whose tables will come}; None is an even one without replicas.
      teacher: on the same mesh and of the same vocabulary, from which the model learns besides the text; or None.

    Returns:
      loss(params, batch: Batch, tables {segment: Tables}, key, first_row int32 [], normalizer float [], sums=None) ->
      (float [], StepStats). The first is the sum of the token losses over `normalizer` plus the weighted gate losses;
      `first_row` is the number of the microbatch's first sequence within the step, which keys the gates' noise; with
      key None they have none. With a teacher its parameters, where `teacher.layout()` says, are one more argument, and
      a token's loss is CE + alpha KL. With `sums`, a tree like the params, the gradient of bank and units is theirs
      and `sums` together: the backward adds each layer's in place.

    Raises:
      UserError: as `check_step`.
    """
    roles, device = model.roles, model.roles.mesh.devices.flat[0]
    config = resolve_attention(model.config, device)
    model = dataclasses.replace(model, config=config)
    if teacher is not None:
        taught = resolve_attention(teacher.config, device)
        check_document_mask(taught, length)
        teacher = dataclasses.replace(teacher, config=taught, padded=model.padded)
    check_step(model, batch_size, length, microbatches)
    rows = P(roles.dense)
    frozen_specs = ()
    if teacher is not None:
        frozen = teacher.layout()
        its_specs = frozen.params["dense"], frozen.params["bank"], by_segment(teacher, frozen.grad_sink)
        frozen_specs = its_specs, teacher.tables_specs
    whole = {field.name: P() for field in dataclasses.fields(StepStats)}
    loads = tuple(P(None, segment.roles(roles).expert) for segment in model.expert_segments)
    stats_specs = StepStats(**{**whole, "loads": loads, "choices": P(None, roles.dense + roles.model)})
    stack, specs = _make_stack(model, layout, batch_size, length, microbatches, plan, teacher), own_specs(layout, roles)

    def loss(params, batch, tables, key, first_row, normalizer, *teacher_params, sums=None):
        if not model.padded:
            batch = dataclasses.replace(batch, token_ids=None)
        if (batch.documents is not None) != config.document_mask:
            raise ValueError("Batch.documents are given exactly where ModelConfig.document_mask is set")
        params = model.scaled(params)
        dense, bank, units = params["dense"], params["bank"], None
        if sums is not None:  # gradients of units leave through their sinks alone
            units, dense = dense["units"], {**dense, "units": lax.stop_gradient(dense["units"])}
            sums = model.scaled(sums, inverse=True)
            sums = by_segment(model, sums.get("bank", {}), sums.get("dense", {}).get("units", {}))
        sinks = with_grad_sink(by_segment(model, model.trained(bank), units and model.trained(units)))[1]
        sink_specs = by_segment(model, layout.grad_sink, units and model.trained(specs["units"]))
        inputs = (dense, bank, sinks, sinks if sums is None else sums), batch, tables, key, first_row, normalizer
        sharded = jax.shard_map(
            stack,
            mesh=roles.mesh,
            in_specs=(
                (specs, layout.params["bank"], sink_specs, sink_specs), Batch(rows, rows, rows, rows, P(), rows, rows),
                model.tables_specs, P(), P(), P(), frozen_specs,
            ),
            out_specs=(P(), stats_specs),
        )  # fmt: skip
        frozen = ()
        if teacher is not None:
            (held,) = lax.stop_gradient(teacher_params)
            its_sinks = by_segment(teacher, with_grad_sink(held["bank"])[1])
            frozen = (held["dense"], held["bank"], its_sinks), teacher.even_tables()
        total, stats = sharded(*inputs, frozen)
        # [L, sources, E] of each segment; sources and experts that one lacks are 0
        sources, experts = (max(part.shape[dim] for part in stats.loads) for dim in (1, 2))
        widths = [((0, 0), (0, sources - own.shape[1]), (0, experts - own.shape[2])) for own in stats.loads]
        loads = [jnp.pad(own, width) for own, width in zip(stats.loads, widths, strict=True)]
        return total, dataclasses.replace(stats, loads=_all_layers(loads))

    return loss


def by_segment(model: LanguageModel, bank: dict, units: dict | None = None) -> dict:
    """Pair each segment's part of the bank (None: no experts) with that of its units (None: none are given)."""
    units = units if units is None else {s.name: units.get(s.name, {}) for s in model.segments}
    return {s.name: (bank.get(s.name, {} if s.has_experts else None), units and units[s.name]) for s in model.segments}


def _make_stack(
    model: LanguageModel, layout: Layout, batch_size: int, length: int, microbatches: int, plan,
    teacher: LanguageModel | None,
):  # fmt: skip
    """Return the body of the shard_map: all that one device computes on its sequences."""
    config, roles, global_tokens = model.config, model.roles, batch_size * length
    group = make_model_group(config, roles, batch_size, length)
    trunk = make_trunk(model, layout, batch_size, length, plan)
    if teacher is not None:
        if group.split and group.parts > 1:
            raise UserError(
                "ModelConfig.overlap ('halves') with ModelConfig.sequence_parallel orders tokens as the teacher does "
                "not; set ModelConfig.overlap = 'none'"
            )
        teacher_trunk = make_trunk(teacher, teacher.layout(), batch_size, length, None)

    def passes_of(found):
        return most_of_all(_all_layers([passes for _, passes in found.values()]), roles.all)

    of_units = model.trained(layout.own["units"])

    def of_device(dense, own=layout.own):
        return jax.tree.map(lambda leaf, own: leaf[0] if own else leaf, dense, own)

    def stack(weights, batch, tables, key, first_row, normalizer, frozen):
        dense, bank, *both = weights
        sinks, sums = (
            {name: (own, units and of_device(units, of_units[name])) for name, (own, units) in one.items()}
            for one in both
        )
        x, table, found, sinks = trunk((of_device(dense), bank, sinks), batch, tables, key, first_row)
        targets, counts = group.own_flat(batch.targets), group.own_flat(batch.weights)
        kl, teacher_passes, from_teacher = None, None, ()
        if teacher is None:
            x, targets, counts = _in_turn(x, targets, counts, chunk=config.loss_chunk)
        else:
            x, found, taught = _run_teacher(teacher_trunk, frozen, batch, first_row, x, found)
            x, targets, counts = (jnp.concatenate(x),), (targets,), (counts,)
            from_teacher, teacher_passes = (
                (teacher.alpha, (jnp.concatenate(taught[0]), taught[1])),
                passes_of(taught[2]),
            )
        with jax.named_scope("loss"):
            losses = chunked_cross_entropy(x, table, targets, counts, config.loss_chunk, *from_teacher)
        if teacher is None:
            token_loss = cross_entropy = lax.psum(losses[0], roles.all) / normalizer
        else:
            token_loss, cross_entropy, kl = (own / normalizer for own in lax.psum(losses, roles.all))
        tokens = global_tokens
        if model.padded:
            real = jnp.sum(batch.token_ids != PADDING, dtype=jnp.int32)
            tokens = jnp.maximum(lax.psum(real, roles.dense), 1)
        gate_losses = [_gate_losses(segment, own, batch.counted, roles, tokens) for segment, (own, _) in found.items()]
        aux, z, gates = zip(*gate_losses, strict=True)
        weighted = [
            jnp.sum(segment.moe.aux_loss_weight * own_aux + segment.moe.z_loss_weight * own_z)
            for segment, own_aux, own_z in zip(found, aux, z, strict=True)
        ]
        completed = [gate.completed for gate in gates]
        if any(part is not None for part in completed):  # only layers of the router `base` have a number
            completed = [jnp.zeros_like(gate.dropped) if gate.completed is None else gate.completed for gate in gates]
        stats = StepStats(
            cross_entropy=cross_entropy,
            aux_loss=jnp.mean(_all_layers(aux)),
            z_loss=jnp.mean(_all_layers(z)),
            loads=tuple(gate.counts[:, None] for gate in gates),
            gate_entropy=_all_layers([gate.entropy for gate in gates]) / tokens,
            dropped=_all_layers([gate.dropped for gate in gates]),
            passes=passes_of(found),
            kl=kl,
            completed=_all_layers(completed),
            choices=_all_layers([gate.choices for gate, _ in found.values()]),
            teacher_passes=teacher_passes,
        )
        total = token_loss + functools.reduce(jnp.add, weighted) / microbatches
        return start_sums(total, sinks, sums), stats

    return stack


def _run_teacher(trunk: Callable, frozen, batch: Batch, first_row, x, found: dict):
    """Run the teacher's trunk; return (x, found) of the student, which wait for it, and what the trunk returned.

    Nothing joins the two trunks but the loss: XLA:CPU would run their collectives side by side.

    Args:
      frozen: the teacher's (weights, tables); x, found: of the student's trunk.
    """
    with jax.named_scope("teacher"):
        weights = wait_for(frozen[0], (x, list(found.values())))
        taught = trunk(weights, dataclasses.replace(batch, choices=None), frozen[1], None, first_row)
        second = taught[0], list(taught[2].values())
        x = wait_for(x, second)
        return x, {segment: wait_for(both, second) for segment, both in found.items()}, taught


def _gate_losses(segment: Segment, own: GateStats, counted, roles: Roles, tokens: int):
    """Return (load-balancing losses [L], z-losses [L], GateStats of all tokens) of a segment.

    Args:
      own: of this device's tokens; counted: as in `Batch`; tokens: of the global microbatch, without padding, an int
        or int32 [].
    """
    sums = lax.psum(own.sums, roles.dense)
    inside = tuple(axis for axis in roles.all if axis not in segment.roles(roles).expert)
    counts = lax.psum(own.counts, inside) if inside else own.counts  # [L, E] of this source
    meant = lax.psum(own.counts, roles.all)
    if counted is not None:
        # as they would be if this microbatch's loads were those of the step up to it
        so_far = (meant + own_layers(counted, segment)).astype(jnp.float32)
        own_choices = jnp.sum(meant, axis=-1, keepdims=True).astype(jnp.float32)
        meant = so_far * (own_choices / jnp.sum(so_far, axis=-1, keepdims=True))
    aux = build_router(segment.moe).balance_loss(dataclasses.replace(sums, counts=meant), tokens)
    return aux, sums.squared_logsumexp / tokens, dataclasses.replace(sums, counts=counts)


def _all_layers(parts) -> jax.Array | None:
    """Return [L, ...] of all MoE layers from a list with that of each segment; None where there is none."""
    if parts[0] is None:
        return None
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _in_turn(x: tuple, *rows, chunk: int) -> Iterator[tuple]:
    """Yield the parts of x, then of each of `rows` [t], in the order in which the loss takes them.

    Of two halves that is the beginning of a, all of b, the rest of a: so b's last exchange of the forward and its first
    of the backward have some of the loss next to them. The beginning of a is whole chunks where a has two of them.
    """
    size = x[0].shape[0]
    begin = size // 2 // chunk * chunk or size // 2
    for parts in (x, *(jnp.split(array, len(x)) for array in rows)):
        if len(x) == 1 or begin == 0:
            yield tuple(parts)
        else:
            a, b = parts
            yield a[:begin], b, a[begin:]


# Cross-entropy of a large vocabulary, a chunk of tokens at a time, so that logits are never all in memory. Parts are
# computed in their order and need no other: the first while the second is awaited, and the gradient of the first can
# leave next to the second. Where the loss is differentiated its gradients are formed in the same pass, while the logits
# of a chunk are there: no logits are kept, and none are computed twice. Their derivatives are rounded to the compute
# dtype, like every operand of a matmul; sums over tokens and vocabulary are in at least float32.
# A student that learns from a frozen teacher: both logits of a chunk are formed in the same pass, so neither is ever in
# memory as [t, V]. Temperature 1. Source: DeepSpeed-MoE (Rajbhandari et al. 2022), on its mixture of students: the
# divergence of the two predictions, times alpha, is added to the student's own loss.
def chunked_cross_entropy(
    x: tuple, table, targets: tuple, weights: tuple, chunk: int, alpha: float = 0.0, teacher: tuple | None = None
):
    """Return (sum_i weights_i (CE_i + alpha KL_i), sum_i weights_i CE_i, sum_i weights_i KL_i).

    CE_i is -log q of the target, KL_i is KL(teacher || student) = sum_v p (log p - log q) in nats, 0 without a teacher.
    The sums are in at least float32. The gradient is of the first alone, and goes to x and the table.

    Args:
      x: parts [t_i, M].
      table: [V, M], read in the dtype of x; its gradient is summed over the chunks in at least float32.
      targets: parts int32 [t_i]; weights: parts float [t_i], 0 where a token is no target. Neither has a gradient.
      chunk: tokens per chunk, whose rows of each logits are in memory; the last of a part is padded with weight 0.
      teacher: (x [t, M'] of the same tokens, table [V, M']) where x is one part, or None.
    """
    if teacher is not None:
        teacher = teacher[0], teacher[1].astype(teacher[0].dtype)
    return _losses(chunk, alpha, *match_varying(x, table, targets, weights, teacher))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(chunk, alpha, x, table, targets, weights, teacher):
    return _losses_fwd(chunk, alpha, x, table, targets, weights, teacher)[0]


def _losses_fwd(chunk, alpha, x, table, targets, weights, teacher):
    """Return (the three sums of `chunked_cross_entropy`, (the gradients of the first by the parts of x and the table)).

    Without a teacher the last sum is 0.
    """
    sum_dtype = jnp.promote_types(x[0].dtype, jnp.float32)
    held = table.astype(x[0].dtype)

    def piece(carry, rows):
        sums, dtable = carry
        x, targets, weights, *taught = rows
        logits = jnp.einsum("tm,vm->tv", x, held, preferred_element_type=sum_dtype)
        # without the care of `logsumexp` for a token whose logits are all infinite
        largest = jnp.max(logits, axis=-1)
        log_z = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1))
        counted = weights.astype(sum_dtype)
        cross_entropy = log_z - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        is_target = targets[:, None] == jnp.arange(held.shape[0], dtype=targets.dtype)[None]
        log_q = logits - log_z[:, None]
        derivatives, by_token = jnp.exp(log_q) - is_target, [cross_entropy]
        if taught:
            taught = jnp.einsum("tm,vm->tv", *taught, teacher[1], preferred_element_type=sum_dtype)
            log_p = jax.nn.log_softmax(taught, axis=-1)
            by_token.append(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))
            derivatives += alpha * (jnp.exp(log_q) - jnp.exp(log_p))
        dlogits = (derivatives * counted[:, None]).astype(x.dtype)
        dx = jnp.einsum("tv,vm->tm", dlogits, held, preferred_element_type=sum_dtype).astype(x.dtype)
        dtable += jnp.einsum("tv,tm->vm", dlogits, x, preferred_element_type=dtable.dtype)
        return ([total + own * counted for total, own in zip(sums, by_token, strict=True)], dtable), dx

    number = 1 if teacher is None else 2
    dtable = jnp.zeros(held.shape, jnp.promote_types(table.dtype, sum_dtype))
    dtable, sums, dx = *cast_varying((dtable, [jnp.zeros((), sum_dtype)] * number), varying_axes(x)), []
    for rows in zip(x, targets, weights, *(() if teacher is None else (teacher[:1],)), strict=True):
        tokens, size = rows[0].shape[0], min(chunk, rows[0].shape[0])
        if pad := -tokens % size:  # with zeros, of weight 0
            rows = tuple(jnp.pad(array, ((0, pad), *((0, 0) for _ in array.shape[1:]))) for array in rows)
        chunks = tuple(array.reshape(-1, size, *array.shape[1:]) for array in rows)
        # summed over a chunk's tokens after the loop: in each of its turns that is two kernels more on a GPU
        by_place = cast_varying([jnp.zeros(size, sum_dtype)] * number, varying_axes(x))
        (by_place, dtable), of_x = lax.scan(piece, (by_place, dtable), chunks)
        sums = [total + jnp.sum(own) for total, own in zip(sums, by_place, strict=True)]
        dx.append(of_x.reshape(-1, of_x.shape[-1])[:tokens])
    cross_entropy, kl = sums[0], sums[1] if number == 2 else jnp.zeros_like(sums[0])
    return (cross_entropy + alpha * kl, cross_entropy, kl), (tuple(dx), dtable, table)


def _losses_bwd(chunk, alpha, residuals, d):
    (dx, dtable, table), d = residuals, d[0]
    return tuple((part * d).astype(part.dtype) for part in dx), (dtable * d).astype(table.dtype), None, None, None


_losses.defvjp(_losses_fwd, _losses_bwd)
