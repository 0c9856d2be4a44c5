"""How large a model is and what it costs: parameter counts, FLOPs, bytes of a step. No arrays.

Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from moe_jax.cluster.layer_seconds import matrices_of
from moe_jax.models.config import LoraConfig, ModelConfig, segments_of, with_experts
from moe_jax.models.language_model import LanguageModel, Layout, flatten
from moe_jax.models.model_group import rows_of
from moe_jax.models.transformer import MODULES
from moe_jax.moe.bank import reads_as_stored
from moe_jax.moe.build import layer_sizes
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.schedule import find_schedule, layout_of
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.plan_shape import Shapes

GROUPS = ("embedding", "attention", "feed_forward", "shared_experts", "gate", "norm", "bias", "experts")
PAPER_GROUPS = ("attention", "feed_forward", "shared_experts", "experts")


@functools.lru_cache(maxsize=32)
def shapes_and_layout(model: LanguageModel) -> tuple[dict, Layout]:
    """Return `LanguageModel.shapes` and `layout`, of float64 too where jax does not know it."""
    with jax.enable_x64(model.config.dtype == "float64"):
        return model.shapes(), model.layout()


def leaf_shapes(config: ModelConfig, moe: MoEConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return {name: global shape} of the parameters, with names such as 'dense/norm/scale', whatever the mesh."""
    model = LanguageModel(config=config, moe=moe, vocab_size=vocab_size, roles=build_mesh(MeshConfig(), 1))
    return {name: leaf.shape for name, leaf in flatten(shapes_and_layout(model)[0]).items()}


def parameter_counts(config: ModelConfig, moe: MoEConfig, vocab_size: int) -> tuple[int, int, int, dict[str, int]]:
    """Count the parameters of a model in three ways, and its parts.

    Returns:
      (all, those that one token uses: all, but of each MoE layer K experts only; without embeddings (and an output head
      of its own), biases, gates and norms, which is how Hecate's table 1 counts; {group: parameters} over `GROUPS`).
    """
    by_group = dict.fromkeys(GROUPS, 0)
    for name, shape in leaf_shapes(config, moe, vocab_size).items():
        path = name.split("/")[1:]
        group = "embedding" if path[0] == "embedding" else path[2] if len(path) > 2 else ""
        group = MODULES.get(group, group)
        if name.startswith("bank"):
            group = "experts"
        elif "norm" in name:
            group = "norm"
        elif name.endswith("bias") or (group == "gate" and len(shape) < 3):
            group = "bias"
        elif path[-1] == "w_mix":
            group = "gate"
        by_group[group] += math.prod(shape)
    total = sum(by_group.values())
    chosen = sum(
        segment.config.moe_layers * segment.moe.top_k * config.model_dim * segment.config.hidden_dim
        for segment in with_experts(segments_of(config, moe))
    )
    active = total - by_group["experts"] + matrices_of(config.activation) * chosen
    return total, active, sum(by_group[group] for group in PAPER_GROUPS), by_group


def flops_per_token(
    config: ModelConfig, moe: MoEConfig, vocab_size: int, length: int, lora: LoraConfig
) -> tuple[int, int]:
    """Return the FLOPs of one token, (forward, training): three times the forward, whatever is recomputed.

    With adapters it is two times, because frozen matrices need no gradient; the adapters' own work is not counted.

    Two per parameter of every matrix that the token is multiplied with (attention, dense FFN, gate, K experts and the
    shared ones, the output head V M), and 2 H (Dh + Dv) Sq per block for attention's scores and their sum of values, of
    Dv features each, over all Sq positions: the causal half is counted too, as is usual. Norms, activations, softmax
    and look-ups are not counted.
    """
    _, active, _, by_group = parameter_counts(config, moe, vocab_size)
    outside = sum(by_group[name] for name in ("embedding", "norm", "bias"))
    matrices = active - outside + vocab_size * config.model_dim
    forward = 2 * matrices + 2 * config.layers * config.heads * (config.head_size + config.value_size) * length
    return forward, (2 if lora.rank else 3) * forward


def preceding(config: ModelConfig, length: int) -> dict[str, int]:
    """Return the sizes of what stands between two MoE layers, as `preceding_flops` takes them; length: Sq."""
    return {
        "model_dim": config.model_dim,
        "length": length,
        "moe_every": config.moe_every,
        "matrices": matrices_of(config.activation),
        "dense_hidden_dim": config.ffn_dim,
    }


MOMENTS = 2  # of AdamW


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes on the fullest device.

    Attributes:
      parameters: the master weights.
      optimizer: its state; AdamW's two moments by default.
      gradients: as the backward leaves them; twice where microbatches are summed.
      compute_weights: weights cast to the compute dtype, and what ZeRO-3 gathers at once.
      activations: the estimate.
      ema: the moving average of the parameters, where one is kept.
      replicas: parameters and gradients of a plan's replicas, 0 without a plan; overflow: what later passes hold.
      teacher: of a student, all that its teacher needs; 0 without one.
    """

    parameters: int
    optimizer: int
    gradients: int
    compute_weights: int
    activations: int
    ema: int = 0
    replicas: int = 0
    overflow: int = 0
    teacher: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    @property
    def at_most(self) -> int:
        """The total with twice the estimated part, as an upper bound."""
        return self.total + self.activations + self.overflow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The inputs of `device_bytes`.

    Attributes:
      model: on its mesh, an abstract one will do, with the attention that it will run (`resolve_attention`).
      length: Sq.
      batch_size: global sequences of a step.
      grad_accum_steps: microbatches of a step.
      ema: whether a moving average of the parameters is kept.
    """

    model: LanguageModel
    length: int
    batch_size: int
    grad_accum_steps: int
    ema: bool = False

    @property
    def group_tokens(self) -> int:
        """Tokens of an MP group in a microbatch."""
        return rows_of(self.model.config, self.model.roles, self.batch_size // self.grad_accum_steps) * self.length


def _held(shapes, specs, model: LanguageModel, dtype=None) -> int:
    """Return the bytes of all leaves that a device holds: pytrees of ShapeDtypeStructs and of their PartitionSpecs.

    Args:
      dtype: that leaves are copied to where they have another one; only the copies count then.
    """

    total = 0
    for leaf, spec in zip(jax.tree.leaves(shapes), jax.tree.structure(shapes).flatten_up_to(specs), strict=True):
        # None is float64 to a dtype that is compared with it
        if dtype is None or leaf.dtype != dtype:
            values = math.prod(model.roles.sharding(*spec).shard_shape(leaf.shape))
            total += jnp.dtype(dtype or leaf.dtype).itemsize * values
    return total


def device_bytes(
    sizes: Sizes, plan: Shapes | None = None, optimizer: int | None = None, teacher: Sizes | None = None
) -> DeviceBytes:
    """Return what one device needs for a training step.

    Parameters, gradients and optimizer state are exact: they follow the same partition specs as the run. Activations
    are an estimate: what autodiff saves of each block, the same once more for the block whose backward runs, and the
    logits of one chunk; against XLA's temporary bytes it is right within about a factor of 2.

    Args:
      optimizer: bytes of the optimizer's state on one device; None counts AdamW's two moments.
      plan: {segment: slots and buckets that the step is compiled for}. Whatever the routing, the step stays within
        them: a fuller bucket takes more passes, not more rows.
      teacher: of a student; its batch and length are the student's.
    """
    # Compared with CPU, float32, 1 and 8 devices, 4 to 16 layers, as long as the later passes of a layer save nothing
    # but their inputs. Left out: other temporaries, the buffers of collectives and fragmentation. Later passes are
    # those of the complete program, which optimistic steps run too.
    model = sizes.model
    shapes, layout = shapes_and_layout(model)
    trained = model.trained(shapes)
    moments = _held(trained, model.trained(layout.state), model)
    of_grads = model.trained({**layout.params, "bank": layout.grad_sink})
    grads = _held(trained, of_grads, model)
    # a microbatch's gradients of units and experts are added to their sum layer by layer, all others after the backward
    outer = [{n: leaf for n, leaf in of.get("dense", {}).items() if n != "units"} for of in (trained, of_grads)]
    outer = _held(*outer, model)
    cast, plan = 0, plan or {}
    if model.config.dtype != model.config.param_dtype:  # but where a named kernel reads the bank as it is
        named = {s.name: s.moe for s in model.expert_segments if s.moe.grouped_matmul != "auto"}
        split = layout.dp_stage == 3 and model.roles.size(model.roles.data) > 1
        read = {name for name, moe in named.items() if reads_as_stored(moe.grouped_matmul, plan.get(name), split)}
        banks = (shapes["bank"], layout.params["bank"])
        banks = ({name: of[name] for name in of if name not in read} for of in banks)
        cast = _held(*banks, model, model.config.dtype)
    replicas, overflow = _around_experts(sizes, plan)
    return DeviceBytes(
        parameters=_held(shapes, layout.params, model),
        optimizer=MOMENTS * moments if optimizer is None else optimizer,
        gradients=grads + (outer if sizes.grad_accum_steps > 1 else 0),
        compute_weights=cast + _gathered(model),
        activations=_activations(sizes, plan),
        ema=moments if sizes.ema else 0,
        replicas=replicas,
        overflow=overflow,
        teacher=0 if teacher is None else teacher_bytes(teacher),
    )


def teacher_bytes(sizes: Sizes) -> int:
    """Return what a student's teacher adds on one device: frozen parameters, and its forward.

    Its dense parameters are in their own dtype and its bank in the compute dtype, as `placed_shapes` has them. Of the
    forward, the estimate counts one unit, the final activations, and the logits of one chunk.
    """
    model, forward = sizes.model, 0
    shapes, layout = shapes_and_layout(model)
    bank = jax.tree.map(lambda leaf: leaf.update(dtype=model.config.dtype), shapes["bank"])
    held = _held({**shapes, "bank": bank}, layout.params, model)
    for segment in model.expert_segments:
        unit = {"layers": segment.config.moe_every, "remat": "block", "prefetch": "none", "refetch_replicas": False}
        own = dataclasses.replace(model, config=dataclasses.replace(segment.config, **unit), moe=segment.moe)
        forward = max(forward, _activations(dataclasses.replace(sizes, model=own), {}))
    return held + _gathered(model) + forward


def _gathered(model: LanguageModel) -> int:
    """Return the bytes of whole leaves that stage 3 holds at once: all outer ones, one unit, one layer's experts.

    Layers that are written out keep their experts for the backward; a block-wise scan gathers those of all at once.
    """
    roles, (shapes, layout), count = model.roles, shapes_and_layout(model), 0
    if model.zero_stage == 3 and roles.size(roles.dense) > 1:
        held = jax.tree.map(lambda leaf, wire: leaf.size * jnp.dtype(wire).itemsize, shapes["dense"], layout.wires)
        units = held.pop("units")
        most = max(sum(jax.tree.leaves(units[one.name])) // one.config.units for one in model.segments)
        count += (sum(jax.tree.leaves(held)) + most) // roles.size(roles.model)
    if layout.dp_stage == 3 and roles.size(roles.data) > 1:
        for segment in model.expert_segments:
            own, config, bank = segment.roles(roles), segment.config, shapes["bank"][segment.name]
            held = sum(leaf.size for leaf in bank.values()) // own.size(own.expert + own.expert_shard)
            held //= config.moe_layers if config.stack == "scan" and not config.is_block_wise else 1
            count += jnp.dtype(config.dtype).itemsize * held
    return count


def _around_experts(sizes: Sizes, plan: Shapes) -> tuple[int, int]:
    """Return the bytes of replicas, and of what later passes hold."""
    model, roles = sizes.model, sizes.model.roles
    param_itemsize, compute_itemsize = (
        jnp.dtype(own).itemsize for own in (model.config.param_dtype, model.config.dtype)
    )
    replicas, overflow = 0, 0
    matrices = matrices_of(model.config.activation)
    group_tokens = sizes.group_tokens // (2 if model.config.overlap == "halves" else 1)
    for segment in model.expert_segments:
        config, moe, own = segment.config, segment.moe, segment.roles(roles)
        shape = plan.get(segment.name)
        matrix = config.model_dim * config.hidden_dim // own.size(own.expert_shard)
        if shape is not None:
            # Parameters of layers in memory, and what one layer gets and returns: their gradients twice, for Agg, or
            # what Trans exchanges, whichever is more; both are not there at once. Parameters and what travels are in
            # the compute dtype, gradients in that of the parameters.
            parameters = shape.replica_slots * compute_itemsize * config.replica_layers
            bank = shapes_and_layout(model)[0]["bank"][segment.name]
            expert, of_trained = (
                sum(math.prod(leaf.shape[1:]) for leaf in of.values()) // own.size(own.expert_shard)
                for of in (bank, model.trained(bank))
            )
            gradients, travelling = 2 * shape.replica_slots * param_itemsize * of_trained, 0
            for transfer in (shape.ahead, shape.late):
                if transfer is not None:  # what it packs and what arrives; by node its own and of other nodes'
                    ends = transfer.offers + transfer.slots
                    by_node = max(ends, 2 * transfer.places / transfer.inside)
                    travelling += by_node if transfer.by_node else ends
            replicas += int(expert * parameters + max(gradients, expert * travelling * compute_itemsize))
        if find_schedule(moe.schedule).moves_tokens:
            layer = layer_sizes(moe, own, group_tokens * roles.size(roles.model), shape)
            buckets = layout_of(own, layer.bucket_rows(own.size(own.expert)))
            if layer.capacity is None and layer.most_passes(buckets.rows.far) > 1:
                # in branches of the backward the gradients of a layer's experts and replicas, of one pass and their
                # sum so far, and one pass' rows
                row = 3 * config.model_dim + (matrices - 1) * config.hidden_dim // own.size(own.expert_shard)
                groups = own.most_homes(moe.num_experts) + (shape.replica_slots if shape else 0)
                summed = 2 * param_itemsize * groups * matrices * matrix
                overflow = max(overflow, summed + 2 * compute_itemsize * buckets.total * row)
    return replicas, overflow


def _activations(sizes: Sizes, plan: Shapes) -> int:
    """Return the estimated bytes of activations of one microbatch on one device.

    They are what each unit saves, once more all of the unit whose backward runs, and the logits of one chunk.
    """
    whole, roles = sizes.model.config, sizes.model.roles
    item, model, dim = jnp.dtype(whole.dtype).itemsize, roles.size(roles.model), whole.model_dim
    tokens = sizes.group_tokens
    saved, running = 0.0, 0.0
    for segment in sizes.model.segments:
        config, moe, own_roles = segment.config, segment.moe, segment.roles(roles)
        shape = plan.get(segment.name)
        matrices = matrices_of(config.activation) - 1
        masks = (4 if config.attention == "cudnn" else 1) * sizes.length if config.document_mask else 0
        own = dim / model if config.sequence_parallel else dim  # of norms and the residual stream
        gathered = dim if find_schedule(moe.schedule).gates_group else own
        mixed = config.heads * config.value_size / model
        qkv = (config.heads + config.key_value_heads) * config.head_size / model
        qkv += config.key_value_heads * config.value_size / model
        if config.kv_lora_rank:  # latents, before and after their norms
            qkv += 2 * (config.kv_lora_rank + (config.q_lora_rank or 0)) * own / dim + config.qk_rope_head_dim
        attention = item * (5 * own + qkv + mixed)
        hidden = item * (3 * own + matrices * config.ffn_dim / model)
        rows = moe.top_k
        if moe.capacity_factor is not None:
            rows = moe.top_k * moe.capacity_factor
        elif own_roles.size(own_roles.expert) > 1:
            layer = layer_sizes(moe, own_roles, tokens * model, shape)
            rows = moe.top_k * moe.bucket_slack
            if layer.planned_rows is not None:
                rows = layout_of(own_roles, layer.planned_rows).total / tokens
            elif moe.overflow_chance:
                rows = layout_of(own_roles, layer.bucket_rows(own_roles.size(own_roles.expert))).total / tokens
        inside = matrices * config.hidden_dim / own_roles.size(own_roles.expert_shard)
        experts = item * (2 * own + gathered + rows * (3 * dim + inside))
        shared = moe.shared_ffn_dim(config.hidden_dim) / model
        outside = item * (own + matrices * shared) if shared else 0

        dense, has_experts = config.moe_every != 1, segment.has_experts
        unit = (attention + experts + outside if has_experts else 0) + (attention + hidden if dense else 0)
        block = item * own * (2 if config.is_block_wise else 1)
        residual = {
            "none": unit,
            "block": block,
            "block_but_attention": block + (item * mixed * (dense + has_experts) if config.attention == "cudnn" else 0),
            "dots": item * (dense + has_experts) * (dim + own + qkv)
            + (item * (dim + config.ffn_dim / model) if dense else 0)
            + (item * (dim + shared) if shared and has_experts else 0),
        }[config.remat]
        saved, running = saved + segment.config.units * residual, max(running, unit + masks)
    logits = 2 * max(4, item) * min(whole.loss_chunk, tokens) * sizes.model.vocab_size
    return int(tokens * (saved + running)) + logits
