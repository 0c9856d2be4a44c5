"""How large a model is and what it costs, in closed form: every leaf's shape, parameter counts, FLOPs, bytes of a step.

No array is made and no device is needed; a test compares the table of leaves with the tree that `LanguageModel` makes.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jax.sharding import PartitionSpec

from moe_jax.cluster.layer_seconds import HalfWork, matrices_of, preceding_flops
from moe_jax.kernels.float8_blocks import E4M3
from moe_jax.models.config import ModelConfig
from moe_jax.models.segments import Segment, segments_of, with_experts
from moe_jax.moe.build import layer_sizes
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.routers import build_router
from moe_jax.moe.schedules.contract import layout_of, schedule_record
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.sharding import dense_specs, expert_specs
from moe_jax.planning.plan_shape import PlanShape

GROUPS: tuple[str, ...] = (
    "embedding",
    "attention",
    "feed_forward",
    "shared_experts",
    "gate",
    "norm",
    "bias",
    "experts",
)
PAPER_GROUPS = ("attention", "feed_forward", "shared_experts", "experts")


@dataclasses.dataclass(frozen=True)
class LeafSize:
    """One leaf of the parameter tree.

    Attributes:
      path: keys, as in the tree: ('dense', 'units', 'segment_0', 'attention', 'qkv').
      shape: global; leaves of units and bank are stacked over units or slots in their first dim.
      group: one of `GROUPS`.
      model_dim: the dim that a model-parallel group splits, not counting the stacked one; -1 for none.
      operand: it is read in the compute dtype alone, so ZeRO-3 gathers it in that.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    group: str
    model_dim: int = -1
    operand: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        """True for a dense leaf with a leading layer dim."""
        return self.path[:2] == ("dense", "units")


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Three ways to count, and the parts.

    Attributes:
      total: all parameters.
      active: those that one token uses: all, but of each MoE layer K experts only.
      as_papers: without embeddings (and an output head of its own), biases, gates and norms, which is how Hecate's
        table 1 counts.
      by_group: group -> parameters, over `GROUPS`.
    """

    total: int
    active: int
    as_papers: int
    by_group: dict[str, int]


def _norm(path: tuple[str, ...], stack: tuple[int, ...], config: ModelConfig) -> list[LeafSize]:
    names = ("scale",) if config.norm == "rms" else ("scale", "bias")
    return [LeafSize((*path, "norm", name), (*stack, config.model_dim), "norm") for name in names]


def _attention(path: tuple[str, ...], config: ModelConfig) -> list[LeafSize]:
    units, dim, heads, head_size = config.units, config.model_dim, config.heads, config.head_size
    leaves = _norm(path, (units,), config)
    for name, shape in config.qkv_matrices.items():
        shape = (*shape, head_size)
        leaves.append(LeafSize((*path, name), (units, dim, *shape), "attention", len(shape) - 1, operand=True))
        if config.attention_bias:
            leaves.append(LeafSize((*path, f"{name}_bias"), (units, *shape), "bias", model_dim=len(shape) - 2))
    if config.qk_norm != "none":
        for name, own in (("q_norm", heads), ("k_norm", config.key_value_heads)):
            shape, split = ((own, head_size), 0) if config.qk_norm == "width" else ((head_size,), -1)
            leaves.append(LeafSize((*path, name, "scale"), (units, *shape), "norm", model_dim=split))
    leaves.append(LeafSize((*path, "out"), (units, heads, head_size, dim), "attention", 0, operand=True))
    if config.attention_bias:
        leaves.append(LeafSize((*path, "out_bias"), (units, dim), "bias"))
    return leaves


def _feed_forward(path: tuple[str, ...], config: ModelConfig) -> list[LeafSize]:
    units, dim, hidden = config.units, config.model_dim, config.ffn_dim
    names = ("w_in", "w_gate") if config.activation == "swiglu" else ("w_in",)
    leaves = _norm(path, (units,), config)
    leaves += [LeafSize((*path, name), (units, dim, hidden), "feed_forward", 1, operand=True) for name in names]
    leaves.append(LeafSize((*path, "w_out"), (units, hidden, dim), "feed_forward", 0, operand=True))
    if config.ffn_bias:
        leaves.append(LeafSize((*path, "in_bias"), (units, hidden), "bias", model_dim=0))
        leaves.append(LeafSize((*path, "out_bias"), (units, dim), "bias"))
    return leaves


def _shared_experts(path: tuple[str, ...], config: ModelConfig, moe: MoEConfig) -> list[LeafSize]:
    layers, dim, hidden = config.moe_layers, config.model_dim, moe.shared_ffn_dim(config.hidden_dim)
    if not hidden:
        return []
    names = ("w_in", "w_gate") if config.activation == "swiglu" else ("w_in",)
    leaves = [LeafSize((*path, name), (layers, dim, hidden), "shared_experts", 1, operand=True) for name in names]
    leaves.append(LeafSize((*path, "w_out"), (layers, hidden, dim), "shared_experts", 0, operand=True))
    if moe.residual == "learned":
        leaves.append(LeafSize((*path, "w_mix"), (layers, dim, 2), "gate"))
    return leaves


def leaf_sizes(config: ModelConfig, moe: MoEConfig, vocab_size: int) -> list[LeafSize]:
    """Return every leaf of the parameter tree {'dense': ..., 'bank': ...}."""
    segments, dim = segments_of(config, moe), config.model_dim
    learned = config.positions == "learned"
    leaves = [LeafSize(("dense", "embedding", "tokens"), (vocab_size, dim), "embedding", operand=not learned)]
    if learned:
        leaves.append(LeafSize(("dense", "embedding", "positions"), (config.max_length, dim), "embedding"))
    if not config.tied_head:
        leaves.append(LeafSize(("dense", "embedding", "head"), (vocab_size, dim), "embedding", operand=True))
    for segment in segments:
        leaves += _of_units(("dense", "units", segment.name), segment)
    leaves += _norm(("dense",), (), config)
    for segment in with_experts(segments):
        leaves += _of_bank(("bank", segment.name), segment)
    return leaves


def _of_units(path: tuple[str, ...], segment: Segment) -> list[LeafSize]:
    config, leaves = segment.config, []
    if config.moe_every != 1:
        leaves += _attention((*path, "dense_attention"), config) + _feed_forward((*path, "dense"), config)
    if segment.has_experts:
        gate = (segment.units, config.model_dim, segment.moe.num_experts)
        leaves += _attention((*path, "attention"), config) + _norm((*path, "gate"), gate[:1], config)
        leaves.append(LeafSize((*path, "gate", "w_gate"), gate, "gate"))
        for name, shape in build_router(segment.moe).leaves(config.model_dim).items():
            group = "gate" if len(shape) > 1 else "bias"
            leaves.append(LeafSize((*path, "gate", name), (segment.units, *shape), group))
        leaves += _shared_experts((*path, "shared"), config, segment.moe)
    return leaves


def _of_bank(path: tuple[str, ...], segment: Segment) -> list[LeafSize]:
    config = segment.config
    slots, dim, hidden = config.moe_layers * segment.moe.num_experts, config.model_dim, config.hidden_dim
    names = ("w_in", "w_gate") if config.activation == "swiglu" else ("w_in",)
    leaves = [LeafSize((*path, name), (slots, dim, hidden), "experts") for name in names]
    return [*leaves, LeafSize((*path, "w_out"), (slots, hidden, dim), "experts")]


def parameter_counts(config: ModelConfig, moe: MoEConfig, vocab_size: int) -> ParameterCounts:
    """Count the parameters of a model."""
    by_group = dict.fromkeys(GROUPS, 0)
    for leaf in leaf_sizes(config, moe, vocab_size):
        by_group[leaf.group] += leaf.size
    total = sum(by_group.values())
    idle = by_group["experts"] - _chosen(config, moe)
    return ParameterCounts(
        total=total,
        active=total - idle,
        as_papers=sum(by_group[group] for group in PAPER_GROUPS),
        by_group=by_group,
    )


def _chosen(config: ModelConfig, moe: MoEConfig) -> int:
    """Return the parameters of the experts that one token meets in all MoE layers."""
    return sum(
        leaf.size // segment.moe.num_experts * segment.moe.top_k
        for segment in with_experts(segments_of(config, moe))
        for leaf in _of_bank((), segment)
    )


def choices_per_token(config: ModelConfig, moe: MoEConfig) -> int:
    """Return how many experts one token chooses, all layers together."""
    return sum(part.moe.top_k * part.config.moe_layers for part in with_experts(segments_of(config, moe)))


def forward_flops_per_token(config: ModelConfig, moe: MoEConfig, vocab_size: int, length: int) -> int:
    """Return the forward FLOPs of one token.

    Two per parameter of every matrix that the token is multiplied with (attention, dense FFN, gate, K experts and the
    shared ones, the output head V M), and 4 H Dh Sq per block for attention's scores and their sum of values, over all
    Sq positions: the causal half is counted too, as is usual. Norms, activations, softmax and look-ups are not counted.
    """
    groups = parameter_counts(config, moe, vocab_size).by_group
    chosen = _chosen(config, moe)
    always = sum(groups[name] for name in ("attention", "feed_forward", "shared_experts", "gate"))
    matrices = always + chosen + vocab_size * config.model_dim
    return 2 * matrices + 4 * config.layers * config.heads * config.head_size * length


def training_flops_per_token(config: ModelConfig, moe: MoEConfig, vocab_size: int, length: int) -> int:
    """Return the model FLOPs of one token in training: three times the forward, whatever is recomputed."""
    return 3 * forward_flops_per_token(config, moe, vocab_size, length)


def flops_before_moe(config: ModelConfig, length: int) -> int:
    """Return the forward FLOPs of one token between two MoE layers; length: Sq."""
    return preceding_flops(
        model_dim=config.model_dim,
        length=length,
        moe_every=config.moe_every,
        matrices=matrices_of(config.activation),
        dense_hidden_dim=config.ffn_dim,
    )


def half_work(config: ModelConfig, moe: MoEConfig, tokens: int, length: int) -> HalfWork:
    """Return what a device computes of a layer for one half of its tokens, beside the other half's exchanges.

    Args:
      tokens: of this device in one half; length: Sq.
    """
    expert = 2 * matrices_of(config.activation) * config.model_dim * config.hidden_dim
    return HalfWork(
        attention=tokens * flops_before_moe(config, length),
        experts=tokens * moe.top_k * expert,
        recompute=config.recomputes,
    )


MOMENTS = 2  # of AdamW
# policies of jax.checkpoint, and which value of `ModelConfig.remat` saves about as much
LIKE = {
    "everything_saveable": "none",
    "nothing_saveable": "block",
    "dots_saveable": "dots",
    "dots_with_no_batch_dims_saveable": "dots",
}


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
      float8: copies of experts' weights around their matmuls in float8; 0 without `MoEConfig.expert_dtype`.
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
    float8: int = 0

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
      config, moe: the model, with the attention that it will run (`resolve_attention`); 'auto' counts as 'xla'.
      vocab_size: V.
      length: Sq.
      batch_size: global sequences of a step.
      grad_accum_steps: microbatches of a step.
      zero_stage: of the dense parameters.
      expert_zero_stage: of the experts under the `dp` schedule.
      ema: whether a moving average of the parameters is kept.
    """

    config: ModelConfig
    moe: MoEConfig
    vocab_size: int
    length: int
    batch_size: int
    grad_accum_steps: int
    zero_stage: int
    expert_zero_stage: int
    ema: bool = False


def moment_layout(sizes: Sizes, roles: Roles) -> tuple[dict, dict]:
    """Return two trees like the parameters: shapes (tuples), and PartitionSpecs of moments."""
    shapes: dict = {}
    specs: dict = {}
    dense = _dense_leaves(sizes)
    _, state, _ = _dense_specs(dense, sizes, roles)
    for path, leaf in dense.items():
        _put(shapes, path, leaf.shape)
        _put(specs, path, state[path])
    for bank in _banks(sizes, roles):
        for name, leaf in bank.leaves.items():
            _put(shapes, leaf.path, leaf.shape)
            _put(specs, leaf.path, bank.state[name])
    return shapes, specs


def _put(tree: dict, path: tuple[str, ...], value) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bank:
    """The bank of one segment: its leaves by name, and the PartitionSpecs of parameters, gradients and moments.

    Attributes:
      sizes, roles: as of a model of this segment alone.
    """

    segment: Segment
    sizes: Sizes
    roles: Roles
    leaves: dict[str, LeafSize]
    params: dict
    grad_sink: dict
    state: dict

    def held(self, specs: dict) -> int:
        """Return the values of the bank that one device holds under these specs."""
        return sum(_part(self.leaves[name].shape, spec, self.roles) for name, spec in specs.items())


def _dense_leaves(sizes: Sizes) -> dict[tuple, LeafSize]:
    leaves = leaf_sizes(sizes.config, sizes.moe, sizes.vocab_size)
    return {leaf.path: leaf for leaf in leaves if leaf.path[0] == "dense"}


def _banks(sizes: Sizes, roles: Roles) -> list[_Bank]:
    """Return the bank of each segment with experts."""
    segments = with_experts(segments_of(sizes.config, sizes.moe))
    found = []
    for segment in segments:
        own = segment.roles(roles)
        path = ("bank", segment.name)
        leaves = {
            leaf.path[-1]: leaf
            for leaf in leaf_sizes(sizes.config, sizes.moe, sizes.vocab_size)
            if leaf.path[:-1] == path
        }
        shapes = {name: leaf.shape for name, leaf in leaves.items()}
        params, grad_sink, state = expert_specs(shapes, own, sizes.zero_stage, _dp_stage(sizes))
        part = dataclasses.replace(sizes, config=segment.config, moe=segment.moe)
        found.append(
            _Bank(
                segment=segment, sizes=part, roles=own, leaves=leaves, params=params, grad_sink=grad_sink, state=state
            )
        )
    return found


def _dense_specs(dense: dict[tuple, LeafSize], sizes: Sizes, roles: Roles):
    return dense_specs(
        {path: leaf.shape for path, leaf in dense.items()},
        {path: leaf.model_dim for path, leaf in dense.items()},
        {path: leaf.stacked for path, leaf in dense.items()},
        roles,
        sizes.zero_stage,
    )


def _dp_stage(sizes: Sizes) -> int | None:
    return None if schedule_record(sizes.moe.schedule).moves_tokens else sizes.expert_zero_stage


def device_bytes(
    sizes: Sizes, roles: Roles, plan: dict[str, PlanShape] | None = None,
    optimizer: int | None = None, teacher: Sizes | None = None,
) -> DeviceBytes:  # fmt: skip
    """Return what one device needs for a training step on this mesh; an abstract one will do.

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
    config = sizes.config
    dense, banks = _dense_leaves(sizes), _banks(sizes, roles)
    params, state, _ = _dense_specs(dense, sizes, roles)
    param_itemsize, compute_itemsize = np.dtype(config.param_dtype).itemsize, itemsize(config.dtype)

    def held(specs, bank_specs: str) -> int:
        parts = sum(_part(dense[path].shape, spec, roles) for path, spec in specs.items())
        return parts + sum(bank.held(getattr(bank, bank_specs)) for bank in banks)

    sums = 1 if sizes.grad_accum_steps == 1 else 2
    local_bank = sum(bank.held(bank.params) for bank in banks)
    compute_weights = local_bank * compute_itemsize if compute_itemsize != param_itemsize else 0
    planned = [(bank, None if plan is None else plan[bank.segment.name]) for bank in banks]
    return DeviceBytes(
        parameters=param_itemsize * held(params, "params"),
        optimizer=param_itemsize * MOMENTS * held(state, "state") if optimizer is None else optimizer,
        gradients=param_itemsize * sums * held(params, "grad_sink"),
        compute_weights=compute_weights + _gathered(dense, banks, sizes, roles, param_itemsize, compute_itemsize),
        activations=_activations(sizes, roles, compute_itemsize, plan),
        ema=param_itemsize * held(state, "state") if sizes.ema else 0,
        replicas=sum(_replicas(b.sizes, b.roles, own, compute_itemsize) for b, own in planned if own is not None),
        overflow=max(
            (_overflow(b.sizes, b.roles, own, compute_itemsize, b.held(b.params)) for b, own in planned), default=0
        ),
        teacher=0 if teacher is None else teacher_bytes(teacher, roles),
        float8=_float8_copies(planned, compute_itemsize),
    )


def teacher_bytes(sizes: Sizes, roles: Roles) -> int:
    """Return what a student's teacher adds on one device: frozen parameters, and its forward.

    Its dense parameters are in their own dtype and its bank in the compute dtype, as `Teacher.held_params` has them. Of
    the forward, the estimate counts one unit, the final activations, and the logits of one chunk.
    """
    dense, banks = _dense_leaves(sizes), _banks(sizes, roles)
    params, *_ = _dense_specs(dense, sizes, roles)
    param_itemsize = np.dtype(sizes.config.param_dtype).itemsize
    compute_itemsize = itemsize(sizes.config.dtype)
    held = param_itemsize * sum(_part(dense[path].shape, spec, roles) for path, spec in params.items())
    held += compute_itemsize * sum(bank.held(bank.params) for bank in banks)
    gathered = _gathered(dense, banks, sizes, roles, param_itemsize, compute_itemsize)
    forward = 0
    for bank in banks:
        config = bank.segment.config
        unit = {"layers": config.moe_every, "remat": "block", "prefetch": "none", "refetch_replicas": False}
        one_unit = dataclasses.replace(bank.sizes, config=dataclasses.replace(config, **unit))
        forward = max(forward, _activations(one_unit, roles, compute_itemsize, None))
    return held + gathered + forward


def itemsize(dtype: str) -> int:
    """Return the bytes of one value of a compute dtype."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _part(shape: tuple[int, ...], spec: PartitionSpec, roles: Roles) -> int:
    """Return the values of a global array that one device holds; each split dim divides evenly."""
    parts = math.prod(roles.size(axes if isinstance(axes, tuple) else (axes,)) for axes in spec if axes)
    return math.prod(shape) // parts


def _gathered(
    dense: dict[tuple, LeafSize], banks: list[_Bank], sizes: Sizes, roles: Roles, param_itemsize: int,
    compute_itemsize: int,
) -> int:  # fmt: skip
    """Return the bytes of whole leaves that stage 3 holds at once: all outer ones, one unit, one layer's experts."""
    count = 0
    if sizes.zero_stage == 3 and roles.size(roles.dense) > 1:
        size = {
            path: leaf.size * (compute_itemsize if leaf.operand else param_itemsize) for path, leaf in dense.items()
        }
        outer = sum(size[path] for path, leaf in dense.items() if not leaf.stacked)
        segments, units = segments_of(sizes.config, sizes.moe), []
        for segment in segments:
            path = ("dense", "units", segment.name)
            units.append(sum(own // segment.units for at, own in size.items() if at[: len(path)] == path))
        count += (outer + max(units)) // roles.size(roles.model)
    if _dp_stage(sizes) == 3 and roles.size(roles.data) > 1:
        layers = [sum(leaf.size for leaf in b.leaves.values()) // b.segment.config.moe_layers for b in banks]
        count += compute_itemsize * max(layers)
    return count


def _replicas(sizes: Sizes, roles: Roles, plan: PlanShape, compute_itemsize: int) -> int:
    """Return the bytes of a segment's replicas: parameters of layers in memory, and what one layer gets and returns.

    That is their gradients twice, for Agg, or what Trans exchanges, whichever is more: both are not there at once.
    Parameters and what travels are in the compute dtype, gradients in that of the parameters.
    """
    held = plan.replica_slots * compute_itemsize * sizes.config.replica_layers
    gradients = 2 * plan.replica_slots * itemsize(sizes.config.param_dtype)
    travelling = 0
    for transfer in (plan.ahead, plan.late):
        if transfer is not None:  # what it packs and what arrives; by node what it has of its own and of other nodes'
            ends = transfer.offers + transfer.slots
            travelling += max(ends, 2 * transfer.places / transfer.inside) if transfer.by_node else ends
    return int(_expert_elements(sizes, roles) * (held + max(gradients, travelling * compute_itemsize)))


def _expert_elements(sizes: Sizes, roles: Roles) -> int:
    """Return the parameters of an expert's matrices on one device."""
    config = sizes.config
    matrices = 3 if config.activation == "swiglu" else 2
    return matrices * config.model_dim * config.hidden_dim // roles.size(roles.expert_shard)


def _float8_copies(planned: list[tuple[_Bank, PlanShape | None]], compute_itemsize: int) -> int:
    """Return the most bytes that quantising experts' weights takes beside the bank.

    Each matrix of a layer, all groups of a device together, is gathered, quantised and brought back, in float32 where
    the compute dtype is smaller and no kernel multiplies 8 bits; one of them at a time is also transposed, looked at as
    integers, and copied once more (by jax 0.12). A scan holds the copies of one matrix. Layers that are written out may
    hold those of all: they depend on parameters alone, so the compiler is free to make them early, and shares those of
    forward and backward.
    """
    brought_back, held, largest = max(4, compute_itemsize), 0, 0
    for bank, plan in planned:
        config, moe = bank.sizes.config, bank.sizes.moe
        if moe.expert_dtype != E4M3:
            continue
        groups = moe.num_experts // bank.roles.size(bank.roles.expert) if plan is None else plan.slots
        elements = groups * config.model_dim * config.hidden_dim // bank.roles.size(bank.roles.expert_shard)
        one = elements * (compute_itemsize + 1 + brought_back)
        if config.stack == "scan":
            held = max(held, one)
        else:
            held += config.moe_layers * (3 if config.activation == "swiglu" else 2) * one
        largest = max(largest, elements)
    return held + 3 * brought_back * largest


def _overflow(sizes: Sizes, roles: Roles, plan: PlanShape | None, compute_itemsize: int, local_bank: int) -> int:
    """Return the bytes that later passes hold: copies in branches of the backward, and one pass' rows.

    Copied are the bank, and the parameters and gradients of a layer's replicas, twice each.
    """
    if not schedule_record(sizes.moe.schedule).moves_tokens:
        return 0
    tokens = (
        sizes.batch_size // sizes.grad_accum_steps * sizes.length // roles.size(roles.dense) * roles.size(roles.model)
    )
    layer = layer_sizes(sizes.moe, roles, tokens, plan)
    ep_size = roles.size(roles.expert)
    layout = layout_of(roles, layer.bucket_rows(ep_size))
    if layer.capacity is not None or layer.most_passes(layout.rows.far) == 1:
        return 0
    matrices = 2 if sizes.config.activation == "swiglu" else 1
    row = 3 * sizes.config.model_dim + matrices * sizes.config.hidden_dim // roles.size(roles.expert_shard)
    replicas = 0 if plan is None else plan.replica_slots
    copied = local_bank + 2 * replicas * _expert_elements(sizes, roles)
    return 2 * compute_itemsize * copied + 2 * compute_itemsize * layout.total * row


def _activations(sizes: Sizes, roles: Roles, compute_itemsize: int, plan) -> int:
    """Return the estimated bytes of activations of one microbatch on one device.

    They are what each unit saves, once more all of the unit whose backward runs, and the logits of one chunk.
    """
    segments = segments_of(sizes.config, sizes.moe)
    tokens = sizes.batch_size // sizes.grad_accum_steps * sizes.length // roles.size(roles.dense)
    saved, running = 0.0, 0.0
    for segment in segments:
        part = dataclasses.replace(sizes, config=segment.config, moe=segment.moe)
        own_plan = plan[segment.name] if plan is not None and segment.has_experts else None
        residual, unit = _unit_bytes(part, segment.roles(roles), compute_itemsize, own_plan, tokens)
        saved, running = saved + segment.units * residual, max(running, unit)
    logits = 2 * max(4, compute_itemsize) * min(sizes.config.loss_chunk, tokens) * sizes.vocab_size
    return int(tokens * (saved + running)) + logits


def _unit_bytes(
    sizes: Sizes, roles: Roles, compute_itemsize: int, plan: PlanShape | None, tokens: int
) -> tuple[float, float]:
    """Return the bytes per token that a unit of one segment saves for its backward, and all that it computes."""
    config, moe = sizes.config, sizes.moe
    model, shard, dim = roles.size(roles.model), roles.size(roles.expert_shard), config.model_dim
    matrices = 2 if config.activation == "swiglu" else 1

    masks = (4 if config.attention == "cudnn" else 1) * sizes.length if config.document_mask else 0

    own = dim / model if config.sequence_parallel else dim  # of norms and the residual stream
    gathered = dim if schedule_record(moe.schedule).gates_group else own

    scores = config.heads * sizes.length / model if config.attention != "cudnn" else 0
    mixed = config.heads * config.head_size / model
    qkv = mixed + 2 * config.key_value_heads * config.head_size / model
    attention = compute_itemsize * (5 * own + qkv + mixed) + (4 + compute_itemsize) * scores
    hidden = compute_itemsize * (3 * own + matrices * config.ffn_dim / model)
    rows = moe.top_k
    if moe.capacity_factor is not None:
        rows = moe.top_k * moe.capacity_factor
    elif roles.size(roles.expert) > 1:
        layer = layer_sizes(moe, roles, tokens * model, plan)
        rows = moe.top_k * moe.bucket_slack
        if layer.planned_rows is not None:
            rows = layout_of(roles, layer.planned_rows).total / tokens
        elif moe.overflow_chance:
            rows = layout_of(roles, layer.bucket_rows(roles.size(roles.expert))).total / tokens
    experts = compute_itemsize * (2 * own + gathered + rows * (3 * dim + matrices * config.hidden_dim / shard))
    shared = moe.shared_ffn_dim(config.hidden_dim) / model
    beside = compute_itemsize * (own + matrices * shared) if shared else 0

    dense, has_experts = config.moe_every != 1, config.moe_every > 0
    unit = (attention + experts + beside if has_experts else 0) + (attention + hidden if dense else 0)
    residual = {
        "none": unit,
        "block": compute_itemsize * own * (2 if config.block_wise.is_block_wise else 1),
        "dots": compute_itemsize * (dense + has_experts) * (dim + own + qkv)
        + (compute_itemsize * (dim + config.ffn_dim / model) if dense else 0)
        + (compute_itemsize * (dim + shared) if shared and has_experts else 0),
    }[LIKE.get(config.remat, config.remat)]
    return residual, unit + masks
