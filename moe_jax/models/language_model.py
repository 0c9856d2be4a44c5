"""A language model on a mesh: names, shapes and layout of its parameters; the records of a batch and its statistics.

What is computed with them is in `loss.py`.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.errors import UserError
from moe_jax.models.config import LoraConfig, ModelConfig, Segment, segments_of, with_experts
from moe_jax.models.lora import adapters_of, factor_dims, init_adapters, joined
from moe_jax.models.transformer import Transformer, abstract_transformer, matrix_dims
from moe_jax.moe.bank import init_bank, init_expert
from moe_jax.moe.build import check_float8, check_hidden_dim, layer_sizes, make_schedule
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.experts import LORA_B
from moe_jax.moe.passes import FirstPassOnly
from moe_jax.moe.routers import build_router
from moe_jax.moe.routing import Tables, even_tables, record
from moe_jax.moe.schedule import find_schedule
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.sharding import check_zero_stages, dense_specs, expert_specs
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import Shapes

BANK = "bank"


def flatten(tree, prefix: str = "") -> dict[str, Any]:
    """Return {name: leaf} of a tree, names such as 'params/dense/norm/scale' or 'params/bank/segment_0/w_in'."""
    flat = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        # a dictionary's key, a named tuple's field, or an index
        steps = (getattr(step, next(a for a in ("key", "name", "idx") if hasattr(step, a))) for step in path)
        name = "/".join(map(str, ([prefix] if prefix else []) + list(steps)))
        assert name not in flat, f"two leaves are called {name}"
        flat[name] = leaf
    return flat


def segment_of(name: str) -> str | None:
    """Return the segment whose experts a leaf of the bank (or of a moment of it) is of; None of all other leaves."""
    steps = name.split("/")
    return steps[steps.index(BANK) + 1] if BANK in steps else None


@record
class Batch:
    """One global microbatch, rows in the order of the data stream; of B those that only fill it up come last.

    Attributes:
      inputs: int32 [B, Sq] token ids.
      targets: int32 [B, Sq].
      weights: float [B, Sq], 1 on a target token, else 0 (BERT: the masked ones; padding: 0).
      choices: int32 [B, Sq, L, K], experts that each token takes in each MoE layer instead of choosing (`by_token` of
        what was recorded); None lets the routers choose.
      counted: int32 [L, E], choices of each expert in the earlier microbatches of the step, for the balance loss, E as
        in `StepStats.loads`; None where it needs none.
      documents: int32 [B, Sq], the document that each token is of, equal exactly within a document, whose tokens are
        neighbours; of a model with `ModelConfig.document_mask`, None of others.
      token_ids: int32 [B, Sq], the number of each token among those of the step that are none of padding, `PADDING`
        behind the last token of a row; of a model with `padded`, None of others, whose rows are full.
    """

    inputs: jax.Array
    targets: jax.Array
    weights: jax.Array
    choices: jax.Array | None = None
    counted: jax.Array | None = None
    documents: jax.Array | None = None
    token_ids: jax.Array | None = None


def by_token(choices, batch_size: int):
    """Return recorded choices [L, N, K] as `Batch.choices` [B, Sq, L, K]."""
    layers, tokens, top_k = choices.shape
    return jnp.moveaxis(choices, 0, 1).reshape(batch_size, tokens // batch_size, layers, top_k)


@record
class StepStats:
    """Statistics of one microbatch; all global, replicated but for `loads`.

    Attributes:
      cross_entropy: float [], loss per target token, in nats.
      aux_loss: float [], mean over layers of the load-balancing loss, unweighted; the loss holds their weighted sum.
      z_loss: float [], mean over layers of the gate's z-loss, unweighted; the loss holds their weighted sum.
      loads: int32 [L, sources, E], choices of each source's tokens per expert; where segments differ, as many sources
        and experts as the largest has, those that a layer lacks with 0.
      gate_entropy: float [L], mean entropy of the gate's softmax, in nats.
      dropped: int32 [L], choices that a capacity dropped.
      passes: int32 [L], passes that each MoE layer took, or in a `first_pass_model` should have taken; 1 without
        overflow.
      kl: float [], KL(teacher || student) per target token, in nats; None without a teacher.
      completed: int32 [L], tokens that the router `base` placed after its auction; None where no layer has it.
      choices: int32 [L, N, K], every token's experts in the order of the batch, by MoEConfig.record_choices; else None.
      teacher_passes: `passes` of the teacher's layers; None without one.
    """

    cross_entropy: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array
    loads: jax.Array
    gate_entropy: jax.Array
    dropped: jax.Array
    passes: jax.Array
    kl: jax.Array | None = None
    completed: jax.Array | None = None
    choices: jax.Array | None = None
    teacher_passes: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the parameters of one model lie on one mesh.

    Attributes:
      params, state: pytrees of PartitionSpec for parameters and for optimizer moments.
      grad_sink: {segment: {name: PartitionSpec}} of the bank's gradients, of what is trained.
      gather: pytree of int for the dense leaves: dim to gather inside the model, -1 for none.
      wires: matching pytree of the names of the dtypes in which they are gathered: the compute dtype where a leaf is
        read in it alone, else the leaf's own.
      adapters: whether only adapters are trained, and all else is frozen.
      dp_stage: ZeRO stage of the experts over `data`; None where tokens move and it is below 2, `zero_stage` then.
      own: matching pytree of bool: each data-parallel device has a copy, whose gradient is that device's own
        (`with_own_leaves`).
    """

    params: dict
    state: dict
    grad_sink: dict
    gather: dict
    wires: dict
    own: dict
    dp_stage: int | None
    adapters: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """Names, shapes and layout of a model; its arrays are in the training state.

    Attributes:
      config, moe: what the model is; where layers differ, what `segments` makes of them.
      vocab_size: V.
      roles: the mesh.
      zero_stage: 0, 1 or 3, of the dense parameters.
      expert_zero_stage: 0-3, of the experts; where tokens move, 0 and 1 are as `zero_stage` says.
      lora: adapters, next to the parameters that they adapt, which are frozen then.
      padded: whether batches say which tokens are padding: these go to no expert, and no statistic counts them.
      alpha: of a teacher, whose experts stay at even homes: weight, in its student's loss, of the divergence from it.
    """

    config: ModelConfig
    moe: MoEConfig
    vocab_size: int
    roles: Roles
    zero_stage: int = 1
    expert_zero_stage: int = 1
    lora: LoraConfig = LoraConfig()
    padded: bool = False
    alpha: float = 0.0

    def __post_init__(self):
        check_zero_stages(self.zero_stage, self.expert_zero_stage)
        parts = self.roles.size(self.roles.model)
        sizes = [("ModelConfig.heads", self.config.heads), ("ModelConfig.kv_heads", self.config.key_value_heads)]
        for segment in self.segments:
            if segment.config.moe_every != 1:
                sizes.append(("the dense hidden dim", segment.config.ffn_dim))
            if segment.has_experts:
                shared = segment.moe.shared_ffn_dim(segment.config.hidden_dim)
                sizes.append(("the hidden dim of all shared experts", shared))
        for name, size in sizes:
            if size % parts:
                raise UserError(
                    f"{name} ({size}) must be divisible by MeshConfig.model ({parts}); set MeshConfig.model to a "
                    f"divisor of {size}"
                )
        for segment in self.expert_segments:
            check_hidden_dim("ModelConfig.hidden_dim", segment.config.hidden_dim, self.roles)
            check_float8(segment.moe, segment.config.model_dim)
            layer_sizes(segment.moe, segment.roles(self.roles), 1)

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The runs of equal units, first layers first."""
        return segments_of(self.config, self.moe)

    @functools.cached_property
    def expert_segments(self) -> tuple[Segment, ...]:
        """The segments with MoE layers: those that the bank, tables, homes and plans have parts for."""
        return with_experts(self.segments)

    @property
    def tables_specs(self) -> dict[str, P]:
        """{segment: PartitionSpec} of the plan's tables."""
        return {segment.name: P(segment.roles(self.roles).expert) for segment in self.expert_segments}

    @functools.cached_property
    def even_placements(self) -> dict[str, Placement]:
        """{segment with experts, first layers first: even homes on its expert-parallel group, with its nodes}."""
        found = {}
        for segment in self.expert_segments:
            layers, experts, roles = segment.config.moe_layers, segment.moe.num_experts, segment.roles(self.roles)
            found[segment.name] = Placement.even(layers, experts, roles.size(roles.expert), roles.members_per_node)
        return found

    @property
    def even_homes(self) -> dict[str, np.ndarray]:
        """{segment: int32 [L, E]}, home device of every expert of `even_placements`."""
        return {name: own.home for name, own in self.even_placements.items()}

    def loads_by_segment(self, loads: np.ndarray) -> dict[str, np.ndarray]:
        """Return {segment: int64 [L, D, E]} from the loads of `StepStats`, without the zeros of what it lacks."""
        found = {}
        for segment in self.expert_segments:
            devices = self.even_placements[segment.name].devices
            found[segment.name] = np.asarray(own_layers(loads, segment)[:, :devices], np.int64)
        return found

    def even_tables(self) -> dict[str, Tables]:
        """Return {segment: tables of `even_placements`}, as NumPy arrays."""
        return {name: even_tables(own.layers, own.experts, own.devices) for name, own in self.even_placements.items()}

    def init(self, key) -> dict:
        """Return fresh parameters {'dense': nested dict, 'bank': {segment: {name: [D Rb, ...]}}}, homes even.

        D is that of the segment's expert-parallel group. Values depend on the key and the model only, never on the
        mesh; call it under `jax.jit` with the layout's shardings as `out_shardings` and each device makes its own part.
        """
        dense_key, expert_key = jax.random.split(key)
        model = Transformer(self.config, self.moe, self.vocab_size, nnx.Rngs(dense_key))
        base = {"dense": nnx.to_pure_dict(nnx.state(model)), "bank": {}}
        for segment in self.expert_segments:
            config, roles = segment.config, segment.roles(self.roles)
            own_key = jax.random.fold_in(expert_key, segment.first_layer) if segment.first_layer else expert_key
            sizes = config.moe_layers, segment.moe.num_experts, roles.size(roles.expert)
            make = functools.partial(
                init_expert,
                model_dim=config.model_dim,
                hidden_dim=config.hidden_dim,
                activation=config.activation,
                dtype=config.param_dtype,
                output_scale=(2 * segment.depth) ** -0.5,
            )
            base["bank"][segment.name] = init_bank(make, own_key, *sizes)
        if not self.lora.rank:
            return base
        wires = {"dense": self.wires(), "bank": jax.tree.map(lambda _: self.config.dtype, base["bank"])}
        frozen = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), base, wires)
        return joined(frozen, init_adapters(self.lora, jax.random.fold_in(key, 1), base, self.even_placements))

    def shapes(self) -> dict:
        """Return the parameters as a pytree of ShapeDtypeStruct; nothing is computed, and no device is asked for."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    def placed_shapes(self, frozen: bool = False) -> dict:
        """Return the parameters as ShapeDtypeStructs with shardings, as they stand in a checkpoint.

        `frozen`: as a step takes a teacher's, the bank in the compute dtype, since nobody updates it.
        """
        shapes, sharding, dtype = self.shapes(), self.roles.sharding, jnp.dtype(self.config.dtype)
        if frozen:
            shapes["bank"] = jax.tree.map(lambda leaf: leaf.update(dtype=dtype), shapes["bank"])
        return jax.tree.map(lambda leaf, spec: leaf.update(sharding=sharding(*spec)), shapes, self.layout().params)

    def trained(self, tree: dict) -> dict:
        """Return what of a tree like the parameters, or of a part of one, is trained: all, or the adapters alone."""
        return adapters_of(tree) if self.lora.rank else tree

    def scaled(self, tree: dict, inverse: bool = False) -> dict:
        """Return the tree with alpha / rank in the factors B, or without; the tree itself where there are none."""
        if not self.lora.rank:
            return tree
        factor = self.lora.alpha / self.lora.rank
        factor = 1 / factor if inverse else factor
        return jax.tree.map_with_path(lambda at, own: own * factor if at[-1].key.endswith(LORA_B) else own, tree)

    def _described(self) -> dict[tuple[str, ...], dict[str, Any]]:
        """Return {path of a dense leaf: what its module says of it}."""
        flat = nnx.to_flat_state(nnx.state(abstract_transformer(self.config, self.moe, self.vocab_size)))
        return {path: leaf.get_metadata() for path, leaf in flat}

    def wires(self) -> dict:
        """Return the names of the dtypes in which dense leaves are read, without adapters; frozen ones are kept so."""
        dtypes = {True: self.config.dtype, False: self.config.param_dtype}
        return unflatten_dict({path: dtypes[bool(own.get("operand"))] for path, own in self._described().items()})

    def layout(self, apart: str = "none") -> Layout:
        """Return where every leaf lies.

        Args:
          apart: which dense parameters that are not split are `Layout.own`: 'none', 'outer' (what lies outside the
            layers and has moments that are split: embedding, head, last norm) or 'all'.
        """
        shapes, flat = self.shapes(), self._described()
        banks, model_dims = shapes["bank"], {path: own.get("model_dim", -1) for path, own in flat.items()}
        wires = flatten_dict(self.wires())
        shapes_of_dense = {path: leaf.shape for path, leaf in flatten_dict(shapes["dense"]).items()}
        for path in shapes_of_dense.keys() - flat.keys():  # adapters
            name, own = path[-1].rpartition("_lora_")[0], path[-1].endswith(LORA_B)
            adapted = (*path[:-1], name)
            dim, dims = model_dims[adapted], factor_dims(name, len(shapes_of_dense[adapted]) - 1)[own]
            model_dims[path] = dims.index(dim) if dim in matrix_dims(name)[own] else -1
            wires[path] = self.config.param_dtype
        model_dims = {path: model_dims[path] for path in shapes_of_dense}
        stacked = {path: path[0] == "units" for path in shapes_of_dense}
        specs = dense_specs(shapes_of_dense, model_dims, stacked, self.roles, self.zero_stage)
        of_device = {}
        for path, spec in specs[1].items():
            outer = path[0] != "units" and _split_dim(spec, self.roles) is not None
            trained = not self.lora.rank or path not in flat
            of_device[path] = trained and specs[2][path] < 0 and (apart == "all" or (apart == "outer" and outer))
        params, state, gather, wires, own = map(unflatten_dict, (*specs, wires, of_device))
        moves = find_schedule(self.moe.schedule).moves_tokens
        dp_stage = None if moves and self.expert_zero_stage < 2 else self.expert_zero_stage
        bank_params, grad_sink, bank_state = {}, {}, {}
        for segment in self.expert_segments:
            name, roles = segment.name, segment.roles(self.roles)
            bank = {key: leaf.shape for key, leaf in banks[name].items()}
            specs = expert_specs(bank, roles, self.zero_stage, dp_stage)
            bank_params[name], grad_sink[name], bank_state[name] = specs[0], self.trained(specs[1]), specs[2]
        return Layout(
            params={"dense": params, "bank": bank_params},
            state={"dense": state, "bank": bank_state},
            grad_sink=grad_sink,
            gather=gather,
            wires=wires,
            own=own,
            dp_stage=dp_stage,
            adapters=self.lora.rank > 0,
        )


def first_pass_model(model: LanguageModel) -> LanguageModel:
    """Return the model whose MoE layers run pass 0 alone: `StepStats.passes` says whether that was enough."""
    return dataclasses.replace(model, moe=FirstPassOnly(**vars(model.moe)))


def has_later_passes(model: LanguageModel, tokens: int, plan: Shapes | None = None) -> bool:
    """Say whether some bucket of some layer can overflow, so that the program has conditionals.

    Args:
      tokens: of one MP group in one microbatch.
      plan: as `make_loss` takes it.
    """
    x, own = jax.ShapeDtypeStruct((tokens, model.config.model_dim), model.config.dtype), plan or {}
    schedules = (make_schedule(s.moe, s.roles(model.roles), x, own.get(s.name)) for s in model.expert_segments)
    return any(schedule.most_passes > 1 for schedule in schedules)


# Gradients that each data-parallel device keeps for itself until they are summed, once: a copy of a parameter is on its
# device already, so it moves nothing; its gradient is that device's own, and `summed` adds them up where the optimizer
# wants them: under ZeRO-1 by a reduce-scatter, half the bytes of an all-reduce. Leaves that are split (ZeRO-3) and the
# experts stay as they are, and the model sums their gradients. Traced, outside the model's `shard_map`.
def _split_dim(place: P, roles: Roles) -> int | None:
    """Return the dim that is split over the data-parallel devices; None where none is."""
    dims = [at for at, axes in enumerate(place) if (axes if isinstance(axes, tuple) else (axes,)) == roles.dense]
    return dims[0] if dims else None


def own_specs(layout: Layout, roles: Roles):
    """Return the PartitionSpecs of what `with_own_leaves` makes of the dense parameters."""
    return jax.tree.map(lambda own, spec: P(roles.dense, *spec) if own else spec, layout.own, layout.params["dense"])


def with_own_leaves(params, layout: Layout, roles: Roles):
    """Return the parameters with the dense leaves of which devices have copies as [devices, ...]."""

    def copied(leaf, own, spec):
        if not own:
            return leaf
        every = jnp.broadcast_to(leaf[None], (roles.size(roles.dense), *leaf.shape))
        return lax.with_sharding_constraint(every, roles.sharding(*spec))

    return {**params, "dense": jax.tree.map(copied, params["dense"], layout.own, own_specs(layout, roles))}


def summed(grads, layout: Layout, roles: Roles):
    """Return the parameters' gradient from that of `with_own_leaves`; what is summed here lies as the moments do."""
    specs, moments, of_device = layout.params["dense"], layout.state["dense"], layout.own
    held = own_specs(layout, roles)
    if layout.adapters:
        specs, moments, of_device, held = map(adapters_of, (specs, moments, of_device, held))
    places = jax.tree.map(lambda own, spec, state: state if own else spec, of_device, specs, moments)

    def over_devices(leaf, own, place):
        if not own:
            return leaf
        dim = _split_dim(place, roles)
        if dim is None:
            return lax.psum(leaf[0], roles.dense)
        return lax.psum_scatter(leaf[0], roles.dense, scatter_dimension=dim, tiled=True)

    total = jax.shard_map(
        lambda dense: jax.tree.map(over_devices, dense, of_device, places),
        mesh=roles.mesh,
        in_specs=(held,),
        out_specs=places,
    )
    return {**grads, "dense": total(grads["dense"])} if "dense" in grads else grads


def own_layers(counts, segment: Segment):
    """Return a segment's counts [L, ..., E] of those of all MoE layers, without the zeros of experts that it lacks."""
    return counts[segment.moe_layers, ..., : segment.moe.num_experts]


# What routers keep besides parameters: leaves in the gate of their layer, so that checkpoints, --init_from and
# evaluation have them, which no optimizer moves but the router itself.
def with_router_state(segments: tuple[Segment, ...], before, after, loads):
    """Return a tree like the parameters, `after`, with the routers' state of the parameters `before`.

    Args:
      segments: of the model.
      loads: int32 [L, sources, E] of the whole step, all its microbatches together, as in `StepStats`, by which the
        state moves on; None leaves it as it is.
    """
    units = dict(after["dense"]["units"])
    for segment in with_experts(segments):
        router, old = build_router(segment.moe), before["dense"]["units"][segment.name]["gate"]
        state = {name: old[name] for name in router.state}
        if state and loads is not None:
            state = router.next_state(state, own_layers(jnp.sum(loads, axis=1), segment))
        unit = units[segment.name]
        units[segment.name] = {**unit, "gate": {**unit["gate"], **state}}
    return {**after, "dense": {**after["dense"], "units": units}}
