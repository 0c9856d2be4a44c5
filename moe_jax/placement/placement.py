"""Which device holds which expert, for all layers at once.

Inputs: the home device of every expert, the replicas held for one step, and the rule that sends a token to a holder.
Outputs: a frozen, checked `Placement`. How many tokens go where is counted in `routing.py`. It moves no parameters and
predicts no times.

Letters: docs/notation.md; n replica rows, m share rows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np

from moe_jax.errors import UserError
from moe_jax.placement import checks
from moe_jax.placement.candidates import Candidates, build_candidates

RULES = ("nearest", "home", "shares")
SHARE_ONE = 1 << 16
_NOT_GIVEN: Any = None  # fields typed as what they are once checked


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Hold homes, replicas and the token rule of every layer.

    Args:
      home: int [L, E], the device that owns parameters and optimizer state of an expert: exactly one.
      replicas: int [n, 3], rows (layer, expert, device): who else holds the parameters during a step.
      shares: int [m, 4] or [m, 5], rows (layer, expert, device, share[, source node]). Shares are in units of 2^-16 and
        sum to 2^16 for each (layer, expert, source node). Without a source node (or with -1) a row counts for every
        node that has no rows of its own for that expert.
      rule: one of `nearest`, `home`, `shares`, for all layers or one per layer.
      devices: D; taken from the largest device id, or from the loads, when not given.
      devices_per_node: devices that share a node, by rising id; all of them when not given.
      replica_slots: if given, the most replicas that one device may hold in one layer.

    Raises:
      UserError: an expert without a home or with two, a replica listed twice, too many replicas, or wrong shares.
    """

    home: np.ndarray
    replicas: np.ndarray = _NOT_GIVEN
    shares: np.ndarray = _NOT_GIVEN
    rule: str | tuple[str, ...] = "nearest"
    devices: int = _NOT_GIVEN
    devices_per_node: int = _NOT_GIVEN
    replica_slots: int | None = None
    _inferred: bool = dataclasses.field(init=False, repr=False, default=False)

    def __post_init__(self):
        home = checks.whole_array("home", self.home, 2)
        replicas = checks.rows("replicas", self.replicas, 3)
        shares = checks.share_rows(self.shares)
        inferred = self.devices is None
        devices = (
            int(self.devices) if not inferred else int(max(home.max(initial=0), replicas[:, 2].max(initial=0))) + 1
        )
        per_node = devices if self.devices_per_node is None else int(self.devices_per_node)
        rule = (self.rule,) * home.shape[0] if isinstance(self.rule, str) else tuple(self.rule)
        replicas = replicas[np.lexsort(replicas.T[::-1])]
        shares = shares[np.lexsort(shares[:, [2, 4, 1, 0]].T)]
        checks.check_sizes(home, devices, per_node, rule, RULES)
        checks.check_home(home, devices)
        checks.check_replicas(home, replicas, devices, self.replica_slots)
        checks.check_shares(home, replicas, shares, rule, devices // per_node, devices, SHARE_ONE)
        for name, value in (("home", home), ("replicas", replicas), ("shares", shares)):
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        for name, value in (("rule", rule), ("devices", devices), ("devices_per_node", per_node)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_inferred", inferred)

    @classmethod
    def even(cls, layers: int, experts: int, devices: int, devices_per_node: int | None = None, **fields) -> Placement:
        """Home experts d E/D ... (d+1) E/D - 1 of every layer on device d: plain expert parallelism."""
        if min(layers, experts, devices) < 1 or experts % devices:
            raise UserError(
                f"experts ({experts}) must be a positive multiple of devices ({devices}) and layers ({layers}) at "
                f"least 1; use a multiple of {max(devices, 1)} experts or fewer devices"
            )
        home = np.broadcast_to(np.arange(experts, dtype=np.int32) // (experts // devices), (layers, experts))
        per_node = devices if devices_per_node is None else devices_per_node
        return cls(home.copy(), devices=devices, devices_per_node=per_node, **fields)

    @property
    def layers(self) -> int:
        """L."""
        return self.home.shape[0]

    @property
    def experts(self) -> int:
        """E, of one layer."""
        return self.home.shape[1]

    @property
    def nodes(self) -> int:
        """Groups of `devices_per_node` devices."""
        return self.devices // self.devices_per_node

    def replace(self, **fields) -> Placement:
        """Return this placement with some fields changed, checked again."""
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        if self._inferred and "devices" not in fields:
            kept["devices"] = None
            kept["devices_per_node"] = None if self.nodes == 1 else self.devices_per_node
        return Placement(**{**kept, **fields})

    @functools.cached_property
    def holds(self) -> np.ndarray:
        """bool [L, E, D]: the device has the expert's parameters during a step, as home or as replica."""
        held = np.zeros((self.layers, self.experts, self.devices), bool)
        np.put_along_axis(held, self.home[:, :, None], True, axis=2)
        held[tuple(self.replicas.T)] = True
        held.setflags(write=False)
        return held

    @functools.cached_property
    def candidates(self) -> Candidates:
        """The holders a token may choose between, as slices of sorted rows."""
        return build_candidates(self.holds, self.shares, self.nodes)

    def fingerprint(self) -> str:
        """Hash everything that decides numbers or bytes, so that processes can compare their plans."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.home, self.replicas, self.shares):
            digest.update(repr(array.shape).encode() + np.ascontiguousarray(array, np.int32).tobytes())
        digest.update(repr((self.rule, self.devices, self.devices_per_node)).encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def matched(self, loads: np.ndarray) -> tuple[Placement, np.ndarray]:
        """Check loads against the sizes; a placement whose device count was inferred grows to the sources."""
        loads = checks.loads_array(loads)
        placed = self
        if self._inferred and loads.ndim == 3 and loads.shape[1] > self.devices:
            per_node = loads.shape[1] if self.nodes == 1 else self.devices_per_node
            placed = self.replace(devices=loads.shape[1], devices_per_node=per_node)
        if loads.shape != (placed.layers, placed.devices, placed.experts):
            raise UserError(
                f"loads have shape [layers, sources, experts] = {loads.shape}, but the placement has {placed.layers} "
                f"layers, {placed.devices} devices (a source is a device) and {placed.experts} experts; use loads of "
                "the same run"
            )
        return placed, loads
