"""What a device takes: seconds of matmuls, grouped matmuls, attention, other kernels and collectives, and their basis.

Inputs: a `Target` (data sheet and the names of its tables), a level for what nobody measured, and what a user measured.
Outputs: seconds. A figure is the user's own ('calibrated'), else of a public table ('measured'), else
the data sheet's with a share that is assumed to be reached. `collectives.py` asks here for what links take.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from moe_jax.cluster import fits
from moe_jax.cluster.fits import Fit, assumed, fitted
from moe_jax.cluster.targets import Target
from moe_jax.errors import UserError


def read_constants(path: str) -> dict[str, float]:
    """Return the fields of `Prices` that a file has measured.

    Args:
      path: JSON, {"matmul_efficiency": 0.6, ...}, or such a record under "constants" as `gpu_day.json` and a report of
        `inspect --profile` hold it.

    Raises:
      UserError: no such file, no constants in it, an unknown name, or a value out of range.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--constants ({path!r}) cannot be read as JSON: {error}") from error
    if isinstance(record, dict) and "constants" in record:
        record = record["constants"]
    if not isinstance(record, dict) or not record:
        raise UserError(f"--constants ({path!r}) holds no constants; write some of {', '.join(MEASURED)}")
    for name, value in record.items():
        if name not in MEASURED:
            raise UserError(f"--constants ({path!r}) names {name!r}; the model has {', '.join(MEASURED)}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # integers of JSON have no bound
        least, most, rule = sys.float_info.min, 1, "a share above 0 and at most 1"
        if not name.endswith(("efficiency", "share")):
            least, most, rule = 0, sys.float_info.max, "seconds, at least 0"
        if not is_number or not least <= value <= most:
            raise UserError(f"--constants ({path!r}): {name} ({value!r}) must be {rule}")
    return {name: float(value) for name, value in record.items()}


def arithmetic_of(item: int) -> str:
    """Return the arithmetic of matmuls whose numbers have so many bytes."""
    return "bf16" if item <= 2 else "f64" if item == 8 else "tf32"


def attention_flops(kind: str, sizes: tuple[float, ...], causal: bool) -> float:
    """Return the FLOPs of fused attention as hardware does them, half where causal; see `Prices.attention`."""
    batch, heads, length, head_dim, value_dim = sizes
    times = (5.0 if kind == "backward" else 2.0) * (0.5 if causal else 1.0)
    return times * batch * heads * length**2 * (head_dim + value_dim)


@dataclasses.dataclass(frozen=True)
class Prices:
    """Seconds on one kind of device, at one level of assumed prices; a user's own measurements come first.

    Fields after the level are those measurements; None: not measured.
    """

    target: Target
    level: str = "middle"  # of `fits.LEVELS`
    matmul_efficiency: float | None = None  # of the peak FLOP/s, reached by all matmuls
    memory_efficiency: float | None = None  # of the memory bandwidth, reached by kernels without matmuls
    launch: float | None = None  # the least seconds of any kernel
    conditional: float | None = None  # seconds that the device is idle at each conditional, besides its branch
    start: float | None = None  # seconds of an empty collective inside a node
    step: float | None = None  # that each message adds to it
    node_start: float | None = None  # likewise of one that leaves its node
    node_step: float | None = None
    node_share: float | None = None  # of the adapters' bytes/s, reached between nodes

    def assumed(self, name: str) -> float:
        """Return a row of `measured/assumed.csv`, or what the user measured of it."""
        own = {"memory_share": "memory_efficiency", "matmul_share": "matmul_efficiency"}.get(name, name)
        given = getattr(self, own, None)
        return assumed(name, self.level) if given is None else given

    def table(self, name: str, kind: str):
        """Return the fit of a public table for this device (`fits.fitted`); None without one, or where a user's own
        efficiency of matmuls stands for all kernels' tables."""
        own = name != "collectives" and self.matmul_efficiency is not None
        return None if own or not self.target.tables else fitted(name, self.target.tables, kind)

    def memory(self, moved: float) -> float:
        """Return the seconds of a kernel that reads and writes so many bytes of device memory and computes little."""
        return max(moved / (self.target.memory_bandwidth * self.assumed("memory_share")), self.assumed("launch"))

    def matmul(self, arithmetic: str, b: float, m: float, n: float, k: float) -> float:
        """Return the seconds of [b, m, k] x [b, k, n]; arithmetic: 'bf16' (up to 16 bits), 'tf32', 'f32', 'f64'."""
        fit = self.table("matmuls", arithmetic)
        if fit is None:
            return self._by_peak("matmul_share", arithmetic, 2.0 * b * m * n * k)
        # the table's start holds a launch; inside a command buffer it may be shorter
        start = min(fit[0], self.assumed("launch")) if self.level == "low" else fit[0]
        return float(start + fits.matmul_columns(b, m, n, k)[1:] @ fit[1:])

    def grouped_matmul(self, arithmetic: str, kind: str, rows: float, k: float, n: float, groups: float) -> float:
        """Return the seconds of rows [R, K] by [G, K, N]; kind: 'forward', 'dlhs', 'drhs' (see `fits`)."""
        fit = self.table("grouped_matmuls", kind)
        if fit is None:
            return self._by_peak("grouped_share", arithmetic, 2.0 * rows * k * n)
        slower = self.target.flops_bf16 / self.target.flops(arithmetic)
        return max(float(fits.grouped_columns(rows, k, n, groups) @ fit) * slower, self.assumed("launch"))

    def attention(self, kind: str, sizes: tuple[float, ...], causal: bool) -> float:
        """Return the seconds of fused attention; kind: 'forward', 'backward'.

        Args:
          sizes: batch, heads, length, head dim of q and k, head dim of v. Causal counts half of the FLOPs.
        """
        fit = self.table("attention", kind)
        if fit is None:
            return self._by_peak("attention_share", "bf16", attention_flops(kind, sizes, causal))
        return max(float(fits.attention_columns(*sizes, float(causal)) @ fit), self.assumed("launch"))

    def described(self) -> dict[str, str]:
        """Return {what: on what its seconds rest}."""
        from_table = f"measured ({', '.join(self.target.tables)}; cluster/measured)"
        of_kernels, found = "data sheet" if self.matmul_efficiency is None else "calibrated", {}
        for what, table, kind in (
            ("matmuls (bf16)", "matmuls", "bf16"),
            ("matmuls (tf32)", "matmuls", "tf32"),
            ("grouped matmuls", "grouped_matmuls", "forward"),
            ("attention", "attention", "forward"),
            ("exchanges inside a node", "collectives", "all-to-all"),
        ):
            without = "data sheet" if table == "collectives" else of_kernels
            found[what] = without if self.table(table, kind) is None else from_table
        if lines := self.table("collectives", "all-to-all"):
            larger = "; larger ones extrapolated by rounds" if self.target.per_node > max(lines) else ""
            found["exchanges inside a node"] += f", groups of {min(lines)} to {max(lines)}{larger}"
        sheet = "data sheet x {:g}, {} {:g} us, {}"
        for what, share, name, given in (
            ("exchanges between nodes", "node_share", "start-up", (self.node_share, self.node_start)),
            ("other kernels", "memory_share", "launch", (self.memory_efficiency, self.launch)),
        ):
            said = "assumed" if given == (None, None) else "calibrated" if None not in given else "in part calibrated"
            start = self.assumed("launch" if name == "launch" else "node_start")
            found[what] = sheet.format(self.assumed(share), name, 1e6 * start, said)
        return found

    def collective(self, kind: str, members: int) -> Fit | None:
        """Return the measured line of a collective inside a node, over sqrt(Z) and Z; None without a table.

        A permute sends Z where an all-to-all of two sends half of it, and counts as such a one of 2 Z.
        """
        if kind == "collective-permute":
            pair = self.collective("all-to-all", 2)
            return None if pair is None else Fit(pair.alpha, pair.beta * 2**0.5, pair.gamma * 2)
        if members < 2:
            return None
        lines = self.table("collectives", "all-gather" if kind == "collective-broadcast" else kind)
        return None if lines is None else fits.collective_line(lines, members, kind)

    def reached(self, arithmetic: str) -> float:
        """Return the FLOP/s that a large matmul reaches."""
        size = 4096.0
        return 8 * size**3 / self.matmul(arithmetic, 4, size, size, size)

    def _by_peak(self, share: str, arithmetic: str, flops: float) -> float:
        given = self.matmul_efficiency
        return max(flops / (self.target.flops(arithmetic) * (given or self.assumed(share))), self.assumed("launch"))


MEASURED = tuple(field.name for field in dataclasses.fields(Prices))[2:]  # what a user may have measured
