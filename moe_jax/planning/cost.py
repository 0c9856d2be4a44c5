"""What a layer takes under a placement, in seconds.

`LayerPrices` turn tokens and transfers into seconds. There are two, of one interface; the one that is used is chosen
where a `Cost` is built, and a planner never asks which it is:

    LayerPrices     what the compiled program will do, by a calibration's fits where they have all that is needed, else
                    by public tables, else by the links
    PaperPrices     the papers' formulas on one bandwidth: Pro-Prophet's equations 1, 4, 5, FasterMoE's 2 S / W

    exchange, compute, transfer     seconds of an all-to-all, of the experts' forward, of one Trans
    late                            seconds of what comes after the gate, in a compiled step
    moves, rates                    experts that change their home; what one token or expert more costs

A sparse transfer has two forms:

    flat      two all-to-alls over D devices, of X and of m chunks
    by node   three: X chunks over the Dn devices of a node, Cp of each node pair in Dn slices over Nn nodes, m over Dn

Letters: docs/notation.md; `...` stands for any leading dims; W, P, v as in the papers' formulas;
X offers, m slots, Cp crossing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from moe_jax.cluster import Cluster, Links
from moe_jax.cluster.layer_seconds import ScheduleLine
from moe_jax.cluster.prices import arithmetic_of
from moe_jax.errors import UserError
from moe_jax.parallel.static_sizes import BucketRows, TransferShape, sent_by_collective
from moe_jax.planning import routing
from moe_jax.planning.block_schedule import Prefetch, Times, exposed, stage_seconds
from moe_jax.planning.placement import Placement, TransferSizes, late_price, transfer_sizes
from moe_jax.planning.plan_shape import PlanShape

FORMS = ("auto", "flat", "by_node")
ASKED_BY = "the price of a plan"
MANY = 8  # chunks, over whose transfer the seconds of one are a mean
OPTIMIZER_BYTES = 8  # of optimizer state per parameter: two float32 moments


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPrices:
    """Price a layer as the compiled program spends its time: the sizes of its experts, and the links and devices."""

    cluster: Cluster  # the links, as devices of one expert-parallel group meet them
    model_dim: int  # M
    hidden_dim: int  # F of one expert
    matrices: int = 2  # of M x F in one expert, two, or three with SwiGLU
    shards: int = 1  # N_ESP, devices that share the F of an expert
    dtype_bytes: int = 4  # of one number as it is computed with and sent: activations, replicas and their gradients
    # of one token on its way to an expert in a forward; None: as in the three other exchanges
    sent_bytes: int | None = None
    param_bytes: int | None = None  # of one number of the parameters at home; None: as dtype_bytes
    form: str = "auto"  # of the sparse transfer: 'flat', 'by_node', or 'auto' for the cheaper one
    # whether seconds are those of a compiled program, with the whole transfer and all bucket rows that it sends; else
    # transfers are priced expert by expert, whatever the step is compiled for
    of_program: ClassVar[bool] = True

    @property
    def exchanged_bytes(self) -> float:
        """Bytes of one token in an exchange, the mean of a layer's four: out and back, forward and backward."""
        token = self.model_dim * self.dtype_bytes
        return token if self.sent_bytes is None else (3 * token + self.sent_bytes) / 4

    @property
    def expert_params(self) -> int:
        """Numbers of one expert on one device."""
        return self.matrices * self.model_dim * self.hidden_dim // self.shards

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's parameters on one device as they travel; its gradients take as much."""
        return self.expert_params * self.dtype_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes that move when an expert changes its home: parameters and optimizer state."""
        return self.expert_params * ((self.param_bytes or self.dtype_bytes) + OPTIMIZER_BYTES)

    def bandwidth(self) -> float:
        """W in bytes/s, of one device: its part of the links that its node shares, or a paper's slow link as given."""
        return self.cluster.bandwidth(ASKED_BY, of_device=self.of_program)

    def tokens_per_second(self) -> float:
        """v: tokens per second that one device computes in an expert's forward; the backward takes twice that.

        Devices with prices take what a grouped matmul of many rows does, others and the papers' P / (4 M F) with two
        matrices: a token takes two FLOPs for each number of the expert.
        """
        if self.cluster.prices is None or not self.of_program:
            return self.cluster.need("flops", ASKED_BY) / (2.0 * self.expert_params)
        rows, arithmetic = 2.0**17, arithmetic_of(self.dtype_bytes)
        sizes = (rows, self.model_dim, self.hidden_dim / self.shards, 0)
        return rows / (self.matrices * self.cluster.prices.grouped_matmul(arithmetic, "forward", *sizes))

    def compute(self, computed: np.ndarray) -> np.ndarray:
        """T_FEC: H [..., D] -> seconds [...]; the backward takes twice that. Source: Pro-Prophet, equations 2, 3."""
        return computed.max(axis=-1) / self.tokens_per_second()

    def exchange(self, received: np.ndarray) -> np.ndarray:
        """T_A2A, the mean of a layer's four: R [..., D] -> seconds [...], sources as if spread evenly over devices."""
        links = Links.of(self.cluster, received.shape[-1], ASKED_BY, self.shards)
        return links.received(received * self.exchanged_bytes)

    def padded_exchange(self, rows: BucketRows, placement: Placement) -> float:
        """Return the seconds of one exchange of buckets of so many rows between all devices of a placement."""
        devices, near = placement.devices, placement.devices_per_node
        used = rows.used(devices, near)
        inside, across = (near - 1) * used.node, (devices - near) * used.far  # what one device hands on
        links = Links.of(self.cluster, devices, "the split of tokens", self.shards)
        return float(links.uniform(inside * self.exchanged_bytes, across * self.exchanged_bytes))

    def transfer(self, sizes: TransferSizes, devices: int) -> np.ndarray:
        """T_Trans = T_Agg: seconds to send parameters to replicas, or to sum their gradients: sizes [...] -> [...]."""
        per_node = min(self.cluster.devices_per_node or devices, devices)
        return functools.reduce(np.minimum, self._by_form(sizes, devices, per_node).values())

    def late(self, largest: TransferShape | None) -> tuple[float, ...]:
        """Return the seconds of a transfer after the gate and its way back in each of its sizes, 0 for none first.

        () without such a transfer, or where experts are priced one by one: 2 S / W each in FasterMoE (`rates`).
        """
        if largest is None or not self.of_program:
            return ()
        return (0.0, *(2 * self.shape_seconds(size) for size in largest.halves()))

    def moves(self, experts: np.ndarray) -> np.ndarray:
        """Return the seconds in which so many experts [...] leave or reach a device with their optimizer state."""
        return experts * self.state_bytes / self.bandwidth()

    def rates(self, devices: int, late: TransferShape | None, groups: int = 1) -> dict[str, Any]:
        """Return what one more of each costs a step, there and back: fields of the rules that decide after the gate.

        Args:
          late: the largest transfer after the gate; groups: data-parallel groups, over which counts of tokens are sums.

        Returns:
          seconds of 'compute', a token computed; 'exchange', one exchanged; 'shadow', an expert sent to every other
          device, next to which nothing runs; and 'late_seconds' (`late`).
        """
        compute, exchange = 3.0 / self.tokens_per_second(), 4.0 * self.exchanged_bytes / self.bandwidth()
        shadow = 2.0 * float(self.transfer(TransferSizes(1, 1, 1, devices), devices))
        rates = {"compute": compute / groups, "exchange": exchange / groups, "shadow": shadow}
        return {**rates, "late_seconds": self.late(late)}

    def is_by_node(self, sizes: TransferSizes | TransferShape, devices: int, devices_per_node: int) -> bool:
        """Say whether the program runs such a transfer by node; with 'auto' where that is cheaper."""
        times = {form: np.sum(each) for form, each in self._by_form(sizes, devices, devices_per_node).items()}
        return bool(times.get("by_node", np.inf) < times.get("flat", np.inf) * (1 - 1e-9))

    def shape_seconds(self, shape: TransferShape) -> float:
        """Return the seconds of one Trans as the program runs it: every offer, slot and crossing of the shape."""
        form = "by_node" if shape.by_node else "flat"
        return float(self._by_form(shape, shape.devices, shape.devices_per_node, form)[form])

    def _by_form(
        self, sizes: TransferSizes | TransferShape, devices: int, devices_per_node: int, form: str = "auto"
    ) -> dict[str, Any]:
        """Return {form: seconds} of one Trans as the program runs it: a straight line where anything moves.

        Of one form, or of those to compare: by node only with several nodes of several devices.
        """
        names = ("flat", "by_node") if 1 < devices_per_node < devices else ("flat",)
        form, seconds = self.form if form == "auto" else form, {}
        for name in names if form == "auto" else (form,):
            group = (devices, devices_per_node, self.shards)
            start, offer, slot, crossing = _transfer_rates(self.cluster, self.expert_bytes, name, group)
            line = offer * sizes.offers + slot * sizes.slots + crossing * sizes.crossing
            seconds[name] = np.where(np.asarray(sizes.slots) > 0, start + line, 0.0)
        return seconds


class PaperPrices(LayerPrices):
    """Price a layer by the papers' formulas: one link for each device, one bandwidth, and experts one by one."""

    of_program = False

    def exchange(self, received):
        """T_A2A. Source: Pro-Prophet, equation 1."""
        return received.max(axis=-1) * self.exchanged_bytes / self.bandwidth()

    def transfer(self, sizes, devices):
        """The sum over replicated experts of holders / D x bytes of an expert / W. Source: Pro-Prophet, 4 and 5."""
        return sizes.holders * self.expert_bytes / (devices * self.bandwidth())


PRICES = {"executor": LayerPrices, "paper": PaperPrices}  # by `PlannerConfig.price`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Hold all inputs of a planner but loads and placement; loads and seconds are of one microbatch.

    Attributes:
      replica_slots: mu.
      attention_seconds: forward time of what precedes an MoE layer (T_FNEC); its backward takes twice that.
      late_room: replica slots after the gate that fit in memory besides the model and `replica_slots`; None: those that
        fit in an empty device besides `replica_slots`.
      layers_alive: layers whose replicas are in memory at the same time; microbatches: how often a step runs a layer.
      load_error: relative, of the loads that are planned with, by layer; () where known.
      prefetch: the block-wise schedule that hides transfers.
      late: the largest transfer after the gate that the step is compiled for; None: none.
      schedules: of `MoEConfig.schedule` = 'auto', what those that may run wait for in a layer, plain exchanges first;
        schedule: the name of the one that runs, '' for those.

    Raises:
      UserError: the replicas exceed the memory of a device.
    """

    prices: LayerPrices
    replica_slots: int = 4
    attention_seconds: float = 0.0
    late_room: int | None = None
    layers_alive: int = 1
    microbatches: int = 1
    load_error: tuple[float, ...] = ()
    prefetch: Prefetch = Prefetch()
    late: TransferShape | None = None
    schedules: tuple[ScheduleLine, ...] = ()
    schedule: str = ""

    def __post_init__(self):
        memory, each = self.prices.cluster.memory_bytes, self.prices.expert_bytes
        replicas = self.replica_slots * self.layers_alive * each
        if memory is not None and replicas > memory:
            raise UserError(
                f"every device: {self.replica_slots} replica_slots x {self.layers_alive} layers alive x {each} bytes "
                f"of an expert = {replicas} bytes exceed Cluster.memory_bytes ({memory:.0f}) (rule: replicas must fit "
                f"in memory); use at most replica_slots = {self.slots_in(memory)}"
            )

    def slots_in(self, free_bytes: float) -> int:
        """mu: replicas of a device that fit, floor(free / (layers alive x bytes of an expert)) (Hecate 4.2)."""
        return int(free_bytes // (self.layers_alive * self.prices.expert_bytes))

    def overlap_seconds(self) -> float:
        """Return the seconds in which an expert travels by the formula of Hecate's section 4.2."""
        return self.prices.expert_bytes / self.prices.cluster.bandwidth(ASKED_BY)

    def layer(self, computed: np.ndarray, received: np.ndarray, sizes: TransferSizes) -> np.ndarray:
        """T of one layer, forward and backward: H, R [..., D], sizes [...] -> seconds [...].

        Source: Pro-Prophet, equation 6, and 8 with its block-wise schedule.
        """
        return sum(self.parts(computed, received, sizes).values())

    def parts(
        self,
        computed: np.ndarray,
        received: np.ndarray,
        sizes: TransferSizes,
        exchange: np.ndarray | None = None,
        trans: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Return the same time by purpose: place (Trans), reduce (Agg), others. Source: Pro-Prophet, table I.

        Args:
          exchange: seconds [...] of one all-to-all where they are known link by link; else from R.
          trans: seconds [...] of one Trans under a shape in force; else of `sizes`.
        """
        forward = self.prices.compute(computed)
        if trans is None:
            trans = self.prices.transfer(sizes, computed.shape[-1])
        moved = self.prices.exchange(received) if exchange is None else exchange
        line = next((own for own in self.schedules if own.name == self.schedule), None)
        if line is not None:  # as many rows in every bucket as the busiest device gets of each source
            rows = received.max(axis=-1) / max(1, received.shape[-1] - 1) / self.prices.shards
            moved = np.maximum(moved + (line.seconds(rows) - self.schedules[0].seconds(rows)) / 4, 0.0)
        times = Times(attention=self.attention_seconds, experts=forward, exchange=moved, trans=trans, agg=trans)
        place, reduce = exposed(self.prefetch, times)
        others = 4 * moved + 3 * forward
        if self.prefetch.halves:  # less what hides: the two halves' exchanges and computations next to each other
            others = stage_seconds(self.prefetch, times) - 3 * times.attention
        elif line is not None and line.groups > 1:  # rows of one group next to the experts of another (`pairwise`)
            around = 2 * moved / line.groups
            others = sum(np.maximum(2 * moved, around + times_more * forward) for times_more in (1, 2))
        return {"place": place, "reduce": reduce, "others": others}


def home_seconds(home: np.ndarray, before: np.ndarray, devices: int, prices: LayerPrices) -> np.ndarray:
    """Return the seconds in which experts get from one home to another, all links at once: [L, E] twice -> [L]."""
    layer, expert = np.nonzero(before != home)
    sent, got = np.zeros((2, len(home), devices))
    np.add.at(sent, (layer, before[layer, expert]), 1)
    np.add.at(got, (layer, home[layer, expert]), 1)
    return prices.moves(np.maximum(sent.max(axis=1), got.max(axis=1)))


@functools.lru_cache(maxsize=64)
def _transfer_rates(
    cluster: Cluster, chunk_bytes: float, form: str, group: tuple[int, int, int]
) -> tuple[float, float, float, float]:
    """Return the seconds of one Trans as a line: start where anything moves, and for each offer, slot and crossing.

    `group` is D, devices of a node Dn, and the devices between neighbours of the group (N_ESP), as fits are named.
    """
    devices, devices_per_node, stride = group
    by_node, nodes = form == "by_node", devices // devices_per_node
    near, whole = (
        Links(cluster, size, devices_per_node, ASKED_BY, stride=stride) for size in (devices_per_node, devices)
    )
    across_nodes = Links(cluster, nodes, 1, ASKED_BY, stride=devices_per_node * stride)
    levels = [near, across_nodes, near] if by_node else [whole, whole]
    sent, lines = sent_by_collective(1, 1, 1, devices=devices, devices_per_node=devices_per_node, by_node=by_node), []
    for links, (inside, across) in zip(levels, sent, strict=True):
        start = links.start_up(across > 0)
        moved = (MANY * inside * chunk_bytes, MANY * across * chunk_bytes)
        lines.append((start, (float(links.uniform(*moved)) - start) / MANY))
    each = [line[1] for line in lines]
    return sum(line[0] for line in lines), each[0], each[-1], each[1] if by_node else 0.0


def predicted_layer_seconds(
    placement: Placement,
    loads: np.ndarray,
    cost: Cost,
    shape: PlanShape | None = None,
    planned: Placement | None = None,
) -> np.ndarray:
    """Return what every layer takes, forward and backward of one microbatch: loads [L, S, E] -> seconds [L].

    Args:
      shape: what the step is compiled for, whose transfer ahead every layer pays; None: what its own replicas need.
      planned: what was planned ahead, where `placement` has replicas that come after the gate.
    """
    prices, sizes, trans = cost.prices, placement.sizes, None
    if shape is not None and prices.of_program:
        trans = np.full(placement.layers, 0.0 if shape.ahead is None else prices.shape_seconds(shape.ahead))
    total = sum(cost.parts(*routing.expected(placement, loads), sizes, trans=trans).values())
    seconds = () if shape is None or planned is None else prices.late(shape.late)
    if not seconds:
        return total
    needed = transfer_sizes(placement.homes, placement.holds & ~planned.holds, shape.late.inside)
    return total + late_price(needed, shape.late, seconds, 0.0)
