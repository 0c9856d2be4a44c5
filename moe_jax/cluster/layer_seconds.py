"""What one MoE layer moves and computes under each schedule, and its seconds by a cluster's fits.

Sizes count elements as a collective's formula does: what a device hands in, for an all-gather what it gets. Sums of
gradients over data-parallel devices are not in here. Seconds are of a synchronous layer, forward and backward: nothing
overlaps, as on a CPU.

Letters: docs/notation.md; Sq tokens of a sequence; C counts the rows of one device's N / N_MP tokens under s1, pairwise
and dp, and of all N under deepspeed and s2. With a capacity, D C is the papers' E C.
Source: Parm, sections III and IV, restated for buckets; FasterMoE, section 4.2.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence

from moe_jax.cluster.cluster import Cluster
from moe_jax.cluster.collectives import Links
from moe_jax.cluster.fits import fit_name
from moe_jax.cluster.prices import arithmetic_of
from moe_jax.errors import UserError

FORMULAS = ("deepspeed", "s1", "deduplicated", "s2", "pairwise", "ring", "dp")  # other schedules have no price


def matrices_of(activation: str) -> int:
    """Return the matrices of M x F in an expert or a dense FFN: three with SwiGLU, two else."""
    return 3 if activation == "swiglu" else 2


def preceding_flops(*, model_dim: int, length: int, moe_every: int, matrices: int, dense_hidden_dim: int) -> int:
    """Return the forward FLOPs of one token between two MoE layers.

    That is attention (projections, scores, mixing) of `length` = Sq and, where every second block is MoE, the block
    before it too, with its dense FFN of so many `matrices`.
    """
    attention = 8 * model_dim**2 + 4 * length * model_dim
    dense = 2 * matrices * model_dim * dense_hidden_dim
    return moe_every * attention + (moe_every - 1) * dense


def preceding_seconds(cluster: Cluster, tokens: float, item: int, *, model_dim: int, length: int, **block) -> float:
    """Return the forward seconds of what `preceding_flops` counts, for so many tokens of one device.

    Where the cluster's devices have prices, by those, for numbers of `item` bytes: projections as matmuls of
    [tokens, M] by [M, M], and causal attention of heads of 128, slower than in 16 bits as its FLOP/s are fewer; else by
    the cluster's FLOP/s, of which causal attention is then charged all.
    """
    flops = preceding_flops(model_dim=model_dim, length=length, **block)
    prices, turns = cluster.prices, block["moe_every"]
    if prices is None:
        return tokens * flops / cluster.need("flops", "what precedes an MoE layer")
    head = min(128, model_dim)
    sizes = (tokens / length, model_dim / head, length, head, head)
    arithmetic = arithmetic_of(item)
    slower = prices.target.flops("bf16") / prices.target.flops(arithmetic)
    attention = slower * prices.attention("forward", sizes, causal=True)
    square = prices.matmul(arithmetic, 1, tokens, model_dim, model_dim)
    dense = (turns - 1) * block["matrices"] * square * block["dense_hidden_dim"] / model_dim
    return turns * (4 * square + attention) + dense


class Transfer(typing.NamedTuple):
    """One collective, as often as a layer calls it."""

    collective: str
    group: str  # a name in `LayerShape.span`
    elements: int  # of one call
    calls: int = 1
    item: int = 0  # bytes of an element that is no number of the compute dtype, 0: it is one


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The schedule and the sizes that decide what is communicated; see the letters above.

    `layer_shape` in `moe/schedule.py` fills it of a schedule. One that has no formula is a UserError.
    """

    schedule: str = "s1"  # a name in `FORMULAS`, as it runs on this mesh: s1 where another one is s1 there
    gates_group: bool = False  # each device gates all tokens of its MP group, not its own part
    cuts_buckets: bool = False  # the devices of an MP group share every bucket
    tokens: int  # N of an MP group
    model_dim: int  # M, or the bytes of a row where seconds are wanted
    rows: int  # C, of a bucket as it travels; `far` where buckets differ
    ep_size: int  # D
    esp_size: int = 1  # N_ESP
    mp_size: int = 1  # N_MP
    top_k: int = 1  # K
    experts: int = 1  # E
    split_tokens: bool = False  # each device of an MP group has a part of its tokens, before the layer and after it
    groups: int = 1  # Ng of `pairwise`
    more_in_node: int = 0  # rows of a bucket for the own node beyond `rows`
    more_own: int = 0  # and of the own bucket beyond those
    members_in_node: int = 1  # EP members of a node
    sent_bytes: int = 0  # of a row on its way to experts where it travels as bytes (`MoEConfig.dispatch_dtype`), else 0

    def __post_init__(self):
        if self.schedule not in FORMULAS:
            raise UserError(
                f"schedule {self.schedule!r} has no price, for no formula says what it moves; choose one of "
                f"{', '.join(FORMULAS)}"
            )

    @property
    def sent_rows(self) -> int:
        """R, rows of all buckets of one source."""
        return self.ep_size * self.rows + self.members_in_node * self.more_in_node + self.more_own

    def span(self, group: str) -> tuple[int, int]:
        """Return the devices of a group and how far they stand apart, as fits are named."""
        group, _, level = group.partition(":")
        if level:  # of 'two_level'
            size, stride = self.span(group)
            local = self.members_in_node * (self.esp_size if group == _BOTH else 1)
            return (local, stride) if level == "near" else (size // local, local * stride)
        both = self.ep_size * self.esp_size
        spanned = max(1, self.mp_size // self.esp_size)  # EP members of an MP group
        return {
            "model": (self.mp_size, 1),
            "expert": (self.ep_size, self.esp_size),
            "expert_shard": (self.esp_size, 1),
            "node": (self.members_in_node * self.esp_size, 1),
            "expert_node": (self.members_in_node, self.esp_size),
            _BOTH: (both, 1),
            "pairwise_group": (both // self.groups, 1),
            "pairwise_ring": (self.groups, both // self.groups),
            # an MP group's EP members stand N_ESP apart; calibrations time neighbours
            "model_expert": (spanned, 1),
            "expert_across": (self.ep_size // spanned, max(self.mp_size, self.esp_size)),
        }[group]

    def present(self, transfers: list[Transfer]) -> list[Transfer]:
        """Leave out what spans a group of one device."""
        return [move for move in transfers if self.span(move.group)[0] > 1 and move.calls]

    @property
    def sharers(self) -> int:
        """Devices that have a part of each bucket."""
        return self.mp_size if self.cuts_buckets else 1


_BOTH = "expert+expert_shard"
_PARM = "MoEConfig.schedule 'parm'"  # who asks


def _plain_transfers(shape: LayerShape, gather: str) -> tuple[list[Transfer], list[Transfer]]:
    """Return (forward, backward) of one pass as plain all-to-alls.

    Buckets of three lengths (`parallel/static_sizes.py`, own >= node >= far) go in pieces: the first C = far rows of
    each to all devices, what those for the own node have more inside it, what the own one has more among its shards.

    `whole` is the MP group's all-gather of its tokens, once each way, where tokens come or leave as others expect:
    schedules that work on parts of the tokens gather replicated ones at their end; those that gate the whole group
    gather tokens that come in parts.
    """
    schedule = shape.schedule
    if schedule == "dp":
        return [], []
    unit, whole = shape.model_dim * shape.esp_size, []
    if shape.gates_group == shape.split_tokens:
        whole = [Transfer("all_gather", "model", shape.tokens * shape.model_dim)]
    in_node, own = shape.members_in_node * shape.more_in_node, shape.more_own
    x = shape.ep_size * shape.rows * shape.model_dim * shape.esp_size
    near = [
        Transfer("all_to_all", group, rows * (unit // shape.sharers), 2)
        for group, rows in (("node", in_node), ("expert_shard", own))
        if rows
    ]
    if schedule in ("s1", "deduplicated"):
        both = [Transfer("all_to_all", _BOTH, x, 2), *near]
        if schedule == "deduplicated":  # and groups and weights of the two choices of a row, or the gradients of these
            both += [move._replace(elements=move.elements // shape.model_dim * 4, calls=1) for move in both]
    elif schedule == "s2":
        y = shape.ep_size * shape.rows * shape.model_dim
        send = Transfer("all_to_all", _BOTH, x // shape.mp_size)
        if gather == "aas":
            both = [send._replace(calls=2), Transfer("all_gather", "model", y)]
        else:
            part = shape.rows // shape.mp_size * shape.model_dim
            rounds = Transfer("permute", _BOTH, part, shape.ep_size * shape.esp_size - 1)
            both = [send, rounds, Transfer("all_gather", "model", y // shape.ep_size, shape.ep_size)]
        both += near + [Transfer("all_gather", "model", rows * shape.model_dim) for rows in (in_node, own) if rows]
    elif schedule == "pairwise":
        steps = Transfer("permute", "pairwise_ring", x // shape.groups, 2 * (shape.groups - 1))
        both = [Transfer("all_to_all", "pairwise_group", x, 2), steps, *near]
    elif schedule == "ring":
        tokens = shape.tokens // shape.mp_size * shape.ep_size * shape.esp_size
        sizes = tokens * shape.model_dim, tokens * shape.top_k  # rows, and the weights of choices
        rows = [Transfer(kind, _BOTH, sizes[0]) for kind in ("all_gather", "reduce_scatter")]
        gathered, summed = (Transfer(kind, _BOTH, sizes[1]) for kind in ("all_gather", "reduce_scatter"))
        return [*rows, *whole, gathered], [*rows, *whole, summed]
    else:  # deepspeed
        # sums over the shards of an expert travel in float32: of bfloat16 they are half of what travels
        tokens, pieces = shape.tokens * unit, (shape.ep_size * shape.rows, in_node, own)
        exchange = [Transfer("all_to_all", "expert", x, 2)]
        exchange += [Transfer("all_to_all", "expert_node", in_node * unit, 2)] if in_node else []
        summed = Transfer("all_reduce", "expert_shard", shape.sent_rows * unit)
        forward = [Transfer("all_gather", "expert_shard", tokens), *exchange, summed]
        gathers = [Transfer("all_gather", "expert_shard", rows * unit) for rows in pieces if rows]
        return [*forward, *whole], [*gathers, *exchange, Transfer("reduce_scatter", "expert_shard", tokens), *whole]
    return both + whole, both + whole


def layer_transfers(
    shape: LayerShape, gather: str = "saa", transport: str = "all_to_all"
) -> tuple[list[Transfer], list[Transfer]]:
    """Return (forward, backward) transfers of one device in one layer and pass.

    Args:
      gather: how s2 returns, 'saa' or 'aas'.
      transport: how an all-to-all is carried out, unless the schedule has transfers of its own. The levels that
        'two_level' makes of a group are called GROUP:near, neighbours in a node, and GROUP:far, those of equal place.
    """
    schedule = shape.schedule
    forward, backward = (
        [part for move in shape.present(way) for part in carried(move, shape, transport)]
        for way in _plain_transfers(shape, gather)
    )
    if not shape.sent_bytes or schedule == "pairwise":
        return forward, backward
    out = []
    for move in forward:  # rows go out as bytes: of an all-to-all every other call, the first one
        gathers = transport == "coordinated" and move.collective == "all_gather" and move.group == "expert_shard"
        weights = schedule == "deduplicated" and move.calls == 1
        if (move.collective == "all_to_all" and not weights) or gathers:
            there = move.calls if gathers else (move.calls + 1) // 2
            out.append(move._replace(elements=move.elements // shape.model_dim * shape.sent_bytes, calls=there, item=1))
            move = move._replace(calls=move.calls - there)
        out += [move] if move.calls else []
    return out, backward


def index_transfers(shape: LayerShape, transport: str = "all_to_all") -> list[Transfer]:
    """Return the transfers of int32 in one layer and pass, which have no backward: counts and routes ahead of the rows.

    Where there may be several passes, an all-reduce of one number over all devices comes besides.
    """
    schedule = shape.schedule
    held = -(-shape.experts // shape.ep_size)
    counts = Transfer("all_to_all", _BOTH, shape.ep_size * shape.esp_size * held, item=4)  # of rows per expert
    if schedule in ("dp", "deduplicated"):
        out = []
    elif schedule == "ring":  # the choices of all tokens that are gathered
        tokens = shape.tokens // shape.mp_size * shape.ep_size * shape.esp_size
        out = [Transfer("all_gather", _BOTH, tokens * shape.top_k, item=4)]
    elif schedule == "s2":  # and the token rule of the first EP member where an MP group spans several
        rule = 3 * shape.experts * shape.mp_size // shape.esp_size
        out = [counts, Transfer("all_gather", "model_expert", rule, item=4)]
    elif schedule == "deepspeed":  # and the routes that the members of an ESP group share
        routes = (shape.sent_rows, shape.tokens * shape.top_k, shape.ep_size * held)
        out = [Transfer("all_gather", "expert_shard", shape.esp_size * size, item=4) for size in routes]
        out.append(counts._replace(group="expert"))
    else:
        out = [counts]
    if transport == "coordinated":  # counts travel as the rows do
        out = [part for move in out for part in _by_place(move, shape)]
    return shape.present(out)


def carried(move: Transfer, shape: LayerShape, transport: str) -> list[Transfer]:
    """Return what a transfer is under a transport, one of `MoEConfig.transport`."""
    if transport == "coordinated" and shape.schedule != "pairwise":
        return shape.present(_by_place(move, shape))
    if transport == "two_level" and move.collective == "all_to_all" and move.group in (_BOTH, "expert"):
        return shape.present([move._replace(group=f"{move.group}:{level}") for level in ("near", "far")])
    return [move]  # those of other groups stay in a node


def _by_place(move: Transfer, shape: LayerShape) -> list[Transfer]:
    """Return what an all-to-all over EP and ESP is under 'coordinated': 1 / Ns of it over EP, and ESP's part of it.

    Every other call, those that bring rows home, has a reduce-scatter over the shards instead of an all-gather.
    """
    among = {_BOTH: ("expert_across", "model_expert"), "node": ("expert_node",), "expert_shard": ()}.get(move.group)
    if move.collective != "all_to_all" or among is None:
        return [move]
    out = [move._replace(group=group, elements=move.elements // shape.esp_size) for group in among]
    for collective, calls in (("all_gather", (move.calls + 1) // 2), ("reduce_scatter", move.calls // 2)):
        out += [move._replace(collective=collective, group="expert_shard", calls=calls)] if calls else []
    return out


class LayerSeconds(typing.NamedTuple):
    """Predicted seconds of one forward and backward."""

    communication: float
    experts: float
    gate: float
    rows: float
    call: float


def layer_seconds(
    shape: LayerShape,
    load: tuple[float, float] | None,
    cluster: Cluster,
    gather: str = "saa",
    transport: str = "all_to_all",
) -> LayerSeconds:
    """Predict one layer by fits; where whole layers were timed (`layer:SCHEDULE`), its parts cost what they did there.

    Args:
      load: (FLOPs, bytes touched) of one device's experts, forward and backward, None leaves them out.
      shape, gather, transport: see `moving_seconds`.

    Raises:
      UserError: the cluster lacks a fit; it names the fit.
    """
    moving = moving_seconds(shape, cluster, gather, transport)
    moving += transfer_seconds(index_transfers(shape, transport=transport), shape, cluster, _PARM)
    # tokens gated and combined, rows packed to be sent, and rows received, on one device
    gated = shape.tokens if shape.gates_group else shape.tokens // shape.mp_size
    packed = shape.sent_rows * (1 if shape.cuts_buckets else shape.esp_size)
    received = shape.sent_rows * shape.esp_size // shape.sharers
    row, fit = shape.model_dim, cluster.fit
    alone = LayerSeconds(
        communication=moving,
        experts=0.0 if load is None else fit("expert_step", _PARM).seconds(*load),
        gate=fit("gate", _PARM).seconds(gated, 2 * row * (packed + shape.top_k * gated)),
        rows=fit("regroup", _PARM).seconds(received, 4 * row * received) if received else 0.0,
        call=fit("call", _PARM).alpha,
    )
    whole = dict(cluster.fits).get(f"layer:{shape.schedule}")
    if whole is None:
        return alone
    computation = (whole.gamma * seconds for seconds in (alone.experts, alone.gate, alone.rows))
    return LayerSeconds(whole.beta * alone.communication, *computation, whole.alpha)


def moving_seconds(shape: LayerShape, cluster: Cluster, gather: str = "saa", transport: str = "all_to_all") -> float:
    """Predict what a layer waits for its rows, forward and backward, by `transfer_seconds`.

    With buckets of one length it is Parm's equation 13 (s1) or 14 (s2), once in each direction.

    Args:
      shape: its schedule and sizes, with bytes of a row.
      gather, transport: as in `MoEConfig`; the fit of a transport is looked up under its name.
    """
    moving = 0.0
    # 'coordinated' is made of other collectives; a calibration has any other transport in place of its all-to-alls
    made_of = transport if transport == "coordinated" or not cluster.fits else "all_to_all"
    for way in layer_transfers(shape, gather, made_of):
        if transport != made_of:
            way = [move._replace(collective=transport) if move.collective == "all_to_all" else move for move in way]
        moving += transfer_seconds(way, shape, cluster, _PARM)
    return moving


class ScheduleLine(typing.NamedTuple):
    """What a layer waits for its rows under one schedule, forward and backward: a line in the rows of a bucket."""

    name: str
    start: float
    row: float  # seconds more for each row of a bucket of s1
    groups: int = 1  # of a pipeline of exchange and experts, 1 for none

    def seconds(self, rows):
        """Return the seconds for buckets of `rows` [...]."""
        return self.start + self.row * rows


def schedule_line(shape: LayerShape, cluster: Cluster, gather: str = "aas") -> ScheduleLine:
    """Return the line of a shape's schedule; its own rows do not matter. Other arguments as of `moving_seconds`.

    Raises:
      UserError: as `moving_seconds` does.
    """
    group = shape.mp_size if shape.gates_group else 1  # whose tokens fill a bucket
    few, many = (
        moving_seconds(
            dataclasses.replace(shape, rows=rows * group, more_in_node=0, more_own=0), cluster, gather=gather
        )
        for rows in (64, 1088)
    )
    row = (many - few) / 1024
    return ScheduleLine(shape.schedule, few - 64 * row, row, shape.groups if shape.schedule == "pairwise" else 1)


def transfer_seconds(transfers: Sequence[Transfer], shape: LayerShape, cluster: Cluster, requested_by: str) -> float:
    """Return the time of transfers of one direction, one after the other: by fits, or by links where there are none.

    The rounds and gathers of SAA count as one collective. By links each round starts, and all share the links but the
    last gather, next to which nothing is left.

    Raises:
      UserError: the cluster has fits, but lacks one of them, or lacks the speed of a link; it names the figure.
    """
    seconds, rest = 0.0, list(transfers)
    rounds = [t for t in rest if t.collective == "permute" and t.group == _BOTH]
    gathers = [t for t in rest if t.collective == "all_gather" and t.group == "model" and t.calls == shape.ep_size]
    if rounds and gathers:
        (rounds, *_), (gathers, *_) = rounds, gathers
        rest.remove(rounds)
        rest.remove(gathers)
        size, _ = shape.span(_BOTH)
        if cluster.fits:
            fit = cluster.fit(fit_name("saa", size, shape.mp_size, shape.esp_size), requested_by)
            seconds = fit.seconds(rounds.elements * size, gathers.elements * gathers.calls)
        else:
            swap = Transfer("all_to_all", _BOTH, rounds.elements * size)
            links, *sent = _on_links(swap, shape, cluster, requested_by)
            of_mp, *last = _on_links(gathers, shape, cluster, requested_by)
            links = dataclasses.replace(links, kind="collective-permute")
            shared = (own + (gathers.calls - 1) * next_to for own, next_to in zip(sent, last, strict=True))
            seconds = (rounds.calls - 1) * links.start_up(sent[1] > 0)
            seconds += float(links.uniform(*shared))
            seconds += float(of_mp.uniform(*last))
    for move in rest:
        if cluster.fits:
            size, stride = shape.span(move.group)
            fit = cluster.fit(fit_name(move.collective, size, stride=stride), requested_by)
            one = max(0.0, fit.seconds(move.elements * (move.item or 1)))
        else:
            links, inside, across = _on_links(move, shape, cluster, requested_by)
            one = float(links.uniform(inside, across))
        seconds += move.calls * one
    return seconds


def _on_links(move: Transfer, shape: LayerShape, cluster: Cluster, requested_by: str) -> tuple[Links, float, float]:
    """Return the links of a transfer, and the bytes of one call that a device sends to its own node and to others."""
    size, stride = shape.span(move.group)
    per_node = size * stride if cluster.flat else cluster.need("devices_per_node", requested_by)
    near, handed = max(1, min(size, per_node // stride)), move.elements * (move.item or 1)
    if move.collective == "permute":  # one other device, as far away as any
        links = Links(cluster, size, near, requested_by, "collective-permute")
        return (links, handed, 0.0) if near == size else (links, 0.0, handed)
    if move.collective == "all_to_all":
        links = Links(cluster, size, near, requested_by, stride=stride)
        return links, handed * (near - 1) / size, handed * (size - near) / size
    times = 2 if move.collective == "all_reduce" else 1
    across = times * handed * (size - near) / (size * near)  # a ring over the nodes, each device with its part
    inside = times * handed * (size - 1) / size - across
    return Links(cluster, size, near, requested_by, move.collective.replace("_", "-")), inside, across
