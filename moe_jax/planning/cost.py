"""The cost of a layer under a placement, in seconds, as the program spends them or by the papers' formulas (`price`).

A sparse transfer has two forms, priced by a calibration's fits where it has all that a form needs, else by the links:

    flat      two all-to-alls over D devices, of X and of m chunks
    by node   three: X chunks over the Dn devices of a node, Cp of each node pair in Dn slices over Nn nodes, m over Dn

Letters: docs/notation.md; `...` stands for any leading dims; W, P, v as in the papers' formulas;
X offers, m slots, Cp crossing.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from moe_jax.cluster import Cluster, Group, Links
from moe_jax.cluster.layer_seconds import ScheduleLine
from moe_jax.cluster.prices import arithmetic_of
from moe_jax.errors import UserError
from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.parallel.transfer_shape import TransferShape, sent_by_collective
from moe_jax.planning import routing
from moe_jax.planning.block_schedule import Prefetch, Times, exposed, stage_seconds
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import PlanShape
from moe_jax.planning.sizes import TransferSizes, late_price, transfer_sizes

PRICES = ("executor", "paper")
FORMS = ("auto", "flat", "by_node")
ASKED_BY = "the price of a plan"
MANY = 8  # chunks, over whose transfer the seconds of one are a mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Hold all inputs of a planner but loads and placement."""

    cluster: Cluster  # the links, as devices of one expert-parallel group meet them
    model_dim: int  # M
    hidden_dim: int  # F of one expert
    matrices: int = 2  # of M x F in one expert, two, or three with SwiGLU
    shards: int = 1  # N_ESP, devices that share the F of an expert
    dtype_bytes: int = 4  # of one number as it is computed with and sent: activations, replicas and their gradients
    # of one token on its way to an expert in a forward; None: as in the three other exchanges
    sent_bytes: int | None = None
    param_bytes: int | None = None  # of one number of the parameters at home; None: as dtype_bytes
    optimizer_bytes: int = 8  # of optimizer state per parameter, by default two float32 moments
    replica_slots: int = 4  # mu
    overlap_degree: int | str | None = None  # tau, 'paper' for that paper's rule, None where Hecate chooses it
    attention_seconds: float = 0.0  # forward time of what precedes an MoE layer (T_FNEC); its backward takes twice that
    # replica slots after the gate that fit in memory besides the model and `replica_slots`; None: those that fit in an
    # empty device besides `replica_slots`
    late_room: int | None = None
    layers_alive: int = 1  # layers whose replicas are in memory at the same time
    microbatches: int = 1  # how often a step runs a layer; loads and seconds here are of one time
    load_error: tuple[float, ...] = ()  # relative, of the loads that are planned with, by layer; () where known
    prefetch: Prefetch = Prefetch()  # the block-wise schedule that hides transfers
    # 'executor', what the program will do; or 'paper': Pro-Prophet's equations 1, 4, 5 and 8 and FasterMoE's 2 S / W,
    # on one bandwidth
    price: str = "executor"
    transfer: str = "auto"  # form of the sparse transfer: 'flat', 'by_node', or 'auto' for the cheaper one
    late: TransferShape | None = None  # the largest transfer after the gate that the step is compiled for; None: none
    # of `MoEConfig.schedule` = 'auto': what the schedules that may run wait for in a layer, plain exchanges first, and
    # the name of the one that runs, '' for those
    schedules: tuple[ScheduleLine, ...] = ()
    schedule: str = ""

    def __post_init__(self):
        for field in ("model_dim", "hidden_dim", "matrices", "shards", "dtype_bytes", "layers_alive", "microbatches"):
            if getattr(self, field) < 1:
                raise UserError(f"{field} ({getattr(self, field)}) must be at least 1")
        if self.replica_slots < 0 or (isinstance(self.overlap_degree, int) and self.overlap_degree < 0):
            raise UserError(
                f"replica_slots ({self.replica_slots}) and overlap_degree ({self.overlap_degree}) must be at least 0"
            )
        memory = self.cluster.memory_bytes
        replicas = self.replica_slots * self.layers_alive * self.expert_bytes
        if memory is not None and replicas > memory:
            raise UserError(
                f"every device: {self.replica_slots} replica_slots x {self.layers_alive} layers alive x "
                f"{self.expert_bytes} bytes of an expert = {replicas} bytes exceed Cluster.memory_bytes ({memory:.0f}) "
                "(rule: replicas must fit in memory); use at most replica_slots = "
                f"{slots_in(memory, self.layers_alive, self.expert_bytes)}"
            )

    def under(self, schedule: str) -> Cost:
        """Return the cost of layers that run under one of `schedules`, '' for plain exchanges."""
        return dataclasses.replace(self, schedule=schedule) if self.schedules else self

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
        return self.expert_params * ((self.param_bytes or self.dtype_bytes) + self.optimizer_bytes)

    @functools.cached_property
    def late_seconds(self) -> tuple[float, ...]:
        """Seconds of a transfer after the gate and its way back in each of its sizes (`halves`), 0 for none first.

        () under the papers' price, which is by the expert, and without such a transfer.
        """
        sizes = () if self.late is None or self.price == "paper" else self.late.halves()
        seconds = [2 * self.shape_seconds(size) for size in sizes]
        return (0.0, *seconds) if seconds else ()

    def bandwidth(self) -> float:
        """W in bytes/s, of one device: its part of the links that its node shares; the papers' slow link as given."""
        return self.cluster.bandwidth(ASKED_BY, of_device=self.price != "paper")

    def tokens_per_second(self) -> float:
        """v: tokens per second that one device computes in an expert's forward, P / (4 M F) with two matrices.

        A token takes two FLOPs for each number of the expert; the backward takes twice that. Devices with prices take
        what a grouped matmul of many rows does.
        """
        if self.cluster.prices is not None and self.price != "paper":
            rows, arithmetic = 2.0**17, arithmetic_of(self.dtype_bytes)
            sizes = (rows, self.model_dim, self.hidden_dim / self.shards, 0)
            return rows / (self.matrices * self.cluster.prices.grouped_matmul(arithmetic, "forward", *sizes))
        return self.cluster.need("flops", ASKED_BY) / (2.0 * self.expert_params)

    def overlap(self) -> int | None:
        """tau: given, or the most experts whose transfer takes no longer than attention, 0 where not one does.

        'paper': floor(T_attention bw / bytes of an expert), bw of a whole node where links differ (Hecate, section
        4.2). None where each plan chooses its own.
        """
        if self.overlap_degree == "paper":
            return math.floor(self.attention_seconds / self.overlap_seconds())
        return self.overlap_degree

    def overlap_seconds(self) -> float:
        """Return the seconds in which an expert travels by that formula."""
        return self.expert_bytes / self.cluster.bandwidth(ASKED_BY)

    def exchange(self, received: np.ndarray) -> np.ndarray:
        """T_A2A, the mean of a layer's four: R [..., D] -> seconds [...].

        Through shared links as if sources were spread evenly over devices; Pro-Prophet's equation 1 has one link each.
        """
        if self.price == "paper":
            return received.max(axis=-1) * self.exchanged_bytes / self.bandwidth()
        links = Links.of(self.cluster, received.shape[-1], ASKED_BY, self.shards)
        return links.received(received * self.exchanged_bytes)

    def forward(self, computed: np.ndarray) -> np.ndarray:
        """T_FEC: H [..., D] -> seconds [...]; the backward takes twice that. Source: Pro-Prophet, equations 2 and 3."""
        return computed.max(axis=-1) / self.tokens_per_second()

    def trans(self, sizes: TransferSizes, devices: int) -> np.ndarray:
        """T_Trans = T_Agg: seconds to send parameters to replicas, or to sum their gradients: sizes [...] -> [...].

        The papers' price is the sum over replicated experts of holders / D x bytes of an expert / W (Pro-Prophet,
        equations 4 and 5), whatever the shape.
        """
        if self.price == "paper":
            return sizes.holders * self.expert_bytes / (devices * self.bandwidth())
        per_node = min(self.cluster.devices_per_node or devices, devices)
        forms = forms_of(self.transfer, devices, per_node)
        times = [self._form_seconds(sizes, form, devices, per_node) for form in forms]
        return functools.reduce(np.minimum, times)

    def _form_seconds(self, sizes: TransferSizes | TransferShape, form: str, devices: int, devices_per_node: int):
        """Return the seconds of one Trans as the program runs it in one form: a straight line where anything moves."""
        group = (devices, devices_per_node, self.shards)
        start, offer, slot, crossing = _transfer_rates(self.cluster, self.expert_bytes, form, group)
        line = offer * sizes.offers + slot * sizes.slots + crossing * sizes.crossing
        return np.where(np.asarray(sizes.slots) > 0, start + line, 0.0)

    def form(self, sizes: TransferSizes | TransferShape, devices: int, devices_per_node: int) -> str:
        """Return the form that `transfer` names for a transfer; 'auto': the cheaper one, of equal ones 'flat'.

        `price` plays no part: this is a choice for the program.
        """
        forms = forms_of(self.transfer, devices, devices_per_node)
        if len(forms) == 1:
            return forms[0]
        times = [float(np.sum(self._form_seconds(sizes, form, devices, devices_per_node))) for form in forms]
        return forms[-1] if times[-1] < times[0] * (1 - 1e-9) else "flat"

    def shape_seconds(self, shape: TransferShape) -> float:
        """Return the seconds of one Trans as the program runs it: every offer, slot and crossing of the shape."""
        form = "by_node" if shape.by_node else "flat"
        return float(self._form_seconds(shape, form, shape.devices, shape.devices_per_node))

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
        forward = self.forward(computed)
        if trans is None:
            trans = self.trans(sizes, computed.shape[-1])
        moved = self.exchange(received) if exchange is None else exchange
        line = next((own for own in self.schedules if own.name == self.schedule), None)
        if line is not None:  # as many rows in every bucket as the busiest device gets of each source
            rows = received.max(axis=-1) / max(1, received.shape[-1] - 1) / self.shards
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


def home_seconds(home: np.ndarray, before: np.ndarray, devices: int, cost: Cost) -> np.ndarray:
    """Return the seconds in which experts get from one home to another, all links at once: [L, E] twice -> [L]."""
    layer, expert = np.nonzero(before != home)
    sent, got = np.zeros((2, len(home), devices))
    np.add.at(sent, (layer, before[layer, expert]), 1)
    np.add.at(got, (layer, home[layer, expert]), 1)
    return np.maximum(sent.max(axis=1), got.max(axis=1)) * cost.state_bytes / cost.bandwidth()


def slots_in(free_bytes: float, layers_alive: int, expert_bytes: float) -> int:
    """mu: replicas of a device that fit, floor(free / (layers alive x bytes of an expert)) (Hecate 4.2)."""
    return int(free_bytes // (layers_alive * expert_bytes))


def forms_of(form: str, devices: int, devices_per_node: int) -> tuple[str, ...]:
    """Return the forms to compare: by node only with several nodes of several devices."""
    if form != "auto":
        return (form,)
    return ("flat", "by_node") if 1 < devices_per_node < devices else ("flat",)


@functools.lru_cache(maxsize=64)
def _transfer_rates(
    cluster: Cluster, chunk_bytes: float, form: str, group: tuple[int, int, int]
) -> tuple[float, float, float, float]:
    """Return the seconds of one Trans as a line: start where anything moves, and for each offer, slot and crossing.

    `group` is D, devices of a node Dn, and the devices between neighbours of the group (N_ESP), as fits are named.
    """
    devices, devices_per_node, stride = group
    by_node, nodes = form == "by_node", devices // devices_per_node
    near, whole = (Group(size, devices_per_node, stride=stride) for size in (devices_per_node, devices))
    groups = [near, Group(nodes, 1, stride=devices_per_node * stride), near] if by_node else [whole, whole]
    sent, lines = sent_by_collective(1, 1, 1, devices=devices, devices_per_node=devices_per_node, by_node=by_node), []
    for group, (inside, across) in zip(groups, sent, strict=True):
        links = Links(cluster, group, ASKED_BY)
        start = links.start_up(across > 0)
        moved = (MANY * inside * chunk_bytes, MANY * across * chunk_bytes)
        lines.append((start, (float(links.uniform(*moved)) - start) / MANY))
    each = [line[1] for line in lines]
    return sum(line[0] for line in lines), each[0], each[-1], each[1] if by_node else 0.0


def padded_seconds(rows: BucketRows, placement: Placement, cost: Cost) -> float:
    """Return the seconds of one exchange of buckets of so many rows between all devices of the placement."""
    sent = rows.carried(placement.devices, placement.devices_per_node)
    inside, across = sent.node * cost.exchanged_bytes, sent.far * cost.exchanged_bytes
    links = Links.of(cost.cluster, placement.devices, "the split of tokens", cost.shards)
    return float(links.uniform(inside, across))


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
    computed, received = routing.expected(placement, loads)
    compiled, trans = shape is not None and cost.price != "paper", None
    if compiled:
        ahead = 0.0 if shape.ahead is None else cost.shape_seconds(shape.ahead)
        trans = np.full(placement.layers, ahead)
    total = sum(cost.parts(computed, received, placement.sizes, trans=trans).values())
    if not compiled or shape.late is None or planned is None:
        return total
    late = placement.replicas[~planned.holds[tuple(placement.replicas.T)]]
    needed = transfer_sizes(placement.home, late, placement.devices, shape.late.inside)
    return total + late_price(needed, shape.late, dataclasses.replace(cost, late=shape.late).late_seconds, 0.0)
