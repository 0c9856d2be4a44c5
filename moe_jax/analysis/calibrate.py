"""From timed calls to a cluster file: collectives in their groups, matmuls, gating, layers; fits; `Cluster`; drawings.

On several processes every process gets the same answer: process 0's medians are passed on.
"""

from __future__ import annotations

import concurrent.futures
import csv
import dataclasses
import json
import pathlib
import typing
from collections.abc import Callable, Mapping

from moe_jax.analysis.timed_layers import build_layer, layer_cases, predict, schedules_of
from moe_jax.analysis.timed_parts import (
    Case,
    Timed,
    collective_cases,
    dense_timing,
    empty_case,
    expert_timings,
    gate_timing,
    interleaved_seconds,
    machine_groups,
    medians,
    mesh_groups,
    regroup_timing,
)
from moe_jax.cluster import Cluster, Fit, fit_alpha_beta, fit_layers, fit_saa, split_saa
from moe_jax.cluster.fits import strided_name
from moe_jax.cluster.layer_seconds import layer_name
from moe_jax.errors import UserError
from moe_jax.parallel.mesh import MeshConfig
from moe_jax.training.hosts import Hosts

LEAST_LAYERS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """What is timed.

    Attributes:
      smallest, largest: bytes of the smallest and largest message; points: sizes between them, evenly in the logarithm.
      least_seconds: where the largest message takes less, larger ones are timed, up to 4 times; otherwise the cost of a
        call would hide the slope.
      rounds: interleaved calls of each size; the median counts.
      devices_per_node: devices joined by fast links; 0 takes those of a host, which may run several processes.
      compute: time matmuls, gating and rows as well; layers: and so many whole layers under each schedule, 0 for none.
      scale: sizes of the timed compute over the default ones, in tokens.
    """

    smallest: int = 2**14
    largest: int = 2**22
    points: int = 6
    least_seconds: float = 0.02
    rounds: int = 9
    devices_per_node: int = 0
    compute: bool = True
    layers: int = 14
    scale: float = 1.0

    def __post_init__(self):
        if not 0 < self.smallest < self.largest:
            raise UserError(f"--smallest ({self.smallest}) must be above 0 and below --largest ({self.largest})")
        if self.points < 3 or self.rounds < 1:
            raise UserError(f"--points ({self.points}) must be at least 3 and --rounds ({self.rounds}) at least 1")
        if self.layers and not LEAST_LAYERS <= self.layers:
            raise UserError(f"--layers ({self.layers}) must be 0 or at least {LEAST_LAYERS}: three fits come of them")

    def sizes(self, largest: int) -> list[int]:
        """Return sizes in bytes from the smallest to `largest`, ascending."""
        step = (largest / self.smallest) ** (1 / (self.points - 1))
        return [round(self.smallest * step**i) for i in range(self.points)]


class Points(typing.NamedTuple):
    """What a fit is over: sizes x and y and seconds, of equal length."""

    x: list[float]
    y: list[float]
    seconds: list[float]


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
    per_node = options.devices_per_node or hosts.node_size(devices)
    if len(devices) % per_node:
        raise UserError(f"--devices_per_node ({per_node}) must divide the {len(devices)} devices; set it to a divisor")
    if mesh is None:
        groups = machine_groups(len(devices), per_node)
    else:
        mesh = mesh.resolve(len(devices))
        groups = mesh_groups(mesh.expert, mesh.expert_shard, mesh.model, per_node)
    agree = _Agreement(hosts)
    empty = agree(medians(interleaved_seconds({"call": empty_case(devices)}, 3 * options.rounds)))["call"]
    fits, points = {"call": Fit(empty, 0.0)}, {}
    for timed in groups:
        found = _time_collective(timed, devices, options, empty, agree)
        points[timed.name], fits[timed.name] = found, _fit_saa(found) if timed.collective == "saa" else _fit(found)
        say(_line(timed.name, fits[timed.name]))
    if options.compute:
        for name, found in _time_compute(devices, options, empty, agree).items():
            points[name], fits[name] = found, _fit(found)
            say(_line(name, fits[name]))
    if options.compute and options.layers:
        found = _time_layers(devices, options, mesh, _cluster(fits, devices, per_node), agree)
        for name, fit in _fit_layers(found).items():
            points[name], fits[name] = found[name], fit
            say(_line(name, fit))
    return _cluster(fits, devices, per_node), points


def _time_layers(devices, options: CalibrationOptions, mesh, alone: Cluster, agree) -> dict[str, Points]:
    """Return per fit name the points (predicted communication, predicted computation, seconds) of whole layers."""
    cases = layer_cases(len(devices), options.scale, mesh, options.layers)
    wanted = [(case, schedule) for case in cases for schedule in schedules_of(case)]
    workers = 2 if len({device.process_index for device in devices}) == 1 else 1  # several compile in one order
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        calls = list(pool.map(lambda pair: build_layer(pair[1], pair[0], devices), wanted))
    seconds = agree(
        medians(interleaved_seconds({str(index): call for index, call in enumerate(calls)}, options.rounds))
    )
    found: dict[str, Points] = {}
    for index, (case, schedule) in enumerate(wanted):
        predicted = predict(schedule, case, len(devices), alone)
        points = found.setdefault(layer_name(schedule), Points([], [], []))
        for values, value in zip(
            points, (predicted.communication, predicted.computation, seconds[str(index)]), strict=True
        ):
            values.append(value)
    return found


def _fit_layers(found: dict[str, Points]) -> dict[str, Fit]:
    rows = [(name, *point) for name, points in found.items() for point in zip(*points, strict=True)]
    return fit_layers(*zip(*rows, strict=True)) if rows else {}


def _time_collective(timed: Timed, devices, options, empty: float, agree) -> Points:
    largest = options.largest
    while largest < 4 * options.largest:
        case = collective_cases(timed, devices, largest)[0]
        once = agree(medians(interleaved_seconds({"call": case.call}, 2)))["call"]
        if (once - empty) / case.count >= options.least_seconds:
            break
        largest *= 4
    cases = [case for size in options.sizes(largest) for case in collective_cases(timed, devices, size)]
    return _points(cases, options, empty, agree)


def _points(cases: list[Case], options: CalibrationOptions, empty: float, agree) -> Points:
    """Time the cases in turn; what a call of an empty program takes is not counted."""
    calls = {str(index): case.call for index, case in enumerate(cases)}
    seconds = agree(medians(interleaved_seconds(calls, options.rounds)))
    each = [max(seconds[str(index)] - empty, 0.0) / case.count for index, case in enumerate(cases)]
    return Points([case.x for case in cases], [case.y for case in cases], each)


def _time_compute(devices, options: CalibrationOptions, empty: float, agree) -> dict[str, Points]:
    """Return the points of dense, expert_forward, expert_step, gate and regroup."""

    def tokens(count):
        return max(16, round(count * options.scale))

    timings = {
        "dense": [dense_timing(devices, dim, tokens(rows)) for dim, rows in ((128, 256), (256, 256), (256, 1024))],
        "gate": [
            gate_timing(devices, tokens(count), dim, 8, top_k)
            for count, dim, top_k in (
                (64, 64, 2),
                (128, 256, 1),
                (256, 128, 2),
                (512, 256, 2),
                (1024, 64, 1),
                (1024, 256, 2),
            )
        ],
        "regroup": [
            regroup_timing(devices, tokens(rows), dim, 8, groups)
            for rows, dim, groups in (
                (128, 64, 1),
                (512, 64, 4),
                (512, 256, 1),
                (2048, 64, 2),
                (2048, 256, 1),
                (4096, 128, 4),
            )
        ],
        "expert_forward": [],
        "expert_step": [],
    }
    for rows, groups, dim, hidden in (
        (128, 1, 64, 64), (512, 4, 64, 256), (512, 1, 256, 64), (1024, 2, 128, 128),
        (2048, 4, 64, 64), (2048, 2, 256, 128), (4096, 1, 256, 256), (4096, 4, 128, 64),
    ):  # fmt: skip
        forward, step = expert_timings(devices, tokens(rows), groups, dim, hidden)
        timings["expert_forward"].append(forward)
        timings["expert_step"].append(step)
    return {name: _points(cases, options, empty, agree) for name, cases in timings.items()}


def _fit(points: Points) -> Fit:
    if any(points.y):
        return fit_saa(points.x, points.y, points.seconds)
    return fit_alpha_beta(points.x, points.seconds)


def _fit_saa(points: Points) -> Fit:
    """Fit SAA by its points with gathers, and the slope of its rounds by those without."""
    lines = {}
    for with_gathers in (True, False):
        chosen = [(x, s) for x, y, s in zip(*points, strict=True) if bool(y) == with_gathers]
        lines[with_gathers] = fit_alpha_beta(*zip(*chosen, strict=True))
    ratio = next(y / x for x, y in zip(points.x, points.y, strict=True) if y)
    return split_saa(lines[False], lines[True], ratio)


def _line(name: str, fit: Fit) -> str:
    gamma = f" gamma {fit.gamma:.3e}" if fit.gamma else ""
    return f"{name:24s} alpha {fit.alpha:.3e} s  beta {fit.beta:.3e}{gamma}  R^2 {fit.r2:.4f}"


def _cluster(fits: dict[str, Fit], devices, per_node: int) -> Cluster:
    """Return the record; scalar speeds are computed from the fits, and what was not timed stays absent."""
    nodes = len(devices) // per_node
    inside = fits.get(strided_name("permute", per_node, 1))
    across = fits.get(strided_name("permute", nodes, per_node)) if nodes > 1 else None
    dense = fits.get("dense")
    return Cluster(
        name="calibrated",
        nodes=nodes,
        devices_per_node=per_node,
        intra_bandwidth=_rate(inside),
        inter_bandwidth=_rate(across, per_node),
        intra_latency=None if inside is None else max(0.0, inside.alpha),
        inter_latency=None if across is None else max(0.0, across.alpha),
        intra_step=_step(inside, fits.get(strided_name("all_to_all", per_node, 1)), per_node),
        inter_step=_step(across, fits.get(strided_name("all_to_all", nodes, per_node)), nodes),
        flops=_rate(dense),
        fits=tuple(fits.items()),
        device=f"{devices[0].platform} {devices[0].device_kind}",
        source="moe_jax.calibrate",
    )


def _step(one: Fit | None, several: Fit | None, size: int) -> float | None:
    """Return what each message of an all-to-all of `size` devices adds to the start of a permute, which has one."""
    return None if one is None or several is None else max(0.0, several.alpha - one.alpha) / (size - 1)


def _rate(fit: Fit | None, devices: int = 1) -> float | None:
    """Return units per second of all `devices` together, None where the fit is missing or its slope is not positive."""
    return None if fit is None or fit.beta <= 0 else devices / fit.beta


class _Agreement:
    """Gives every process the numbers of process 0."""

    def __init__(self, hosts: Hosts):
        self.hosts, self.turn = hosts, 0

    def __call__(self, numbers: dict[str, float]) -> dict[str, float]:
        self.turn += 1
        return json.loads(self.hosts.gather_text(f"calibration {self.turn}", json.dumps(numbers))[0])


def write_points(points: Mapping[str, Points], path: str | pathlib.Path) -> None:
    """Write columns name, x, y, seconds: sizes as each fit counts them."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", *Points._fields])
        for name, found in points.items():
            writer.writerows([name, *point] for point in zip(*found, strict=True))


def draw_fits(points: Mapping[str, Points], cluster: Cluster, path: str | pathlib.Path) -> None:
    """Draw seconds over size, a panel per fit, as dots and a line, with R^2 in its title.

    Panels of two-term fits show predicted against measured seconds.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fits = dict(cluster.fits)
    columns = 6
    rows = -(-len(points) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2.3 * columns, 1.9 * rows), squeeze=False)
    for axis in axes.flat[len(points) :]:
        axis.axis("off")
    for axis, (name, found) in zip(axes.flat, points.items(), strict=False):
        fit = fits[name]
        if name.startswith("saa"):  # the points without gathers gave the slope of x alone
            found = Points(*zip(*(point for point in zip(*found, strict=True) if point[1]), strict=True))
        predicted = [1e3 * fit.seconds(x, y) for x, y in zip(found.x, found.y, strict=True)]
        measured = [1e3 * s for s in found.seconds]
        if any(found.y):
            axis.plot(measured, predicted, "o", ms=3)
            axis.plot([0, max(measured)], [0, max(measured)], lw=1)
            axis.set_xlabel("measured ms", fontsize=6)
        else:
            axis.plot(found.x, measured, "o", ms=3)
            axis.plot(found.x, predicted, lw=1)
            axis.set_xlabel("FLOPs" if name == "dense" else "bytes", fontsize=6)
        axis.set_title(f"{name}  R²={fit.r2:.3f}", fontsize=7)
        axis.tick_params(labelsize=5)
        axis.xaxis.get_offset_text().set_fontsize(5)
    figure.suptitle("calibration: milliseconds over size, or predicted over measured", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=70)
    plt.close(figure)
