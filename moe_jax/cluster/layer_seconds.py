"""What one MoE layer moves and computes under each schedule, and its seconds by a cluster's fits.

Sizes count elements as a collective's formula does: what a device hands in, for an all-gather what it gets. Integers
(counts, routes, the flag of an overflow) are apart, `index_transfers`; sums of gradients over data-parallel devices are
not in here. Sums over the shards of an expert (`deepspeed`, 'coordinated') count as numbers of the compute dtype; they
travel in float32: of bfloat16 they are half of what travels.

Buckets of three lengths (`parallel/bucket_rows.py`, own >= node >= far) are exchanged in pieces: the first `far` rows
of each by all devices, C = far; what those for the n members of the own node have more inside the node; what the own
one has more inside its ESP group. A device's own blocks stay where they are: it sends (D - n) Ns far M elements to
other nodes and ((n - 1) Ns node + (Ns - 1) own) M inside its node, the backward as many again.

Seconds are of a synchronous layer, forward and backward: nothing overlaps, as on a CPU. Where whole layers were timed
(fit `layer:SCHEDULE`), communication and computation are scaled by what they cost there.

Letters: docs/notation.md; Sq tokens of a sequence; C counts the rows of one device's N / N_MP tokens under s1, pairwise
and dp, and of all N under deepspeed and s2. With a capacity, D C is the papers' E C.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence

from moe_jax.cluster.cluster import Cluster
from moe_jax.cluster.collectives import overlap_bound, uniform_seconds
from moe_jax.cluster.fits import fit_name, strided_name
from moe_jax.errors import UserError


class HalfWork(typing.NamedTuple):
    """What a device computes of a layer for one half of its tokens.

    Attributes:
      attention: FLOPs of a forward of what precedes the MoE layer; its backward takes twice that.
      experts: FLOPs of a forward of the experts, even loads; shared experts are not counted.
      recompute: whether the backward computes the MoE layer again.
    """

    attention: float
    experts: float
    recompute: bool = False


def matrices_of(activation: str) -> int:
    """Return the matrices of M x F in an expert or a dense FFN: three with SwiGLU, two else."""
    return 3 if activation == "swiglu" else 2


def preceding_flops(*, model_dim: int, length: int, moe_every: int, matrices: int, dense_hidden_dim: int) -> int:
    """Return the forward FLOPs of one token between two MoE layers.

    That is attention (projections, scores, mixing) and, where every second block is MoE, the block before it too, with
    its dense FFN.

    Args:
      length: Sq; matrices, dense_hidden_dim: of the dense FFN.
    """
    attention = 8 * model_dim**2 + 4 * length * model_dim
    dense = 2 * matrices * model_dim * dense_hidden_dim
    return moe_every * attention + (moe_every - 1) * dense


class Transfer(typing.NamedTuple):
    """Hold one collective: its kind, the group it spans, elements per call, calls, and an element's bytes.

    The latter are 0 for numbers of the compute dtype.
    """

    collective: str
    group: str
    elements: int
    calls: int = 1
    item: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Hold the sizes that decide what is communicated; see the letters above.

    With `split_tokens` each device of an MP group has a part of its tokens, before the layer and after it. `groups` is
    Ng of `pairwise`. `rows` are C, or `far` where buckets differ: then `more_in_node` is node - far, `more_own` own -
    node, and `members_in_node` the EP members of a node. `sent_bytes` are those of a row on its way to experts where it
    travels as bytes (`MoEConfig.dispatch_dtype`), else 0.
    """

    tokens: int
    model_dim: int
    rows: int
    ep_size: int
    esp_size: int = 1
    mp_size: int = 1
    top_k: int = 1
    experts: int = 1
    split_tokens: bool = False
    groups: int = 1
    more_in_node: int = 0
    more_own: int = 0
    members_in_node: int = 1
    sent_bytes: int = 0

    @property
    def near_rows(self) -> int:
        """Rows that a device's buckets have beyond the first C of each."""
        return self.members_in_node * self.more_in_node + self.more_own

    @property
    def sent_rows(self) -> int:
        """R, rows of all buckets of one source."""
        return self.ep_size * self.rows + self.near_rows

    def near(self, parts: int = 1) -> list[Transfer]:
        """Return what travels of longer buckets out and back, in the node and among the shards of an EP member.

        Args:
          parts: devices that share a bucket.
        """
        unit = self.esp_size * self.model_dim // parts
        inside = Transfer("all_to_all", "node", self.members_in_node * self.more_in_node * unit, 2)
        own = Transfer("all_to_all", "expert_shard", self.more_own * unit, 2)
        return [transfer for transfer in (inside, own) if transfer.elements]

    @property
    def x(self) -> int:
        """Elements of one EP&ESP all-to-all of s1 (rows of one device) or deepspeed (rows of an MP group)."""
        return self.ep_size * self.rows * self.model_dim * self.esp_size

    def whole(self, in_parts: bool) -> list[Transfer]:
        """Return the MP group's all-gather of its tokens, once forward and once backward, where there is one.

        Args:
          in_parts: the schedule works on parts of the tokens, else on replicated tokens.
        """
        return [] if in_parts == self.split_tokens else [Transfer("all_gather", "model", self.tokens * self.model_dim)]


_BOTH = "expert+expert_shard"
_GROUP, _RING = "pairwise_group", "pairwise_ring"  # P / Ng neighbours of the EP&ESP group; the Ng devices in one place


def layer_transfers(
    schedule: str, shape: LayerShape, gather: str = "saa", transport: str = "all_to_all", local: int = 1
) -> tuple[list[Transfer], list[Transfer]]:
    """Return (forward, backward) transfers of one device in one layer and pass.

    Args:
      schedule: a name in `FORMULAS`; 'parm' is what it chooses.
      shape: sizes; gather: how s2 returns, 'saa' or 'aas'.
      transport: how an all-to-all is carried out, unless the schedule has transfers of its own.
      local: for 'two_level', members of its group that share a node.

    Source: Parm, sections III and IV, restated for buckets; FasterMoE, section 4.2.
    """
    if gather not in ("saa", "aas"):
        raise UserError(f"gather {gather!r} has no volume formula; say which of 'saa' and 'aas' 'auto' is")
    formulas = formulas_of(schedule)
    forward, backward = (_present(transfers, shape) for transfers in formulas.transfers(shape, gather))
    if not formulas.carried:
        return forward, backward
    if shape.sent_bytes and transport == "coordinated":
        forward = _as_bytes(_carried(forward, shape, transport, local), shape, ("all_gather",))
    elif shape.sent_bytes:
        forward = _carried(_as_bytes(forward, shape), shape, transport, local)
    else:
        forward = _carried(forward, shape, transport, local)
    return forward, _carried(backward, shape, transport, local)


def index_transfers(
    schedule: str, shape: LayerShape, most_passes: int = 1, transport: str = "all_to_all"
) -> list[Transfer]:
    """Return the transfers of int32 in one layer and pass; they have no backward.

    These are what the schedule itself sends ahead of its rows and, once per layer where there may be several passes,
    the flag by which all devices agree on their number ('all').
    """
    out = formulas_of(schedule).indices(shape)
    flag = [Transfer("all_reduce", "all", 1)] if most_passes > 1 else []
    if transport == "coordinated":  # counts travel as the rows do
        out = [part for transfer in out for part in _by_place(transfer, shape)]
    return _present(out, shape) + flag


def _group_sizes(shape: LayerShape) -> dict[str, int]:
    sizes = {"model": shape.mp_size, "expert": shape.ep_size, "expert_shard": shape.esp_size}
    both = shape.ep_size * shape.esp_size
    spanned = max(1, shape.mp_size // shape.esp_size)  # EP members of an MP group
    sizes |= {_BOTH: both, "model_expert": spanned, "expert_across": shape.ep_size // spanned}
    sizes |= {"node": shape.members_in_node * shape.esp_size, "expert_node": shape.members_in_node}
    return {**sizes, _GROUP: both // shape.groups, _RING: shape.groups}


def _present(transfers: list[Transfer], shape: LayerShape) -> list[Transfer]:
    """Leave out what spans a group of one device."""
    sizes = _group_sizes(shape)
    return [transfer for transfer in transfers if sizes[transfer.group] > 1 and transfer.calls]


def _carried(transfers: list[Transfer], shape: LayerShape, transport: str, local: int) -> list[Transfer]:
    """Replace each all-to-all by what its transport makes of it: itself, or one on each of two levels.

    The levels of a group are called GROUP:near, `local` neighbours in it, and GROUP:far, those of equal place.
    """
    if transport == "all_to_all":
        return transfers
    if transport == "coordinated":
        return _present([part for transfer in transfers for part in _by_place(transfer, shape)], shape)
    out = []
    for transfer in transfers:
        if transfer.collective != "all_to_all":
            out.append(transfer)
            continue
        size = _group_sizes(shape)[transfer.group]
        if transfer.group in ("node", "expert_node", "expert_shard"):
            out.append(transfer)
        else:
            levels = (("near", local), ("far", size // local))
            out += [transfer._replace(group=f"{transfer.group}:{name}") for name, level in levels if level > 1]
    return out


def _as_bytes(transfers: list[Transfer], shape: LayerShape, also: tuple[str, ...] = ()) -> list[Transfer]:
    """Return the forward's transfers where rows go out as bytes: of an all-to-all every other call, the first one.

    Args:
      also: other collectives over the shards of an expert that rows go out by.
    """
    out = []
    for transfer in transfers:
        gathers = transfer.collective in also and transfer.group == "expert_shard"
        if transfer.collective != "all_to_all" and not gathers:
            out.append(transfer)
            continue
        there = transfer.calls if gathers else (transfer.calls + 1) // 2
        as_bytes = transfer.elements // shape.model_dim * shape.sent_bytes
        out.append(transfer._replace(elements=as_bytes, calls=there, item=1))
        out += [transfer._replace(calls=transfer.calls - there)] if transfer.calls > there else []
    return out


def _by_place(transfer: Transfer, shape: LayerShape) -> list[Transfer]:
    """Return what an all-to-all over EP and ESP is under 'coordinated': 1 / Ns of it over EP, and ESP's part of it.

    Every other call, those that bring rows home, has a reduce-scatter over the shards instead of an all-gather.
    """
    if transfer.collective != "all_to_all" or transfer.group not in (_BOTH, "node", "expert_shard"):
        return [transfer]
    among = {_BOTH: ("expert_across", "model_expert"), "node": ("expert_node",), "expert_shard": ()}[transfer.group]
    out = [Transfer("all_to_all", group, transfer.elements // shape.esp_size, transfer.calls) for group in among]
    there, back = (transfer.calls + 1) // 2, transfer.calls // 2
    for collective, calls in (("all_gather", there), ("reduce_scatter", back)):
        out += [Transfer(collective, "expert_shard", transfer.elements, calls)] if calls else []
    return out


def _s1(shape: LayerShape, _):
    both = [Transfer("all_to_all", _BOTH, shape.x, 2), *shape.near(), *shape.whole(in_parts=True)]
    return both, both


def _s2(shape: LayerShape, gather: str):
    part = shape.rows // shape.mp_size * shape.model_dim
    send = Transfer("all_to_all", _BOTH, shape.x // shape.mp_size)
    y = shape.ep_size * shape.rows * shape.model_dim
    near = shape.near(shape.mp_size)
    pieces = (shape.members_in_node * shape.more_in_node, shape.more_own)
    if shape.mp_size > 1:
        near += [Transfer("all_gather", "model", rows * shape.model_dim) for rows in pieces if rows]
    if shape.mp_size == 1:
        both = [send._replace(calls=2)]
    elif gather == "aas":
        both = [send._replace(calls=2), Transfer("all_gather", "model", y)]
    else:
        rounds = Transfer("permute", _BOTH, part, shape.ep_size * shape.esp_size - 1)
        both = [send, rounds, Transfer("all_gather", "model", y // shape.ep_size, shape.ep_size)]
    both += near + shape.whole(in_parts=False)
    return both, both


def _deepspeed(shape: LayerShape, _):
    if shape.esp_size == shape.mp_size == 1:
        return _s1(shape, _)
    tokens = shape.tokens * shape.model_dim * shape.esp_size
    unit = shape.model_dim * shape.esp_size
    inside = Transfer("all_to_all", "expert_node", shape.members_in_node * shape.more_in_node * unit, 2)
    exchange = [Transfer("all_to_all", "expert", shape.x, 2), *([inside] if inside.elements else [])]
    every = shape.sent_rows * unit
    forward = [
        Transfer("all_gather", "expert_shard", tokens),
        *exchange,
        Transfer("all_reduce", "expert_shard", every),
        *shape.whole(in_parts=False),
    ]
    pieces = (shape.ep_size * shape.rows, shape.members_in_node * shape.more_in_node, shape.more_own)
    backward = [
        *(Transfer("all_gather", "expert_shard", rows * unit) for rows in pieces if rows),
        *exchange,
        Transfer("reduce_scatter", "expert_shard", tokens),
        *shape.whole(in_parts=False),
    ]
    return forward, backward


def _pairwise(shape: LayerShape, _):
    inside = Transfer("all_to_all", _GROUP, shape.x, 2)
    steps = Transfer("permute", _RING, shape.x // shape.groups, 2 * (shape.groups - 1))
    both = [inside, steps, *shape.near(), *shape.whole(in_parts=True)]
    return both, both


def _ring(shape: LayerShape, _):
    size = shape.ep_size * shape.esp_size
    tokens = shape.tokens // shape.mp_size * size
    both_ways = [
        Transfer("all_gather", _BOTH, tokens * shape.model_dim),
        Transfer("reduce_scatter", _BOTH, tokens * shape.model_dim),
        *shape.whole(in_parts=True),
    ]
    weights = tokens * shape.top_k
    return (
        [*both_ways, Transfer("all_gather", _BOTH, weights)],
        [*both_ways, Transfer("reduce_scatter", _BOTH, weights)],
    )


def _dp(shape: LayerShape, _):
    return [], []


def _counts(shape: LayerShape) -> list[Transfer]:
    """The counts of rows per expert, which are sent before the rows."""
    held = shape.experts // shape.ep_size
    return [Transfer("all_to_all", _BOTH, shape.ep_size * shape.esp_size * held)]


def _s2_indices(shape: LayerShape) -> list[Transfer]:
    """Counts, and the token rule of the first EP member where an MP group spans several ('model_expert')."""
    rule = Transfer("all_gather", "model_expert", 3 * shape.experts * shape.mp_size // shape.esp_size)
    return [*_counts(shape), rule]


def _deepspeed_indices(shape: LayerShape) -> list[Transfer]:
    """Counts, and the routes that the members of an ESP group share."""
    (counts,) = _counts(shape)
    if shape.esp_size == shape.mp_size == 1:  # s1's
        return [counts]
    routes = (shape.sent_rows, shape.tokens * shape.top_k, shape.ep_size * (shape.experts // shape.ep_size))
    shared = [Transfer("all_gather", "expert_shard", shape.esp_size * size) for size in routes]
    return [*shared, counts._replace(group="expert")]


def _ring_indices(shape: LayerShape) -> list[Transfer]:
    """The choices of all tokens that are gathered."""
    tokens = shape.tokens // shape.mp_size * shape.ep_size * shape.esp_size
    return [Transfer("all_gather", _BOTH, tokens * shape.top_k)]


class RowWork(typing.NamedTuple):
    """Tokens gated, rows packed to be sent, tokens combined, and rows received, on one device."""

    gated: int
    packed: int
    combined: int
    received: int


def _own_work(shape: LayerShape) -> RowWork:
    """Of a schedule that gates a device's own part of the tokens."""
    tokens, rows = shape.tokens // shape.mp_size, shape.sent_rows * shape.esp_size
    return RowWork(tokens, rows, tokens, rows)


def _deepspeed_work(shape: LayerShape) -> RowWork:
    rows = shape.sent_rows * shape.esp_size
    return RowWork(shape.tokens, rows, shape.tokens, rows)


def _s2_work(shape: LayerShape) -> RowWork:
    if shape.mp_size == 1:
        return _own_work(shape)
    return RowWork(shape.tokens, shape.sent_rows, shape.tokens, shape.sent_rows * shape.esp_size // shape.mp_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Formulas:
    """What a layer costs under one schedule.

    Attributes:
      transfers: (shape, gather) -> (forward, backward) of one pass; gather: 'saa' or 'aas', for those that read it.
      indices: shape -> transfers of int32 of one pass.
      work: shape -> rows that are gated and moved on a device.
      carried: `MoEConfig.transport` says how its all-to-alls travel.
      in_parts: it works on parts of an MP group's tokens, so that replicated ones are gathered at the end.
    """

    transfers: typing.Callable[[LayerShape, str], tuple[list[Transfer], list[Transfer]]]
    indices: typing.Callable[[LayerShape], list[Transfer]] = _counts
    work: typing.Callable[[LayerShape], RowWork] = _own_work
    carried: bool = True
    in_parts: bool = False


FORMULAS = {
    "deepspeed": Formulas(transfers=_deepspeed, indices=_deepspeed_indices, work=_deepspeed_work),
    "s1": Formulas(transfers=_s1, in_parts=True),
    "s2": Formulas(transfers=_s2, indices=_s2_indices, work=_s2_work),
    "pairwise": Formulas(transfers=_pairwise, carried=False, in_parts=True),
    "ring": Formulas(transfers=_ring, indices=_ring_indices, in_parts=True),
    "dp": Formulas(transfers=_dp, indices=lambda shape: []),
}


def formulas_of(schedule: str) -> Formulas:
    """Return the formulas of a schedule.

    Raises:
      UserError: it has none.
    """
    if schedule not in FORMULAS:
        raise UserError(f"schedule {schedule!r} has no volume formula; choose one of {', '.join(FORMULAS)}")
    return FORMULAS[schedule]


class LayerSeconds(typing.NamedTuple):
    """Predicted seconds of one forward and backward."""

    communication: float
    experts: float
    gate: float
    rows: float
    call: float

    @property
    def computation(self) -> float:
        return self.experts + self.gate + self.rows

    @property
    def total(self) -> float:
        return sum(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """One device's experts, forward and backward: FLOPs and bytes touched."""

    flops: float
    bytes: float


def layer_seconds(
    schedule: str,
    shape: LayerShape,
    load: ExpertLoad | None,
    cluster: Cluster,
    *,
    gather: str = "saa",
    transport: str = "all_to_all",
    item: int = 4,
    requested_by: str = "the layer's cost",
    waits: Callable[[Sequence[float]], float] = sum,
) -> LayerSeconds:
    """Predict one layer.

    Args:
      schedule: a name in `FORMULAS`.
      shape: its sizes, rows as there; load: of the experts, None leaves them out; item: bytes of a number.
      gather, transport: as in `MoEConfig`; a transport is looked up under its name.
      waits: seconds of the exchanges of one direction, there and back -> those that the layer waits for: all, unless
        something hides them. There and back count as equally long; what an MP group gathers before or after is none.

    Raises:
      UserError: the cluster lacks a fit; it names the fit and `requested_by`.
    """
    # 'coordinated' is made of other collectives; any other transport is looked up in place of its all-to-alls
    coordinated = transport == "coordinated"
    ways = layer_transfers(schedule, shape, gather, transport if coordinated else "all_to_all")
    if not coordinated:
        ways = [
            [move._replace(collective=transport) if move.collective == "all_to_all" else move for move in way]
            for way in ways
        ]
    moving = 0.0
    for way in ways:
        exchanges = list(way)
        outside = [move for move in shape.whole(formulas_of(schedule).in_parts) if move in way]
        for move in outside:
            exchanges.remove(move)
        seconds = transfer_seconds(exchanges, shape, cluster, item, requested_by)
        moving += transfer_seconds(outside, shape, cluster, item, requested_by) + waits((seconds / 2, seconds / 2))
    moving += transfer_seconds(index_transfers(schedule, shape, transport=transport), shape, cluster, 4, requested_by)
    work = formulas_of(schedule).work(shape)
    row = shape.model_dim * item
    alone = LayerSeconds(
        communication=moving,
        experts=0.0 if load is None else cluster.fit("expert_step", requested_by).seconds(load.flops, load.bytes),
        gate=cluster.fit("gate", requested_by).seconds(
            work.gated, 2 * row * (work.packed + shape.top_k * work.combined)
        ),
        rows=cluster.fit("regroup", requested_by).seconds(work.received, 4 * row * work.received)
        if work.received
        else 0.0,
        call=cluster.fit("call", requested_by).alpha,
    )
    whole = dict(cluster.fits).get(layer_name("s1" if shape.mp_size == 1 and schedule == "s2" else schedule))
    if whole is None:
        return alone
    return LayerSeconds(
        communication=whole.beta * alone.communication,
        experts=whole.gamma * alone.experts,
        gate=whole.gamma * alone.gate,
        rows=whole.gamma * alone.rows,
        call=whole.alpha,
    )


def layer_name(schedule: str) -> str:
    """Return the name of the fit over whole layers: x seconds of communication, y of computation, each alone."""
    return f"layer:{schedule}"


def transfer_seconds(
    transfers: list[Transfer], shape: LayerShape, cluster: Cluster, item: int, requested_by: str
) -> float:
    """Return the time of transfers one after the other; the rounds and gathers of SAA count as one collective."""
    seconds, rest = 0.0, list(transfers)
    rounds = [t for t in rest if t.collective == "permute" and shape.mp_size > 1]
    gathers = [t for t in rest if t.collective == "all_gather" and t.group == "model" and t.calls == shape.ep_size]
    if rounds and gathers:
        size = shape.ep_size * shape.esp_size
        part = rounds[0].elements * size * item
        whole = gathers[0].elements * gathers[0].calls * item
        seconds += cluster.fit(fit_name("saa", size, shape.mp_size, shape.esp_size), requested_by).seconds(part, whole)
        rest.remove(rounds[0])
        rest.remove(gathers[0])
    for transfer in rest:
        fit = cluster.fit(transfer_fit(transfer, shape), requested_by)
        seconds += transfer.calls * max(0.0, fit.seconds(transfer.elements * (transfer.item or item)))
    return seconds


def transfer_fit(transfer: Transfer, shape: LayerShape) -> str:
    """Return the name of the fit that a transfer of this layer is predicted by."""
    both = shape.ep_size * shape.esp_size
    size, stride = {
        "model": (shape.mp_size, 1),
        "expert": (shape.ep_size, shape.esp_size),
        "expert_shard": (shape.esp_size, 1),
        "node": (shape.members_in_node * shape.esp_size, 1),
        "expert_node": (shape.members_in_node, shape.esp_size),
        "expert+expert_shard": (both, 1),
        "pairwise_group": (both // shape.groups, 1),
        "pairwise_ring": (shape.groups, both // shape.groups),
        # an MP group's EP members stand N_ESP apart; calibrations time neighbours
        "model_expert": (shape.mp_size // shape.esp_size, 1),
        "expert_across": (shape.ep_size // max(1, shape.mp_size // shape.esp_size), max(shape.mp_size, shape.esp_size)),
    }[transfer.group]
    return strided_name(transfer.collective, size, stride)


_PIPELINE = "the bound of MoEConfig.schedule 'pairwise'"


class PipelineSeconds(typing.NamedTuple):
    """Predicted seconds of one layer's transfers and experts, each alone, and what they are predicted by."""

    communication: float
    experts: float
    by: str

    @property
    def bound(self) -> float:
        """The most that the pipeline can gain over one after the other: from 1 to 2."""
        return overlap_bound(self.communication, self.experts)


def pairwise_seconds(shape: LayerShape, load: ExpertLoad, cluster: Cluster, item: int = 4) -> PipelineSeconds:
    """Predict what `pairwise` pipelines: by the fits of a calibration, else by bandwidths and FLOP/s of a preset.

    Args:
      shape: of the layer; load: of the experts of one device; item: bytes of a number.

    Raises:
      UserError: the cluster lacks a figure; it names the figure.
    """
    ways = layer_transfers("pairwise", shape)
    fitted = {name for name, _ in cluster.fits}
    steps = {transfer_fit(t, shape) for way in ways for t in way if t.group != "model"}
    if steps | {"expert_step"} <= fitted:
        moving = sum(transfer_seconds(way, shape, cluster, item, _PIPELINE) for way in ways)
        return PipelineSeconds(
            moving, cluster.fit("expert_step", _PIPELINE).seconds(load.flops, load.bytes), "its fits"
        )
    moving = sum(t.calls * _link_seconds(t, shape, cluster, item) for way in ways for t in way)
    return PipelineSeconds(moving, load.flops / cluster.need("flops", _PIPELINE), "its bandwidth and FLOP/s")


def _link_seconds(transfer: Transfer, shape: LayerShape, cluster: Cluster, item: int) -> float:
    """Return the seconds of one call over the links: steps of the ring cross nodes, where there are some.

    Of an all-to-all within a group of n devices, 1 / n stays on its device, and so it is with what an MP group gathers.
    """
    size = {"pairwise_group": shape.ep_size * shape.esp_size // shape.groups, "model": shape.mp_size}
    away = 1.0 if transfer.group == "pairwise_ring" else 1 - 1 / size[transfer.group]
    sent = transfer.elements * item * away
    crosses = transfer.group == "pairwise_ring" and not cluster.flat and cluster.nodes != 1
    inside, across = (0.0, sent) if crosses else (sent, 0.0)
    return float(uniform_seconds(cluster, inside, across, _PIPELINE))
