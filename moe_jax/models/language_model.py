"""A language model on a mesh: parameters, their layout, and the loss of one global microbatch.

Enters: parameters {'dense': ..., 'bank': ...}, a batch of token ids, and the plan's tables. Leaves: the global loss and
`StepStats`. One `shard_map` goes round the whole stack, so every collective of forward and backward is written in the
open; the gradient is taken outside it. The loop over layers is a scan over units, and the bank enters it as a constant.
Letters: B global sequences, b here, Sq positions, t = b Sq tokens, M model dim, L MoE layers, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.collectives.copies import own_part
from moe_jax.collectives.gather import gather_tree
from moe_jax.collectives.varying import cast_varying
from moe_jax.dispatch import local
from moe_jax.dispatch.route import record
from moe_jax.errors import UserError
from moe_jax.mesh.roles import Roles
from moe_jax.mesh.sharding import dense_specs, expert_specs
from moe_jax.models.attention import resolve_attention
from moe_jax.models.config import ModelConfig
from moe_jax.models.cross_entropy import chunked_cross_entropy
from moe_jax.models.layer_loop import make_layer_loop
from moe_jax.models.model_group import check_sequence_parallel, make_model_group
from moe_jax.models.transformer import Transformer
from moe_jax.moe.bank import open_sink, with_sink
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.gate import balance_loss, z_loss
from moe_jax.moe.layer import LayerPlan, check_hidden_dim, init_bank, layer_sizes
from moe_jax.schedules.base import MOST_ROWS


@record
class Batch:
    """One global microbatch, rows in the order of the data stream.

    Attributes:
      inputs: int32 [B, Sq] token ids.
      targets: int32 [B, Sq].
      weights: float [B, Sq], 1 on a target token, else 0 (BERT: the masked ones; padding: 0).
    """

    inputs: jax.Array
    targets: jax.Array
    weights: jax.Array


@record
class StepStats:
    """What one microbatch tells beside its loss; all global, replicated but for `loads`.

    Attributes:
      cross_entropy: float [], loss per target token, in nats.
      aux_loss: float [], mean over layers of the load-balancing loss, unweighted; the loss holds their weighted sum.
      z_loss: float [], mean over layers of the gate's z-loss, unweighted; the loss holds their weighted sum.
      loads: int32 [L, sources, E], choices of each source's tokens per expert.
      gate_entropy: float [L], mean entropy of the gate's softmax, in nats.
      dropped: int32 [L], choices that a capacity dropped.
      passes: int32 [L], passes that each MoE layer took; 1 without overflow.
    """

    cross_entropy: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array
    loads: jax.Array
    gate_entropy: jax.Array
    dropped: jax.Array
    passes: jax.Array


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the parameters of one model lie on one mesh.

    Attributes:
      params, state: pytrees of PartitionSpec for parameters and for optimizer moments.
      sink: {name: PartitionSpec} of the bank's gradients.
      gather: pytree of int for the dense leaves: dim to gather inside the model, -1 for none.
      dp_stage: ZeRO stage of the experts under the `dp` schedule, else None.
    """

    params: dict
    state: dict
    sink: dict
    gather: dict
    dp_stage: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """Names, shapes and layout of a model; arrays live in the training state.

    Attributes:
      config, moe: what the model is.
      vocab_size: V.
      roles: the mesh.
      zero_stage: 0, 1 or 3, of the dense parameters.
      expert_zero_stage: 0-3, of the experts under the `dp` schedule.
    """

    config: ModelConfig
    moe: MoEConfig
    vocab_size: int
    roles: Roles
    zero_stage: int = 1
    expert_zero_stage: int = 1

    def __post_init__(self):
        if self.zero_stage not in (0, 1, 3):
            raise UserError(f"train.zero_stage ({self.zero_stage}) must be 0, 1 or 3")
        if self.expert_zero_stage not in (0, 1, 2, 3):
            raise UserError(f"train.expert_zero_stage ({self.expert_zero_stage}) must be 0, 1, 2 or 3")
        heads, parts = self.config.heads, self.roles.size(self.roles.model)
        if heads % parts:
            raise UserError(
                f"ModelConfig.heads ({heads}) must be divisible by MeshConfig.model ({parts}); set MeshConfig.model to "
                f"a divisor of {heads}"
            )
        if self.config.moe_every == 2 and self.config.ffn_dim % parts:
            raise UserError(
                f"the dense hidden dim ({self.config.ffn_dim}) must be divisible by MeshConfig.model ({parts}); set "
                f"MeshConfig.model to a divisor of {self.config.ffn_dim}"
            )
        check_hidden_dim("ModelConfig.hidden_dim", self.config.hidden_dim, self.roles)
        layer_sizes(self.moe, self.roles, 1)

    def init(self, key) -> dict:
        """Return fresh parameters {'dense': nested dict, 'bank': {name: [D S, ...]}} with an even placement.

        Values depend on the key and the model only, never on the mesh; call it under `jax.jit` with the layout's
        shardings as `out_shardings` and each device makes its own part.
        """
        config, moe = self.config, self.moe
        dense_key, expert_key = jax.random.split(key)
        model = Transformer(config, moe.num_experts, self.vocab_size, nnx.Rngs(dense_key))
        bank = init_bank(
            expert_key,
            config.moe_layers,
            moe.num_experts,
            self.roles.size(self.roles.expert),
            model_dim=config.model_dim,
            hidden_dim=config.hidden_dim,
            activation=config.activation,
            dtype=config.param_dtype,
            output_scale=(2 * config.layers) ** -0.5,
        )
        return {"dense": nnx.to_pure_dict(nnx.state(model)), "bank": bank}

    def shapes(self) -> dict:
        """Return the parameters as a pytree of ShapeDtypeStruct; nothing is computed."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def layout(self) -> Layout:
        """Return where every leaf lies."""
        shapes = self.shapes()
        abstract = nnx.eval_shape(lambda: Transformer(self.config, self.moe.num_experts, self.vocab_size, nnx.Rngs(0)))
        flat = {path: leaf for path, leaf in nnx.to_flat_state(nnx.state(abstract))}

        def of_path(path, leaf, function):
            keys = tuple(entry.key for entry in path)
            return function(keys, leaf)

        dense = shapes["dense"]
        with_path = lambda function: jax.tree_util.tree_map_with_path(  # noqa: E731
            lambda path, leaf: of_path(path, leaf, function), dense
        )
        model_dims = with_path(lambda keys, _: flat[keys].get_metadata().get("model_dim", -1))
        stacked = with_path(lambda keys, _: keys[0] == "units")
        params, state, gather = dense_specs(
            jax.tree.map(lambda leaf: tuple(leaf.shape), dense), model_dims, stacked, self.roles, self.zero_stage
        )
        dp_stage = self.expert_zero_stage if self.moe.schedule == "dp" else None
        bank = {name: tuple(leaf.shape) for name, leaf in shapes["bank"].items()}
        bank_params, sink, bank_state = expert_specs(bank, self.roles, self.zero_stage, dp_stage)
        return Layout(
            params={"dense": params, "bank": bank_params},
            state={"dense": state, "bank": bank_state},
            sink=sink,
            gather=gather,
            dp_stage=dp_stage,
        )


def make_loss(
    model: LanguageModel, layout: Layout, batch_size: int, length: int, *, training: bool = True, microbatches: int = 1,
    plan: LayerPlan | None = None,
) -> Callable:  # fmt: skip
    """Return the loss of one global microbatch as a function to be jitted and differentiated.

    Args:
      model: what to compute.
      layout: where the parameters lie, from `model.layout()`.
      batch_size: B, global sequences of a microbatch.
      length: Sq.
      training: with gate noise, if the gate has any.
      microbatches: of one step; the gate losses of each count 1 / microbatches.
      plan: slots and buckets of the placements whose tables will come; None is an even one without guests.

    Returns:
      loss(params, batch: Batch, tables: Tables, key, first_row int32 [], normalizer float []) ->
      (float [], StepStats). The first is the sum of the token losses over `normalizer` plus the weighted gate losses;
      `first_row` is the number of the microbatch's first sequence within the step, which keys the noise.

    Raises:
      UserError: if the batch does not divide over the data-parallel devices, or is longer than the positions.
    """
    roles = model.roles
    config = resolve_attention(model.config, model.roles.mesh.devices.flat[0])
    model = dataclasses.replace(model, config=config)
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
    check_sequence_parallel(config.sequence_parallel, length, roles)
    check_token_numbers(batch_size, microbatches, length, model.moe.top_k)
    stack = _make_stack(model, layout, batch_size // shards, length, training, microbatches, plan)
    rows = P(roles.dense)
    stats_specs = StepStats(P(), P(), P(), P(None, roles.expert), P(), P(), P())
    sharded = jax.shard_map(
        stack,
        mesh=roles.mesh,
        in_specs=(
            layout.params["dense"], layout.params["bank"], layout.sink, Batch(rows, rows, rows), P(roles.expert),
            P(), P(), P(),
        ),
        out_specs=(P(), stats_specs),
    )  # fmt: skip

    def loss(params, batch, tables, key, first_row, normalizer):
        bank, sink = with_sink(params["bank"])
        return sharded(params["dense"], bank, sink, batch, tables, key, first_row, normalizer)

    return loss


def check_token_numbers(batch_size: int, microbatches: int, length: int, top_k: int) -> None:
    """Raise a UserError where a step has more choices of experts than int32 counts: they are counted, tokens numbered.

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


def _make_stack(model: LanguageModel, layout: Layout, rows: int, length: int, training: bool, microbatches: int, plan):
    """Return the body of the shard_map: everything that one device does to its `rows` sequences."""
    config, moe_config, roles = model.config, model.moe, model.roles
    dtype = jnp.dtype(config.dtype)
    tokens = rows * length
    transformer = nnx.split(
        nnx.eval_shape(lambda: Transformer(config, moe_config.num_experts, model.vocab_size, nnx.Rngs(0)))
    )[0]
    parts = roles.size(roles.dense)
    bank_store = _make_bank_store(model, layout)

    group = make_model_group(roles, rows, config.sequence_parallel)
    layer_loop = make_layer_loop(model, layout, tokens, training, plan, bank_store, group)

    def stack(dense, bank, sink, batch, tables, key, first_row, normalizer):
        device = lax.axis_index(roles.dense)
        token_ids = (first_row + device * rows) * length + jnp.arange(tokens, dtype=jnp.int32)
        tables = local(tables)
        bank = jax.tree.map(lambda leaf: lax.stop_gradient(leaf).astype(dtype), bank)
        sink = {name: open_sink(leaf, tables.home_row) for name, leaf in sink.items()}
        outer = {name: leaf for name, leaf in dense.items() if name != "units"}
        outer = gather_tree(outer, {name: layout.gather[name] for name in outer}, roles.dense, parts)

        if group.split:  # cast once: embedding and output head share the sum of their gradients over the group
            outer = cast_varying(outer, roles.model)

        units = nnx.merge(transformer, {**outer, "units": dense["units"]})
        x = units.embedding(batch.inputs, dtype, group)
        x, gate_stats, passes = layer_loop(x, dense["units"], bank, sink, tables, token_ids, key)
        with jax.named_scope("loss"):
            # each device of an MP group takes its part of the group's tokens
            x = x if group.split else own_part(x.reshape(tokens, -1), roles.model)
            targets, weights = (own_part(array.reshape(-1), roles.model) for array in (batch.targets, batch.weights))
            table = units.embedding.tokens[...]
            total = chunked_cross_entropy(units.norm(x), table, targets, weights, config.loss_chunk)
        cross_entropy = lax.psum(total, roles.all) / normalizer
        return _finish(cross_entropy, gate_stats, passes, tokens * parts)

    def _finish(cross_entropy, gate_stats, passes, global_tokens):
        probability, squared, entropy, dropped = lax.psum(
            (gate_stats.probability, gate_stats.squared_logsumexp, gate_stats.entropy, gate_stats.dropped), roles.dense
        )
        inside = tuple(axis for axis in roles.all if axis not in roles.expert)
        counts = lax.psum(gate_stats.counts, inside) if inside else gate_stats.counts
        total = lax.psum(gate_stats.counts, roles.all)
        aux = balance_loss(total, probability, global_tokens, moe_config.top_k)
        z = z_loss(squared, global_tokens)
        gate_loss = jnp.sum(moe_config.aux_loss_weight * aux + moe_config.z_loss_weight * z)
        loss = cross_entropy + gate_loss / microbatches
        stats = StepStats(
            cross_entropy=cross_entropy,
            aux_loss=jnp.mean(aux),
            z_loss=jnp.mean(z),
            loads=counts[:, None],
            gate_entropy=entropy / global_tokens,
            dropped=dropped,
            passes=passes,
        )
        return loss, stats

    return stack


def _make_bank_store(model: LanguageModel, layout: Layout):
    """Return store(bank, layer_sink, tables) -> (bank, doors, tables) that one MoE layer computes with.

    Under every schedule but `dp` the bank is used as it lies. Under `dp`, stage 2 scatters each layer's gradient as it
    comes, and stage 3 gathers each layer's parameters too; both along the hidden dim.
    """
    roles = model.roles

    def hidden_dim(name):
        return 1 if name == "w_out" else 2

    def is_split(specs, name):
        spec = specs[name]
        return len(spec) > hidden_dim(name) and spec[hidden_dim(name)] is not None

    def gather(name, value):
        return lax.all_gather(value, roles.data, axis=hidden_dim(name), tiled=True)

    def store(bank, layer_sink, tables):
        if layout.dp_stage not in (2, 3):
            return bank, layer_sink, tables
        doors = {n: gather(n, v) if is_split(layout.sink, n) else v for n, v in layer_sink.items()}
        if layout.dp_stage == 2:
            return bank, doors, tables
        weights = {n: v[tables.home_row] for n, v in bank.items()}
        weights = {n: gather(n, v) if is_split(layout.params["bank"], n) else v for n, v in weights.items()}
        compact = jnp.arange(tables.home_row.shape[0], dtype=jnp.int32)
        return weights, doors, dataclasses.replace(tables, home_row=compact)

    return store
