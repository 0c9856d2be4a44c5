"""The loss of one global microbatch on a mesh, as a function to be differentiated.

Inputs: parameters {'dense': ..., 'bank': ...}, a batch of token ids, and the plan's tables. Outputs: the global loss
and `StepStats`. One `shard_map` encloses the whole stack, so every collective of forward and backward is explicit in
the code; the gradient is taken outside it. The loop over layers is a scan over units, and the bank enters it as a
constant.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.collectives.gather import gather_tree
from moe_jax.collectives.varying import cast_varying
from moe_jax.dispatch import even_tables, local
from moe_jax.errors import UserError
from moe_jax.mesh.roles import Roles
from moe_jax.models.attention import check_document_mask, resolve_attention
from moe_jax.models.cross_entropy import chunked_cross_entropy
from moe_jax.models.distillation import Teacher, chunked_distillation
from moe_jax.models.documents import document_positions
from moe_jax.models.language_model import Batch, LanguageModel, Layout, StepStats, by_layer
from moe_jax.models.layer_loop import make_layers
from moe_jax.models.model_group import ModelGroup, check_sequence_parallel, make_model_group
from moe_jax.models.own_gradients import own_leaves, own_specs
from moe_jax.models.segments import Segment, joined, own_layers
from moe_jax.models.transformer import Transformer
from moe_jax.moe.bank import open_grad_sink, with_grad_sink
from moe_jax.placement import PlanShape
from moe_jax.routers import GateStats, build_router, counts_so_far, z_loss
from moe_jax.schedules.contract import MOST_ROWS
from moe_jax.schedules.passes import most_of_all


def make_loss(
    model: LanguageModel, layout: Layout, batch_size: int, length: int, *, training: bool = True, microbatches: int = 1,
    plan: PlanShape | dict[str, PlanShape] | None = None, teacher: Teacher | None = None, apart: str = "none",
) -> Callable:  # fmt: skip
    """Return the loss of one global microbatch as a function to be jitted and differentiated.

    Args:
      model: what to compute.
      layout: where the parameters lie, from `model.layout()`.
      batch_size: B, global sequences of a microbatch.
      length: Sq.
      training: with gate noise, if the gate has any.
      microbatches: number of them in one step; each one's gate losses are divided by it.
      plan: slots and buckets of the placements whose tables will come; None is an even one without replicas. Of several
        segments with experts {segment: that}, and so are the tables.
      teacher: what the model learns from beside the text, None for the text alone.
      apart: which `params` have a copy on each device, as `own_gradients.with_own_leaves` returns them: their gradients
        are not summed over devices.

    Returns:
      loss(params, batch: Batch, tables: Tables, key, first_row int32 [], normalizer float []) ->
      (float [], StepStats). The first is the sum of the token losses over `normalizer` plus the weighted gate losses;
      `first_row` is the number of the microbatch's first sequence within the step, which keys the noise. With a teacher
      its parameters, laid out as `teacher.layout` says, are one more argument, and a token's loss is CE + alpha KL.

    Raises:
      UserError: if the batch does not divide over the data-parallel devices, or is longer than the positions.
    """
    roles = model.roles
    model = _resolved(model)
    config = model.config
    if teacher is not None:
        teacher = dataclasses.replace(teacher, model=_resolved(teacher.model))
        check_document_mask(teacher.model.config, length)
    shards = roles.size(roles.dense)
    if batch_size % shards:
        raise UserError(
            f"train.batch_size per accumulation step ({batch_size}) must be divisible by the {shards} data-parallel "
            f"devices; set it to a multiple of {shards}"
        )
    if config.positions == "learned" and length > config.max_length:
        raise UserError(
            f"DataConfig.sequence_length ({length}) must not exceed ModelConfig.max_length ({config.max_length}); "
            "raise ModelConfig.max_length or set ModelConfig.positions = 'rotary'"
        )
    check_document_mask(config, length)
    check_sequence_parallel(config.sequence_parallel, length, roles)
    check_token_numbers(batch_size, microbatches, length, max(part.moe.top_k for part in model.expert_segments))
    stack = _make_stack(model, layout, batch_size // shards, length, training, microbatches, plan, teacher)
    dense_in = own_specs(layout, roles, apart)
    rows = P(roles.dense)
    frozen_specs = () if teacher is None else _frozen_specs(teacher)
    loads_specs = tuple(P(None, model.roles_of(segment).expert) for segment in model.expert_segments)
    stats_specs = StepStats(
        P(), P(), P(), loads_specs, P(), P(), P(), P(), P(), P(), P(None, roles.dense + roles.model), P()
    )

    def on_own_leaves(dense, *inputs):
        return stack(own_leaves(dense, layout, roles, apart), *inputs)

    sharded = jax.shard_map(
        stack if apart == "none" else on_own_leaves,
        mesh=roles.mesh,
        in_specs=(
            dense_in, layout.params["bank"], layout.grad_sink, Batch(rows, rows, rows, rows, P(), rows),
            _tables_specs(model), P(), P(), P(), *frozen_specs,
        ),
        out_specs=(P(), stats_specs),
    )  # fmt: skip

    def loss(params, batch, tables, key, first_row, normalizer, *teacher_params):
        if (batch.documents is not None) != config.document_mask:
            raise ValueError("Batch.documents are given exactly where ModelConfig.document_mask is set")
        bank, grad_sink = with_grad_sink(params["bank"])
        frozen = () if teacher is None else _frozen(teacher, *teacher_params)
        total, stats = sharded(params["dense"], bank, grad_sink, batch, tables, key, first_row, normalizer, *frozen)
        return total, dataclasses.replace(stats, loads=_stacked_loads(stats.loads))

    return loss


def _resolved(model: LanguageModel) -> LanguageModel:
    """Return the model with the attention that 'auto' is on its devices."""
    config = resolve_attention(model.config, model.roles.mesh.devices.flat[0])
    return dataclasses.replace(model, config=config)


def _stacked_loads(loads: tuple):
    """Return the counts [L, sources, E] of all layers from each segment's; sources and experts that one lacks are 0."""
    if len(loads) == 1:
        return loads[0]
    sources, experts = (max(part.shape[dim] for part in loads) for dim in (1, 2))
    padded = (jnp.pad(part, ((0, 0), (0, sources - part.shape[1]), (0, experts - part.shape[2]))) for part in loads)
    return jnp.concatenate(list(padded))


def _tables_specs(model: LanguageModel):
    """Return the PartitionSpec of a model's tables, of several segments with experts {segment: that}."""
    return joined({segment.name: P(model.roles_of(segment).expert) for segment in model.expert_segments})


def check_token_numbers(batch_size: int, microbatches: int, length: int, top_k: int) -> None:
    """Raise a UserError where a step has more choices of experts than an int32 can count.

    Args:
      batch_size: global sequences of a microbatch; microbatches: of a step; length: tokens of a sequence.
    """
    choices = batch_size * microbatches * length * top_k
    if choices > MOST_ROWS:
        raise UserError(
            f"train.batch_size ({batch_size * microbatches}) x DataConfig.sequence_length ({length}) x MoEConfig.top_k "
            f"({top_k}) = {choices} choices of experts in a step must be at most {MOST_ROWS}, so that int32 can count "
            "them; lower one of the three"
        )


def _frozen_specs(teacher: Teacher):
    """Return the PartitionSpecs of what `_frozen` returns."""
    layout = teacher.layout
    return layout.params["dense"], layout.params["bank"], layout.grad_sink, _tables_specs(teacher.model)


def _frozen(teacher: Teacher, params):
    """Return the teacher's inputs of the shard_map: parameters, the bank with its grad_sink, tables of even homes."""
    model = teacher.model
    parts = {}
    for segment in model.expert_segments:
        roles = model.roles_of(segment)
        devices = roles.size(roles.expert)
        parts[segment.name] = even_tables(segment.config.moe_layers, segment.moe.num_experts, devices)
    tables = joined(parts)
    params = lax.stop_gradient(params)
    return params["dense"], *with_grad_sink(params["bank"]), tables


def _make_stack(
    model: LanguageModel, layout: Layout, rows: int, length: int, training: bool, microbatches: int, plan,
    teacher: Teacher | None,
):  # fmt: skip
    """Return the body of the shard_map: all that one device computes on its `rows` sequences."""
    config, roles = model.config, model.roles
    tokens = rows * length
    parts = roles.size(roles.dense)
    group = _group_of(model, rows)
    if teacher is not None and group.split and group.parts > 1:
        raise UserError(
            "ModelConfig.overlap ('halves') with ModelConfig.sequence_parallel orders tokens as the teacher does not; "
            "set ModelConfig.overlap = 'none'"
        )
    trunk = _make_trunk(model, layout, rows, length, training, plan)
    if teacher is not None:
        teacher_trunk = _make_trunk(teacher.model, teacher.layout, rows, length, False, None)

    def stack(dense, bank, grad_sink, batch, tables, key, first_row, normalizer, *frozen):
        replay = None if batch.choices is None else by_layer(batch.choices)
        documents = batch.documents
        x, table, found = trunk(dense, bank, grad_sink, batch.inputs, tables, key, first_row, replay, documents)
        targets, weights = group.own_flat(batch.targets), group.own_flat(batch.weights)
        if teacher is None:
            x, targets, weights = _in_turn(x, targets, weights, chunk=config.loss_chunk)
            with jax.named_scope("loss"):
                total, total_kl = chunked_cross_entropy(x, table, targets, weights, config.loss_chunk), None
        else:
            teacher_dense, teacher_bank, unused, even = frozen
            with jax.named_scope("teacher"):
                teacher_x, teacher_table, of_teacher = teacher_trunk(
                    teacher_dense, teacher_bank, unused, batch.inputs, even, key, first_row, None, documents
                )
            with jax.named_scope("loss"):
                x, teacher_x = jnp.concatenate(x), jnp.concatenate(teacher_x)
                total, total_kl = chunked_distillation(
                    x, table, teacher_x, teacher_table, targets, weights, config.loss_chunk
                )
        cross_entropy = lax.psum(total, roles.all) / normalizer
        kl = None if teacher is None else lax.psum(total_kl, roles.all) / normalizer
        return finish(cross_entropy, kl, found, None if teacher is None else of_teacher, batch.counted)

    def passes_of(found):
        return most_of_all(_all_layers(passes for _, passes in found.values()), roles.all)

    def finish(cross_entropy, kl, found, of_teacher, counted):
        global_tokens = tokens * parts
        sums = [_sums_of_layers(segment, roles, stats, counted, global_tokens) for segment, (stats, _) in found.items()]
        weighted = [
            jnp.sum(segment.moe.aux_loss_weight * part.aux + segment.moe.z_loss_weight * part.z)
            for segment, part in zip(found, sums, strict=True)
        ]
        gate_loss = functools.reduce(jnp.add, weighted)
        token_loss = cross_entropy if teacher is None else cross_entropy + teacher.alpha * kl
        loss = token_loss + gate_loss / microbatches
        stats = StepStats(
            cross_entropy=cross_entropy,
            aux_loss=jnp.mean(_all_layers(part.aux for part in sums)),
            z_loss=jnp.mean(_all_layers(part.z for part in sums)),
            loads=tuple(part.counts[:, None] for part in sums),
            gate_entropy=_all_layers(part.entropy for part in sums) / global_tokens,
            dropped=_all_layers(part.dropped for part in sums),
            passes=passes_of(found),
            kl=kl,
            completed=_completed(sums),
            needed=_needed(sums),
            choices=_all_layers(stats.choices for stats, _ in found.values()),
            teacher_passes=None if of_teacher is None else passes_of(of_teacher),
        )
        return loss, stats

    return stack


@dataclasses.dataclass(frozen=True)
class _LayerSums:
    """Of one segment's layers over all devices: losses [L], counts [L, E] of this source, sums [L] of the gates."""

    aux: jax.Array
    z: jax.Array
    counts: jax.Array
    entropy: jax.Array
    dropped: jax.Array
    completed: jax.Array | None
    needed: jax.Array | None


def _sums_of_layers(segment: Segment, roles: Roles, stats: GateStats, counted, global_tokens: int) -> _LayerSums:
    """Return what a segment's gates say of all tokens; roles: of the whole model; counted: `Batch.counted`."""
    expert = segment.roles(roles).expert
    sums = lax.psum(stats.sums, roles.dense)
    inside = tuple(axis for axis in roles.all if axis not in expert)
    counts = lax.psum(stats.counts, inside) if inside else stats.counts
    total = lax.psum(stats.counts, roles.all)
    meant = total if counted is None else counts_so_far(total, own_layers(counted, segment))
    aux = build_router(segment.moe).balance_loss(dataclasses.replace(sums, counts=meant), global_tokens)
    z = z_loss(sums.squared_logsumexp, global_tokens)
    return _LayerSums(
        aux=aux, z=z, counts=counts, entropy=sums.entropy, dropped=sums.dropped, completed=sums.completed,
        needed=sums.needed,
    )  # fmt: skip


def _all_layers(parts: Iterable[jax.Array | None]) -> jax.Array | None:
    """Return [L, ...] of all MoE layers from that of each segment; None where there is none."""
    arrays = list(parts)
    if arrays[0] is None:
        return None
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


def _completed(sums: list[_LayerSums]) -> jax.Array | None:
    """Return the tokens [L] that `base` placed after its auctions, 0 in layers of another router; None without it."""
    if all(part.completed is None for part in sums):
        return None
    return _all_layers(jnp.zeros_like(part.dropped) if part.completed is None else part.completed for part in sums)


def _needed(sums: list[_LayerSums]) -> jax.Array | None:
    """Return `StepStats.needed`, 0 where a layer has no such expert or router; None where no layer has the router."""
    found = [part.needed for part in sums if part.needed is not None]
    if not found:
        return None
    experts, bins = max(part.counts.shape[1] for part in sums), found[0].shape[2]
    parts = []
    for part in sums:
        layers, own = part.counts.shape
        needed = jnp.zeros((layers, own, bins), found[0].dtype) if part.needed is None else part.needed
        parts.append(needed if own == experts else jnp.pad(needed, ((0, 0), (0, experts - own), (0, 0))))
    return _all_layers(parts)


def _group_of(model: LanguageModel, rows: int) -> ModelGroup:
    """Return how a model's MP groups keep their tokens."""
    config = model.config
    return make_model_group(model.roles, rows, config.sequence_parallel, config.block_wise.halves)


def _opened(grad_sink: dict, tables) -> dict:
    """Return a segment's grad_sink by layer, {name: [L, Hs, ...]}."""
    return {name: open_grad_sink(leaf, tables.home_row) for name, leaf in grad_sink.items()}


def _in_turn(x: tuple, *rows, chunk: int) -> Iterator[tuple]:
    """Yield the parts of x, then of each of `rows` [t], in the order in which the loss takes them.

    Of two halves that is the beginning of a, all of b, the rest of a: so b's last exchange of the forward and its first
    of the backward have some of the loss beside them. The beginning of a is whole chunks where a has two of them.
    """
    size = x[0].shape[0]
    begin = size // 2 // chunk * chunk or size // 2
    for parts in (x, *(jnp.split(array, len(x)) for array in rows)):
        if len(x) == 1 or begin == 0:
            yield tuple(parts)
        else:
            a, b = parts
            yield a[:begin], b, a[begin:]


def _make_trunk(
    model: LanguageModel, layout: Layout, rows: int, length: int, training: bool,
    plan: PlanShape | dict[str, PlanShape] | None,
):  # fmt: skip
    """Return trunk(dense, bank, grad_sink, inputs, tables, key, first_row, replay, documents) -> (x, table, found).

    It is all of the model but the loss: x, the parts of [t, M], are the last norm's results for the tokens of the MP
    group that this device takes to the loss, t of them in the order of `ModelGroup.own_flat`, and table [V, M] gives
    their logits; the rest is what `make_layers` finds. Two halves are two parts, and neither waits for the other.
    replay: int32 [L, t, K], choices of before to be taken again, or None; documents: int32 [b, Sq], or None.
    """
    config, roles = model.config, model.roles
    dtype = jnp.dtype(config.dtype)
    tokens = rows * length
    transformer = nnx.split(nnx.eval_shape(lambda: Transformer(config, model.moe, model.vocab_size, nnx.Rngs(0))))[0]
    parts = roles.size(roles.dense)
    group = _group_of(model, rows)
    layers = make_layers(model, layout, tokens, training, plan, _make_bank_store, group)

    def trunk(dense, bank, grad_sink, inputs, tables, key, first_row, replay=None, documents=None):
        device = lax.axis_index(roles.dense)
        token_ids = (first_row + device * rows) * length + jnp.arange(tokens, dtype=jnp.int32)
        tables = local(tables)
        bank = jax.tree.map(lambda leaf: lax.stop_gradient(leaf).astype(dtype), bank)
        opened = {
            segment.name: _opened(model.own_part(grad_sink, segment), model.own_part(tables, segment))
            for segment in model.expert_segments
        }
        outer = {name: leaf for name, leaf in dense.items() if name != "units"}
        dims, wires = ({name: tree[name] for name in outer} for tree in (layout.gather, layout.wires))
        outer = gather_tree(outer, dims, roles.dense, parts, wires)

        if group.split:  # cast once: embedding and output head share the sum of their gradients over the group
            outer = cast_varying(outer, roles.model)
        outer["norm"] = cast_varying(outer["norm"], roles.dense)  # its gradients by part are summed over devices once

        units = nnx.merge(transformer, {**outer, "units": dense["units"]})
        positions = None if documents is None else document_positions(documents)
        x = units.embedding(inputs, dtype, group, positions)
        x = tuple(jnp.split(x, group.parts))
        x, found = layers(x, dense["units"], bank, joined(opened), tables, token_ids, key, replay, documents)
        with jax.named_scope("loss"):
            return tuple(map(units.norm, group.to_loss(x))), units.embedding.head_table(), found

    return trunk


def _make_bank_store(layout: Layout, roles: Roles):
    """Return store(bank, layer_grad_sink, tables) -> the three as one MoE layer of a segment computes with them.

    Under every schedule but `dp` the bank is used as it is stored. Under `dp`, stage 2 scatters each layer's gradient
    as soon as it is computed, and stage 3 gathers each layer's parameters too; both along the hidden dim.

    Args:
      layout, roles: of the segment.
    """

    def hidden_dim(name):
        return 1 if name == "w_out" else 2

    def is_split(specs, name):
        spec = specs[name]
        return len(spec) > hidden_dim(name) and spec[hidden_dim(name)] is not None

    def gather(name, value):
        return lax.all_gather(value, roles.data, axis=hidden_dim(name), tiled=True)

    def store(bank, layer_grad_sink, tables):
        if layout.dp_stage not in (2, 3):
            return bank, layer_grad_sink, tables
        gathered_grad_sink = {
            n: gather(n, v) if is_split(layout.grad_sink, n) else v for n, v in layer_grad_sink.items()
        }
        if layout.dp_stage == 2:
            return bank, gathered_grad_sink, tables
        weights = {n: v[tables.home_row] for n, v in bank.items()}
        weights = {n: gather(n, v) if is_split(layout.params["bank"], n) else v for n, v in weights.items()}
        compact = jnp.arange(tables.home_row.shape[0], dtype=jnp.int32)
        return weights, gathered_grad_sink, dataclasses.replace(tables, home_row=compact)

    return store
