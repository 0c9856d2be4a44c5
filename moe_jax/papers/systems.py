"""One step of a paper's system on a paper's machine: seconds by layer and purpose, from loads and the one cost model.

A `Setting` is a row of a paper's table: a cluster, a model, loads. `run` gives a system's seconds, forward and
backward of one iteration: exchanges link by link, experts by the fullest device, replicas by the volume that the system
itself sends (Pro-Prophet, equations 4 and 5), hidden as that system hides them. What precedes an MoE layer is added;
embeddings and the optimizer are left out, all systems have the same, as are the head and the sums of dense gradients,
which papers' files add where a row is of whole iterations.
Letters: docs/notation.md; n samples.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.analysis.simulate import Records, simulate
from moe_jax.cluster import Cluster, read_cluster
from moe_jax.cluster.cluster import cluster_of
from moe_jax.cluster.fits import assumed, rows_of
from moe_jax.cluster.layer_seconds import preceding_seconds
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import read_device
from moe_jax.observe.loads import LoadsTrace
from moe_jax.papers.loads import fit_loads, with_loads_before
from moe_jax.planning.block_schedule import Prefetch
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost, PaperPrices
from moe_jax.planning.hecate import Hecate
from moe_jax.planning.placement import Placement
from moe_jax.registry import options_in, replaced

VOCABULARY = 50304  # GPT-2's, padded, as configs/model has it: no text names one
REPORTED = ("johnny", "trevor")  # clusters whose FLOP/s are those that a paper reports as reached


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a paper's model."""

    name: str
    layers: int  # MoE layers
    model_dim: int
    hidden_dim: int
    length: int = 1024  # Sq
    moe_every: int = 1
    matrices: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One row: `tokens` of an iteration on all devices, `experts` of a layer; numbers of `item` bytes.

    Each so many-th sample (`every`) that the trace has the iteration before of is judged, planned from that.
    """

    cluster: Cluster
    model: Model
    tokens: int
    top_k: int
    experts: int
    trace: LoadsTrace
    item: int = 2
    replica_slots: int = 4
    overlap_degree: int | str = "paper"  # Hecate's t, by default of its formula
    every: int = 1
    besides: float = 0.0  # forward seconds before an MoE layer that are no matmuls

    @property
    def devices(self) -> int:
        """D."""
        return self.cluster.devices

    @property
    def attention_seconds(self) -> float:
        """Forward seconds of what precedes an MoE layer, for one device's tokens."""
        model = self.model
        block = {"moe_every": model.moe_every, "matrices": model.matrices, "dense_hidden_dim": 4 * model.model_dim}
        sizes = {"model_dim": model.model_dim, "length": model.length}
        return preceding_seconds(self.cluster, self.tokens / self.devices, self.item, **sizes, **block) + self.besides

    @property
    def head_seconds(self) -> float:
        """Seconds of the head, forward and backward."""
        return 6 * self.model.model_dim * VOCABULARY * self.tokens / self.devices / self.cluster.flops

    def fitted(self) -> tuple[LoadsTrace, str]:
        """Return the row's loads [n, L, D, E], and how they were made of the trace."""
        choices = self.tokens * self.top_k // self.devices
        return fit_loads(self.trace, devices=self.devices, experts=self.experts, choices=choices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """How a paper's system balances, and what it hides.

    Attributes:
      planner: a name of `moe_jax.replay`, such as 'fastermoe_after_gate'.
      options: of the planner; bounded, predictor: fields of `PlannerConfig`.
      hiding: block-wise schedule that hides transfers, 'none', 'pro_prophet' or 'hecate'.
      groups: exchanges and experts are cut into as many parts as there are nodes, each part's exchange next to
        another's experts (FasterMoE, section 4.2); else one after the other.
      by_node: an expert crosses to each node once, whose link its devices share (Hecate, sections 3.1 and 4.2); else
        it crosses to each device, at the link's full speed (Pro-Prophet, equations 4 and 5).
      refetch: replicas are dropped after the forward and fetched again (Hecate-RM).
    """

    planner: str
    options: tuple[object, ...] = ()
    predictor: str | None = None
    hiding: str = "none"
    groups: bool = False
    by_node: bool = False
    refetch: bool = False


DEEPSPEED = System(planner="none")
FASTERMOE = System(planner="fastermoe_after_gate", groups=True)
PRO_PROPHET = System(planner="pro_prophet", hiding="pro_prophet")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """Seconds of one system, both ways: `parts` [n, L] by purpose of MoE layers, `attention` of what precedes one.

    `outside`: of what an iteration has besides layers.
    """

    records: Records
    parts: dict[str, np.ndarray]
    attention: float
    model: Model
    outside: float = 0.0

    @property
    def layers(self) -> np.ndarray:
        """Seconds of MoE layers, [n, L]."""
        return sum(self.parts.values())

    @property
    def iterations(self) -> np.ndarray:
        """Seconds of iterations, [n]; the trace's layers stand for all of the model's."""
        return self.model.layers * (self.layers.mean(axis=1) + self.attention) + self.outside


def machine(name: str, nodes: int | None = None, level: str = "middle") -> Cluster:
    """Return the cluster of a paper, configs/cluster/NAME.gin, with as many nodes as given, by a level of prices.

    What of a data sheet's FLOP/s and of a node's links is reached, and start-ups, are the assumptions of the one cost
    model; FLOP/s and links that a paper or its artifact reports as reached stay as they are.
    """
    cluster = read_cluster(f"configs/cluster/{name}.gin").sized(nodes, None)
    flops = 1.0 if name.startswith(REPORTED) else assumed("matmul_share", level)
    links = 1.0 if name.endswith("_measured") else assumed("node_share", level)
    between = cluster.inter_bandwidth and links * cluster.inter_bandwidth
    starts = {"intra_latency": "start", "intra_step": "step", "inter_latency": "node_start", "inter_step": "node_step"}
    given = {field: assumed(price, level) for field, price in starts.items()}
    return dataclasses.replace(cluster, flops=flops * cluster.flops, inter_bandwidth=between, **given)


def prices_of(device: str, level: str = "middle") -> Prices:
    """Return what work takes on a device of the one price list, at a level of prices."""
    return Prices(read_device(device), level)


def listed(device: str, devices: int, level: str) -> Cluster:
    """Return so many devices of the one price list, in nodes of eight."""
    return cluster_of(prices_of(device, level)).sized(-(-devices // 8), min(8, devices))


def as_reached(cluster: Cluster) -> Cluster:
    """Return the cluster with those of its links that others measured on such machines at what they reached."""
    reached = {
        row["link"]: float(row["bytes_per_second"]) for row in rows_of("links") if row["cluster"] == cluster.name
    }
    return dataclasses.replace(cluster, **reached)


def cost_of(system: System, setting: Setting) -> Cost:
    """Return what a row's planner takes for the price of a layer."""
    model = setting.model
    prices = PaperPrices(
        cluster=setting.cluster,
        model_dim=model.model_dim,
        hidden_dim=model.hidden_dim,
        matrices=model.matrices,
        dtype_bytes=setting.item,
        param_bytes=4,
    )
    return Cost(
        prices=prices,
        replica_slots=setting.replica_slots,
        attention_seconds=setting.attention_seconds,
        prefetch=Prefetch(schedule=system.hiding, refetch_replicas=system.refetch),
    )


def planner_of(system: System, setting: Setting) -> PlannerConfig:
    """Return the planner of a row."""
    own = dataclasses.replace(options_in(system, Hecate()), overlap_degree=setting.overlap_degree)
    return PlannerConfig(
        replica_slots=setting.replica_slots,
        split="plan",
        bounded=False,
        must_pay=False,
        predictor=system.predictor,
        options=replaced(system.options, own),
    )


def run(system: System, setting: Setting) -> Step:
    """Return a system's seconds; a sample is planned from the iteration before it, or after the gate from itself."""
    loads = with_loads_before(setting.fitted()[0])
    cluster, devices = setting.cluster, setting.devices
    placement = Placement.even(loads.loads.shape[1], setting.experts, devices, cluster.devices_per_node)
    cost = cost_of(system, setting)
    config = planner_of(system, setting)
    records = simulate(system.planner, loads, config, placement, cost, lag=1, every=setting.every)
    holders = records.expert_replicas + (records.expert_replicas > 0)  # of a replicated expert its home too
    if system.by_node:  # replicas go to nodes without the expert first, so they reach as many nodes as they can
        holders = np.minimum(holders, cluster.nodes) * (devices // cluster.nodes)
    needed = records.needed._replace(holders=holders.sum(axis=2))
    parts = cost.parts(records.computed, records.received, needed, exchange=records.exchange)
    if system.groups and cluster.nodes > 1:
        parts["others"] = pipelined(4 * records.exchange, 3 * cost.prices.compute(records.computed), cluster.nodes)
    return Step(records=records, parts=parts, attention=3 * setting.attention_seconds, model=setting.model)


def pipelined(exchange: np.ndarray, experts: np.ndarray, groups: int) -> np.ndarray:
    """Return the seconds of exchanges and experts cut into groups: the longer one, and a group of the shorter one."""
    return np.maximum(exchange, experts) + np.minimum(exchange, experts) / groups
