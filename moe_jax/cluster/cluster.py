"""What is known about the machines: sizes, links, compute speed, fitted collectives; read from and written to files.

A figure that was not given is None; `need` raises an error that names the field and the requester instead of inventing
a number. Files are presets (lines `Cluster.field = value`, valid gin too) or calibrate's JSON; values are Python
literals, nothing is executed. Units: bytes, seconds, FLOP/s; bandwidths count one direction.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import logging
import math
import pathlib
import re

from moe_jax.cluster.fits import Fit
from moe_jax.cluster.prices import Prices
from moe_jax.cluster.targets import device_named, read_device, target_names
from moe_jax.errors import UserError
from moe_jax.shipped import here_or_shipped

_LOG = logging.getLogger("moe_jax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Describe a cluster of equal nodes; None marks what is not known."""

    name: str = "unnamed"  # in reports
    nodes: int | None = None
    devices_per_node: int | None = None
    # bytes/s of one device's link inside its node (of its only link when `flat`)
    intra_bandwidth: float | None = None
    # bytes/s between one node and the network, by all its cards, shared by the devices of the node
    inter_bandwidth: float | None = None
    # seconds of an empty message, with the start of its collective
    intra_latency: float | None = None
    inter_latency: float | None = None
    # seconds that each message of a collective of many adds to that start
    intra_step: float | None = None
    inter_step: float | None = None
    # network cards of a node, each with an equal part of inter_bandwidth and of the devices
    cards_per_node: int = 1
    # PCIe switches or CPU sockets of a node, each with an equal part of its devices
    switches_per_node: int = 1
    switch_bandwidth: float | None = None  # bytes/s between one of them and the rest of its node
    flat: bool = False  # every device is connected to one switch by a link of its own; nodes then share no link
    flops: float | None = None  # FLOP/s that one device reaches in large matrix products
    memory_bytes: float | None = None  # of one device
    fits: tuple[tuple[str, Fit], ...] = ()  # collective name (for example `all_to_all:8`) and its fitted times
    kind: str = ""  # what one device is: a name in `devices/`, whose prices stand for figures that are not given
    prices: Prices | None = None  # of that device; None where no such name is given
    device: str = ""  # the same in words
    source: str = ""  # where the figures come from

    def __post_init__(self):
        for field in ("nodes", "devices_per_node", "cards_per_node", "switches_per_node"):
            value, may_be_absent = getattr(self, field), field in ("nodes", "devices_per_node")
            if value is None and may_be_absent:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                or_none = ", or None when not known" if may_be_absent else ""
                raise UserError(f"Cluster.{field} ({value!r}) must be a whole number of at least 1{or_none}")
        rates = ("intra_bandwidth", "inter_bandwidth", "switch_bandwidth", "flops", "memory_bytes")
        for field in (*rates, "intra_latency", "inter_latency", "intra_step", "inter_step"):
            value = getattr(self, field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(f"Cluster.{field} ({value!r}) must be a finite number, or None when not known")
            if value < 0 or (field in rates and value == 0):
                raise UserError(f"Cluster.{field} ({value!r}) must be {'above' if field in rates else 'at least'} 0")
        if not isinstance(self.flat, bool):
            raise UserError(f"Cluster.flat ({self.flat!r}) must be True or False")
        fits = []
        for name, value in self.fits.items() if isinstance(self.fits, dict) else self.fits:
            try:
                fit = value if isinstance(value, Fit) else Fit(**value) if isinstance(value, dict) else Fit(*value)
                numbers = fit.alpha, fit.beta, fit.gamma
                wrong = any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers)
            except TypeError:
                wrong = True
            if wrong or not all(map(math.isfinite, numbers)):
                raise UserError(
                    f"Cluster.fits[{name!r}] ({value!r}) must be alpha, beta[, gamma] in seconds and seconds per unit"
                )
            fits.append((name, fit))
        object.__setattr__(self, "fits", tuple(sorted(fits)))

    @property
    def devices(self) -> int | None:
        """All devices, where both sizes are known."""
        if self.nodes is None or self.devices_per_node is None:
            return None
        return self.nodes * self.devices_per_node

    def need(self, field: str, requested_by: str):
        """Return a field that must be known.

        Raises:
          UserError: it is absent; the message names field, cluster and requester.
        """
        value = getattr(self, field)
        if value is not None:
            return value
        raise UserError(
            f"{requested_by} needs Cluster.{field}, which cluster {self.name!r} leaves absent; set Cluster.{field} in "
            f"its file, or Cluster.kind to a device ({', '.join(target_names())}), or use a file written by calibrate"
        )

    def check_priced(self, requested_by: str) -> None:
        """Check that it has what seconds are made of: FLOP/s, and the speeds of the links that there are.

        Raises:
          UserError: one is absent; the message names field, cluster and requester.
        """
        alone = not self.flat and self.devices_per_node == 1
        across = not self.flat and self.nodes != 1
        for field, used in (("flops", True), ("intra_bandwidth", not alone), ("inter_bandwidth", across)):
            if used:
                self.need(field, requested_by)

    def bandwidth(self, requested_by: str, of_device: bool = False) -> float:
        """Return the one W that scalar formulas use: the slow link's, where links differ.

        `of_device` is what each device gets of it when all devices of a node send to other nodes at the same time.
        """
        if self.flat or self.nodes == 1:
            return self.need("intra_bandwidth", requested_by)
        inter = self.need("inter_bandwidth", requested_by)
        if of_device:
            inter /= self.need("devices_per_node", requested_by)
        return inter if self.intra_bandwidth is None else min(inter, self.intra_bandwidth)

    def basis(self) -> str:
        """Return on what its seconds rest, in words."""
        named = [f"calibrated ({len(self.fits)} fits)"] if self.fits else []
        if self.prices is not None:
            named += [f"{what} {basis}" for what, basis in self.prices.described().items()]
        return "; ".join(named) or "the figures of its file"

    def part_of(self, sharers: int) -> Cluster:
        """Return what one of `sharers` groups that use the machines at the same time gets of the links they share."""
        return dataclasses.replace(
            self,
            inter_bandwidth=None if self.inter_bandwidth is None else self.inter_bandwidth / sharers,
            switch_bandwidth=None if self.switch_bandwidth is None else self.switch_bandwidth / sharers,
            cards_per_node=max(1, self.cards_per_node // sharers),
        )

    def fit(self, collective: str, requested_by: str) -> Fit:
        """Return the fitted times of a collective, or raise an error that names it and the requester."""
        fits = dict(self.fits)
        if collective not in fits:
            raise UserError(
                f"{requested_by} needs Cluster.fits[{collective!r}], which cluster {self.name!r} leaves absent "
                f"(it has: {', '.join(fits) or 'none'}); run calibrate on these devices"
            )
        return fits[collective]

    def sized(self, nodes: int | None, devices_per_node: int | None) -> Cluster:
        """Return the cluster with other sizes where they are given."""
        return dataclasses.replace(
            self,
            nodes=self.nodes if nodes is None else nodes,
            devices_per_node=self.devices_per_node if devices_per_node is None else devices_per_node,
        )

    def on_mesh(self, devices: int, devices_per_node: int) -> Cluster:
        """Return the cluster of a mesh, checked; one of links without a number of nodes fits any mesh."""
        free = self.nodes is None and not self.fits
        cluster = self.sized(devices // devices_per_node, devices_per_node) if free else self
        cluster.check_devices(devices, "MeshConfig")
        return cluster

    def check_devices(self, devices: int, what: str) -> None:
        """Check that the cluster has as many devices as `what` (a trace, a mesh) has."""
        if self.devices != devices:
            raise UserError(
                f"{what} has {devices} devices, but cluster {self.name!r} has nodes ({self.nodes}) x devices_per_node "
                f"({self.devices_per_node}) = {self.devices}; set both so that their product is {devices}"
            )


@functools.lru_cache(maxsize=64)
def cluster_of(prices: Prices) -> Cluster:
    """Return the cluster of a target: its data sheet's links, and for the rest the assumptions of `prices`.

    `flops` is what a large matmul of the 16-bit dtype reaches.
    """
    target = prices.target
    return Cluster(
        name=target.name,
        nodes=target.nodes,
        devices_per_node=target.per_node,
        intra_bandwidth=target.intra_bandwidth,
        inter_bandwidth=target.node_bandwidth * prices.assumed("node_share"),
        intra_latency=prices.assumed("start"),
        inter_latency=prices.assumed("node_start"),
        intra_step=prices.assumed("step"),
        inter_step=prices.assumed("node_step"),
        cards_per_node=target.adapters,
        flops=prices.reached("bf16"),
        memory_bytes=target.memory_bytes,
        kind=target.name,
        prices=prices,
        device=target.device_kind,
        source=target.source,
    )


def cluster_of_kind(kind: str, **given) -> Cluster:
    """Return a cluster of a device of `devices/`, of any size; fields that are given and not None replace its own.

    Raises:
      UserError: there is no such device.
    """
    if kind not in target_names():
        raise UserError(f"Cluster.kind ({kind!r}) must be one of {', '.join(target_names())}")
    given = {field: value for field, value in given.items() if value is not None}
    sizes = {"nodes": None, "devices_per_node": None}
    return dataclasses.replace(cluster_of(Prices(read_device(kind))), **{**sizes, **given})


# assumed round figures, as in the presets of the same names, which need not be installed: CPU devices, whose links are
# copies in memory; and the devices of a trace that does not say where it was recorded
HOST = Cluster(name="host_devices", flat=True, intra_bandwidth=1e9, flops=1e9)
UNNAMED = Cluster(name="flat_3gbs_30tflops", flat=True, intra_bandwidth=3e9, flops=30e12)


@functools.cache
def _warn_once(line: str) -> None:
    _LOG.warning(line)


def cluster_named(path: str, device_kind: str) -> Cluster:
    """Return the cluster of a file or, where none is named, of the devices at hand: `HOST` where those have no prices.

    What a device reaches, and its link inside a node, are those of the devices at hand where the file leaves them out.

    Args:
      path: as `read_cluster` takes it, or ''; device_kind: what a device calls itself.
    """
    known = device_named(device_kind)
    at_hand = HOST if known is None else cluster_of_kind(known)
    if not path:
        if known is None and device_kind not in ("", "cpu"):
            _warn_once(f"{device_kind!r} has no prices here: those of {HOST.name} are taken; name a file of calibrate")
        return at_hand
    cluster = read_cluster(path)
    absent = [field for field in ("flops", "intra_bandwidth") if getattr(cluster, field) is None]
    if absent:
        _warn_once(f"{path} leaves out {' and '.join(absent)}: those of {at_hand.name} are taken")
        cluster = dataclasses.replace(cluster, **{field: getattr(at_hand, field) for field in absent})
    if cluster.fits and device_kind and not cluster.device.endswith(device_kind):
        _warn_once(f"{path} was calibrated on {cluster.device!r}, and the devices here are {device_kind!r}")
    return cluster


def read_cluster(path: str | pathlib.Path) -> Cluster:
    """Return the cluster of a `.gin` preset or a `.json` calibration file, or of a device of `devices/` by its name.

    A file that is not here is looked for among those that come with the package.

    Raises:
      UserError: no such file, a line that is no binding of Cluster, or a field that Cluster does not have.
    """
    if str(path) in target_names():
        return cluster_of_kind(str(path))
    path = here_or_shipped(path)
    if not path.is_file():
        raise UserError(
            f"cluster file {str(path)!r} does not exist; give a configs/cluster/NAME.gin, calibrate's file, or one of "
            f"{', '.join(target_names())}"
        )
    text, fields = path.read_text(encoding="utf-8"), {}
    if path.suffix == ".json":
        try:
            fields = json.loads(text)["cluster"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path.name} is not a calibration file (JSON with an object 'cluster'): {error}"
            ) from error
        if not isinstance(fields, dict):
            what = type(fields).__name__
            raise UserError(f"{path.name}: 'cluster' must be an object of Cluster's fields, not {what}")
    else:
        for number, line in enumerate(map(str.strip, text.splitlines()), 1):
            if not line or line.startswith("#"):
                continue
            match = re.match(r"Cluster\.(\w+)\s*=\s*(.+)$", line)
            if match is None:
                raise UserError(f"{path.name}:{number}: {line!r} is not a line 'Cluster.field = value'")
            name, value = match.groups()
            if name in fields:
                raise UserError(f"{path.name}:{number}: Cluster.{name} is bound twice")
            try:
                fields[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError) as error:
                raise UserError(f"{path.name}:{number}: {value!r} of Cluster.{name} is not a Python literal") from error
    known = [field.name for field in dataclasses.fields(Cluster) if field.name != "prices"]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise UserError(f"{path.name}: Cluster has no field {unknown[0]!r}; its fields are {', '.join(known)}")
    fields = {"name": path.stem, **fields}
    cluster = cluster_of_kind(**fields) if fields.get("kind") else Cluster(**fields)
    name = device_named(cluster.device)
    one_way = None if name is None else read_device(name).intra_bandwidth
    if one_way and not cluster.fits and cluster.intra_bandwidth and 1.9 < cluster.intra_bandwidth / one_way < 2.1:
        _warn_once(
            f"{path}: Cluster.intra_bandwidth ({cluster.intra_bandwidth:g}) is twice what {name} sends one way "
            f"({one_way:g}); is it a two-way figure?"
        )
    return cluster


def write_cluster(cluster: Cluster, path: str | pathlib.Path) -> None:
    """Write a cluster as JSON with the fields of a preset; absent ones are null."""
    fields = {field.name: getattr(cluster, field.name) for field in dataclasses.fields(cluster)}
    del fields["prices"]  # `kind` names them
    fields["fits"] = {name: dataclasses.asdict(fit) for name, fit in cluster.fits}
    pathlib.Path(path).write_text(json.dumps({"cluster": fields}, indent=1) + "\n", encoding="utf-8")
