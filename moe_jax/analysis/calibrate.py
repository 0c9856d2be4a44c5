"""From timed calls of collectives, matmuls, gating and layers to a cluster file: fits, `Cluster`, points."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable

from moe_jax.analysis.timed import (
    Timed,
    build_layer,
    collective_cases,
    compute_cases,
    interleaved_seconds,
    layer_cases,
    machine_groups,
    mesh_groups,
    predict,
    schedules_of,
)
from moe_jax.cluster import Cluster, Fit, fit_alpha_beta, fit_layers
from moe_jax.cluster.fits import fit_name
from moe_jax.errors import UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.parallel.mesh import MeshConfig, node_size

LEAST_LAYERS = 4
LEAST_SECONDS = 0.02
SMALLEST = 2**14  # bytes of the smallest message

Clock = Callable[[list[Callable], int], list[float]]  # calls and rounds -> the median seconds of each


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """What is timed."""

    largest: int = 2**22  # bytes of the largest message; up to 4 times more where that takes less than `LEAST_SECONDS`
    points: int = 6  # sizes from the smallest to it, evenly in the logarithm
    rounds: int = 9  # interleaved calls of each size; the median counts
    devices_per_node: int = 0  # devices joined by fast links; 0 takes those of a host, which may run several processes
    compute: bool = True  # time matmuls, gating and rows as well
    layers: int = 14  # and so many whole layers under each schedule, 0 for none

    def __post_init__(self):
        if self.largest <= SMALLEST:
            raise UserError(f"--largest ({self.largest}) must be above {SMALLEST}, the smallest message's bytes")
        if self.points < 3 or self.rounds < 1:
            raise UserError(f"--points ({self.points}) must be at least 3 and --rounds ({self.rounds}) at least 1")
        if self.layers and not LEAST_LAYERS <= self.layers:
            raise UserError(f"--layers ({self.layers}) must be 0 or at least {LEAST_LAYERS}: three fits come of them")


Points = list[tuple[float, float, float]]  # what a fit is over: sizes x and y, and seconds


def calibrate(
    devices,
    options: CalibrationOptions,
    hosts: Hosts,
    mesh: MeshConfig | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Cluster, dict[str, Points]]:
    """Time the devices.

    Args:
      devices: all devices, in the order of the device index.
      mesh: the only mesh that the file must serve; None serves all whose N_MP and N_ESP are 1, 2 or 4.
      say: called with one line of text per fit.
    """
    per_node = options.devices_per_node or node_size(devices, hosts.machines)
    if len(devices) % per_node:
        raise UserError(f"--devices_per_node ({per_node}) must divide the {len(devices)} devices; set it to a divisor")
    if mesh is None:
        groups = machine_groups(len(devices), per_node)
    else:
        mesh = mesh.resolve(len(devices))
        groups = mesh_groups(mesh.expert, mesh.expert_shard, mesh.model, per_node)
    turns = itertools.count(1)

    # every process gets the same answer: process 0's medians are passed on
    def clock(calls, rounds):
        seconds = interleaved_seconds(dict(enumerate(calls)), rounds)
        own = json.dumps([statistics.median(seconds[index]) for index in range(len(calls))])
        return json.loads(hosts.gather_text(f"calibration {next(turns)}", own)[0])

    def note(name, found, fit):
        points[name], fits[name] = found, fit
        gamma = f" gamma {fit.gamma:.3e}" if fit.gamma else ""
        say(f"{name:24s} alpha {fit.alpha:.3e} s  beta {fit.beta:.3e}{gamma}  R^2 {fit.r2:.4f}")

    def time_cases(name, cases):
        """Time the cases in turn and fit them; what a call of an empty program takes is not counted."""
        seconds = clock([case.call for case in cases], options.rounds)
        each = [max(took - empty, 0.0) / case.count for took, case in zip(seconds, cases, strict=True)]
        sizes, others = [case.x for case in cases], [case.y for case in cases]
        found, second = list(zip(sizes, others, each, strict=True)), others if any(others) else None
        note(name, found, _fit_saa(found) if name.startswith("saa") else fit_alpha_beta(sizes, each, second))

    (nothing,) = collective_cases(Timed("none", len(devices)), devices, 0)
    (empty,) = clock([nothing.call], 3 * options.rounds)
    fits: dict[str, Fit] = {"call": Fit(empty, 0.0)}
    points: dict[str, Points] = {}
    for timed in groups:
        largest = options.largest
        # otherwise the cost of a call would hide the slope
        while largest < 4 * options.largest:
            case = collective_cases(timed, devices, largest)[0]
            if (clock([case.call], 2)[0] - empty) / case.count >= LEAST_SECONDS:
                break
            largest *= 4
        step = (largest / SMALLEST) ** (1 / (options.points - 1))
        sizes = [round(SMALLEST * step**i) for i in range(options.points)]
        time_cases(timed.name, [case for size in sizes for case in collective_cases(timed, devices, size)])
    if options.compute:
        for name, cases in compute_cases(devices).items():
            time_cases(name, cases)
    if options.compute and options.layers:
        layers, layer_fits = time_layers(devices, options, mesh, _cluster(fits, devices, per_node), clock)
        for name, fit in layer_fits.items():
            note(name, layers[name], fit)
    return _cluster(fits, devices, per_node), points


def time_layers(
    devices, options: CalibrationOptions, mesh, alone: Cluster, clock: Clock
) -> tuple[dict[str, Points], dict[str, Fit]]:
    """Return (predicted communication, predicted computation, seconds) of whole layers by fit name, and the fits."""
    cases = layer_cases(len(devices), mesh, options.layers)
    wanted = [(case, schedule) for case in cases for schedule in schedules_of(case)]
    workers = 2 if len({device.process_index for device in devices}) == 1 else 1  # several compile in one order
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        calls = list(pool.map(lambda pair: build_layer(pair[1], pair[0], devices), wanted))
    rows, found = [], {}
    for (case, schedule), seconds in zip(wanted, clock(calls, options.rounds), strict=True):
        predicted = predict(schedule, case, len(devices), alone)
        row = predicted.communication, predicted.experts + predicted.gate + predicted.rows, seconds
        rows.append((f"layer:{schedule}", *row))
        found.setdefault(f"layer:{schedule}", []).append(row)
    return found, fit_layers(*zip(*rows, strict=True)) if rows else {}


def _fit_saa(points: Points) -> Fit:
    """Fit alpha + beta x + gamma y of SAA by two lines over x: its rounds alone, and all of it.

    The sizes of one mesh give y a fixed ratio to x, so the rounds' part of the slope can only be fitted from the rounds
    alone.
    """
    rounds = fit_alpha_beta(*zip(*((x, seconds) for x, y, seconds in points if not y), strict=True))
    whole = fit_alpha_beta(*zip(*((x, seconds) for x, y, seconds in points if y), strict=True))
    y_over_x = next(y / x for x, y, _ in points if y)
    return Fit(whole.alpha, min(rounds.beta, whole.beta), max(0.0, whole.beta - rounds.beta) / y_over_x, whole.r2)


def _cluster(fits: dict[str, Fit], devices, per_node: int) -> Cluster:
    """Return the record; scalar speeds are computed from the fits, and what was not timed stays absent."""
    nodes, links = len(devices) // per_node, {}
    for place, size, stride in (("intra", per_node, 1), ("inter", nodes, per_node)):
        one, several = (fits.get(fit_name(kind, size, stride=stride)) for kind in ("permute", "all_to_all"))
        if one is not None and size > 1:
            # messages of all devices of a node share its link to others, and a permute has one of each
            links[f"{place}_bandwidth"] = stride / one.beta if one.beta > 0 else None
            links[f"{place}_latency"] = max(0.0, one.alpha)
            if several is not None:
                links[f"{place}_step"] = max(0.0, several.alpha - one.alpha) / (size - 1)
    dense = fits.get("dense")
    return Cluster(
        name="calibrated",
        nodes=nodes,
        devices_per_node=per_node,
        **links,
        flops=None if dense is None or dense.beta <= 0 else 1 / dense.beta,
        fits=tuple(fits.items()),
        device=f"{devices[0].platform} {devices[0].device_kind}",
        source="moe_jax.calibrate",
    )
