"""The devices that a program can be compiled for without owning one: `--target=NAME:NODESxDEVICES`.

Inputs: that text. Outputs: a `Target` (what the cost model assumes of a device and its links) with its topology. Each
device is a file `devices/NAME.txt`: lines `Target.field = literal`, then XLA's own description of the device
(GpuTargetConfigProto in text form), which goes to the compiler as it stands.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import pathlib
import re

from moe_jax.errors import UserError

FOLDER = pathlib.Path(__file__).parent / "devices"
MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # environment: the share of a GPU's memory that jax takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of device, and how many of them a run has on how many nodes."""

    name: str  # of its file
    device_kind: str  # what it is called, and calls itself as a `jax.Device`
    intra_bandwidth: float  # bytes/s one way of one device's link inside its node
    node_bandwidth: float  # bytes/s one way between a node and the network, by all its adapters together
    adapters: int  # network adapters of a node; a device reaches one at a time
    memory_bandwidth: float  # bytes/s of device memory
    memory_bytes: float | None = None
    flops_bf16: float  # peak FLOP/s by arithmetic, without sparsity
    flops_tf32: float
    flops_f32: float
    flops_f64: float
    source: str  # where the figures come from
    tables: tuple[str, ...] = ()  # names in `measured/`, the first that has rows counts; () for none
    dropped_by_cuda: int | None = None  # the first CUDA version that no longer compiles for this device
    nodes: int = 1
    per_node: int = 1
    config: str = ""  # XLA's description of the device, which has the next three
    compute_capability: str = ""  # such as '9.0'; '' where the description lacks it
    cores: int = 0  # streaming multiprocessors; 0 where the description lacks them
    whole_memory: int = 0  # bytes of the device's memory as XLA counts them; 0 where the description lacks them

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    platform = "cuda"  # like `device_kind` and `compute_capability` what a `jax.Device` says of itself

    def flops(self, arithmetic: str) -> float:
        """Return the peak FLOP/s of 'bf16', 'tf32', 'f32' or 'f64'."""
        return getattr(self, f"flops_{arithmetic}")

    @property
    def usable_memory(self) -> float:
        """Bytes that jax takes of it: three quarters where the environment says nothing."""
        return float(os.environ.get(MEMORY_SHARE, 0.75)) * self.whole_memory

    def check_compilable(self, cuda: int) -> None:
        """Raise a UserError if the CUDA wheels of this major version no longer compile for this device."""
        if self.dropped_by_cuda is not None and cuda >= self.dropped_by_cuda:
            raise UserError(
                f"target {self.name!r} ({self.device_kind}) was dropped by CUDA {self.dropped_by_cuda}, and the wheels "
                f"here are of CUDA {cuda}; give the command in an environment with the wheels of jax[cuda"
                f"{self.dropped_by_cuda - 1}], which compile for it, or choose one of "
                f"{', '.join(name for name in target_names() if name != self.name)}"
            )


def target_names() -> tuple[str, ...]:
    """Return the names of all devices."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.txt")))


def parse_target(text: str) -> Target:
    """Return the target of 'NAME:NODESxDEVICES', such as 'h200:4x8'; a UserError says what another text lacks."""
    name, _, topology = text.partition(":")
    if name not in target_names():
        raise UserError(f"--target ({text!r}) names no known device; choose one of {', '.join(target_names())}")
    sizes = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,2})", topology)
    if not sizes:
        raise UserError(
            f"--target ({text!r}) needs a topology NODESxDEVICES of whole numbers of at least 1, such as {name}:4x8"
        )
    return dataclasses.replace(read_device(name), nodes=int(sizes.group(1)), per_node=int(sizes.group(2)))


def read_device(name: str) -> Target:
    """Return one device of a node of one."""
    fields, rest = {}, []
    for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"Target\.(\w+) = (.*)$", line):
            fields[found.group(1)] = ast.literal_eval(found.group(2))
        elif not line.startswith("#"):
            rest.append(line)
    config = "\n".join(rest).strip() + "\n"
    capability = re.search(r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))?", config)
    cores, memory = (re.search(rf"{field}: (\d+)", config) for field in ("core_count", "device_memory_size"))
    return Target(
        name=name,
        config=config,
        compute_capability=f"{capability.group(1)}.{capability.group(2) or 0}" if capability else "",
        cores=int(cores.group(1)) if cores else 0,
        whole_memory=int(memory.group(1)) if memory else 0,
        **fields,
    )


def device_named(kind: str) -> str | None:
    """Return the name of the target for a real device of this kind, None where there is none."""
    plain = kind.lower().replace(" ", "")
    return max((name for name in target_names() if name in plain), key=len, default=None)
