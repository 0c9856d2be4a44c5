"""What one instruction of a compiled program computes and moves (FLOPs of its matmuls, bytes), and its rows of buckets.

Matmuls are counted wherever they stand, inside fusions too; of all else only the bytes. An operand that a fusion only
slices counts the slice, and an array updated in place the update. Kernels written by hand are counted by their
operands' shapes, as if every row were in use; a custom call of another form counts its bytes alone and is reported by
name.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections import Counter
from collections.abc import Sequence

from moe_jax.cluster.hlo import Computation, Instruction, Module
from moe_jax.cluster.prices import Prices, attention_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The buckets of one device in one exchange of one layer, of a segment of layers that are alike."""

    segment: str  # its name
    by_shape: int  # rows of all of its buckets together
    expected: float  # of them, those that hold a token under the stated loads, in the mean over devices
    exchanges: int  # of tokens in one step, there and back counted once: layers x parts of a batch x microbatches
    overflow: float | None  # the most that the chance of one of them is to overflow, None where that is not known

    @property
    def used(self) -> float:
        """The share of the rows that is expected to hold a token, at most 1."""
        return min(1.0, self.expected / self.by_shape)


def used_share(buckets: Sequence[Buckets], rows: int) -> float:
    """Return the share of `rows` that is expected to be used: of the segment with so many, else the mean of all.

    Where no buckets are known it is 1.
    """
    found = [own.used for own in buckets if own.by_shape == rows] or [own.used for own in buckets] or [1.0]
    return sum(found) / len(found)


FREE = frozenset(
    "parameter constant bitcast tuple get-tuple-element partition-id replica-id after-all opt-barrier add-dependency "
    "async-update copy-done domain rng-get-and-update-state".split()
)
SLICES = ("dynamic-slice", "slice", "gather")
# what writes a part of its first operand in place: where that part stands among its operands, and how many of its bytes
# move; a scatter reads what it adds to (as in XLA's hlo_cost_analysis.cc, `HandleScatter`)
UPDATES = {"dynamic-update-slice": (1, 2), "scatter": (2, 3)}
SORT_SWEEPS = 4  # a radix sort of 32-bit keys reads and writes everything about so often


class Product(typing.NamedTuple):
    """A matmul, a grouped matmul or fused attention, as `Prices` takes it."""

    # 'matmul', of grouped ones 'forward', 'dlhs', 'drhs', of attention 'attention forward', 'attention backward'
    kind: str
    arithmetic: str  # 'bf16' (any 16-bit or 8-bit float), 'tf32', 'f32' (float32 at highest precision) or 'f64'
    # matmul: b, m, n, k; grouped: rows, k, n, groups; attention: batch, heads, length, head dim of q and k, and of v
    sizes: tuple[float, ...]
    causal: bool = False

    @property
    def flops(self) -> float:
        """FLOPs as the hardware would do them; causal attention counts half."""
        if self.kind.startswith("attention"):
            return attention_flops(self.kind.removeprefix("attention "), self.sizes, self.causal)
        return 2.0 * math.prod(self.sizes if self.kind == "matmul" else self.sizes[:3])

    def seconds(self, prices: Prices) -> float:
        """Return what it takes, on a device and at a level."""
        if self.kind == "matmul":
            return prices.matmul(self.arithmetic, *self.sizes)
        if self.kind.startswith("attention"):
            return prices.attention(self.kind.removeprefix("attention "), self.sizes, self.causal)
        return prices.grouped_matmul(self.arithmetic, self.kind, *self.sizes)


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """Work of one instruction on one device."""

    products: tuple[Product, ...] = ()
    bytes: float = 0.0  # read and written in device memory
    unknown: str = ""  # the custom call whose FLOPs are not counted

    @property
    def flops(self) -> Counter[str]:
        """FLOPs of its products, by arithmetic."""
        found: Counter[str] = Counter()
        for product in self.products:
            found[product.arithmetic] += product.flops
        return found


def cost_of(instruction: Instruction, computation: Computation, module: Module) -> KernelCost:
    """Return the cost of one instruction; loops, branches and calls cost nothing themselves.

    The start of an asynchronous kernel (`fusion-start`: how jax 0.11 and newer write a slice that is copied on a stream
    of its own) costs what the kernel would, of the arrays that it takes and returns.
    """
    opcode = instruction.opcode
    if opcode in FREE or opcode in ("while", "conditional", "call"):
        return KernelCost()
    if opcode == "copy-start":  # its result holds both copies
        return KernelCost(bytes=2 * sum(operand.bytes for operand in computation.operands(instruction)))
    opcode, result = opcode.removesuffix("-start"), instruction
    if opcode != instruction.opcode and instruction.started:
        result = dataclasses.replace(instruction, shape=instruction.started)
    if opcode == "fusion":
        return _fusion(result, computation, module)
    operands = computation.operands(instruction)
    read, written = sum(operand.bytes for operand in operands), result.bytes
    if opcode == "dot":
        return KernelCost((_dot(result, computation),), read + written)
    if opcode == "custom-call":
        return _custom_call(result, operands, read + written)
    if opcode == "sort":
        return KernelCost(bytes=SORT_SWEEPS * (read + written))
    if opcode in SLICES:
        return KernelCost(bytes=2 * written)
    if opcode in UPDATES and len(operands) > 1:
        place, moved = UPDATES[opcode]
        return KernelCost(bytes=moved * operands[place].bytes)
    return KernelCost(bytes=read + written)


def _fusion(instruction: Instruction, computation: Computation, module: Module) -> KernelCost:
    body = module.computations[instruction.called()[0]]
    root, updated, written = body.root, set(), 0.0
    for name in root.operands if root.opcode == "tuple" else [root.name]:
        result = body.by_name[name]
        while result.opcode in ("bitcast", "copy") and result.operands and result.operands[0] in body.by_name:
            result = body.by_name[result.operands[0]]
        if result.opcode in UPDATES:  # a parameter that is updated in place
            place, moved = UPDATES[result.opcode]
            target = body.by_name[result.operands[0]]
            while target.opcode == "bitcast":
                target = body.by_name[target.operands[0]]
            if target.opcode == "parameter":
                updated.add(target.name)
            result = body.by_name[result.operands[place]]
            written += (moved - 2) * result.bytes
        written += result.bytes
    parameters = {i.parameter: i for i in body.instructions if i.opcode == "parameter"}
    read = 0
    for number, operand in enumerate(computation.operands(instruction)):
        parameter = parameters.get(number)
        if parameter is not None and parameter.name not in updated:
            read += min(operand.bytes, _bytes_read(body, parameter, module))
    return KernelCost(_dots(body, module), read + written)


def _bytes_read(body: Computation, value: Instruction, module: Module) -> float:
    """Return the bytes of a parameter, or of a slice of one, that a fusion needs: slices where nothing else uses it."""
    uses = _uses(body, value.name)
    if not uses:
        return value.bytes if value is body.root else 0
    total = 0
    for use, as_name in uses:
        whole = value.bytes / body.by_name[as_name].bytes  # its own dtype over that in which it is used
        if use.opcode in SLICES and use.operands[0] == as_name:
            total += whole * min(use.bytes, _bytes_read(body, use, module))
        elif use.opcode == "fusion":
            inner = module.computations[use.called()[0]]
            places = [n for n, name in enumerate(use.operands) if name == as_name]
            named = {i.parameter: i for i in inner.instructions if i.opcode == "parameter"}
            total += whole * sum(_bytes_read(inner, named[n], module) for n in places if n in named)
        else:
            return value.bytes
    return total


def _uses(body: Computation, name: str) -> list[tuple[Instruction, str]]:
    """Return the users of a value, each with the name by which it takes it; users of a bitcast or cast count too."""
    found = []
    for instruction in body.instructions:
        if name in instruction.operands:
            same = instruction.opcode in ("bitcast", "convert")
            found += _uses(body, instruction.name) if same else [(instruction, name)]
    return found


def _dots(body: Computation, module: Module) -> tuple[Product, ...]:
    found: list[Product] = []
    for instruction in body.instructions:
        if instruction.opcode == "dot":
            found.append(_dot(instruction, body))
        elif instruction.opcode in ("fusion", "call"):
            for name in instruction.called():
                found += _dots(module.computations[name], module)
    return tuple(found)


def _dot(dot: Instruction, computation: Computation) -> Product:
    """Return [b, m, k] x [b, k, n] of a dot: m the left's rows."""
    left = computation.operands(dot)[0].arrays[0]
    named = (rf"(?:^|[ ,]){name}=\{{([\d,]*)\}}" for name in ("lhs_batch_dims", "lhs_contracting_dims"))
    found = [re.search(pattern, dot.attributes) for pattern in named]
    places = [[int(dim) for dim in dims.group(1).split(",") if dim] if dims else [] for dims in found]
    b, k = (math.prod(left.dims[place] for place in own) for own in places)
    m = left.size / (b * k)
    sizes = (b, m, dot.arrays[0].size / (b * m), k)
    return Product("matmul", _arithmetic(left.dtype, dot.attributes), sizes)


def _arithmetic(dtype: str, attributes: str) -> str:
    if dtype == "f64":
        return "f64"
    if dtype == "f32":
        plain = re.search(r"operand_precision=\{highest", attributes) or "algorithm=dot_f32_f32_f32" in attributes
        return "f32" if plain else "tf32"
    return "bf16"


def _custom_call(instruction: Instruction, operands: list[Instruction], moved: float) -> KernelCost:
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    name = target.group(1) if target else "custom-call"
    arrays = [operand.arrays[0] for operand in operands if operand.arrays]
    result = instruction.arrays[0]
    if "gemm" in name or "matmul" in name:
        dims = re.search(r'"lhs_contracting_dimensions":\["?(\d+)"?', instruction.attributes)
        if dims and arrays:
            kind, k = _arithmetic(arrays[0].dtype, instruction.attributes), arrays[0].dims[int(dims.group(1))]
            batch = re.search(r'"lhs_batch_dimensions":\["?(\d+)"?', instruction.attributes)
            b = arrays[0].dims[int(batch.group(1))] if batch else 1
            m = arrays[0].size / (b * k)
            return KernelCost((Product("matmul", kind, (b, m, result.size / (b * m), k)),), moved)
    if "fmha" in name:
        # the first operand is q, [b, Sq, H, Dh] or [b, H, Sq, Dh]; Sq is the larger of the two middle dims
        query = arrays[0].dims
        sizes = (query[0], min(query[1:3]), max(query[1:3]), query[3], query[3])
        kind = "attention backward" if "Backward" in name else "attention forward"
        return KernelCost((Product(kind, "bf16", sizes, 'CAUSAL"' in instruction.attributes),), moved)
    if name.startswith("mosaic_gpu"):
        # a grouped matmul by its shapes: rows by banks [Rb, K, N], or rows by rows to [..., G, K, N]
        floats = [array for array in arrays if not array.dtype.startswith(("s", "u", "pred"))]
        rows = [array for array in floats if len(array.dims) == 2]
        product = None
        weights = [array for array in floats if len(array.dims) == 3]
        if len(rows) == 1 and weights and len(result.dims) == 2:
            counts = [array.dims[0] for array in arrays if array.dtype == "s32" and len(array.dims) == 1]
            groups = max(counts, default=weights[0].dims[0])
            backward = "transpose(" in instruction.op_name
            sizes = (result.dims[0], rows[0].dims[1], result.dims[1], groups)
            product = Product("dlhs" if backward else "forward", "bf16", sizes)
        elif len(rows) == 2 and len(result.dims) in (3, 4):
            sizes = (rows[0].dims[0], rows[0].dims[1], rows[1].dims[1], 0)
            product = Product("drhs", "bf16", sizes)
        # of banks [Rb, K, N] it reads one row for each of its slots [n]
        slots = [array for array in arrays if array.dtype == "s32" and len(array.dims) == 1]
        banks = [operand for operand in operands if operand.arrays and len(operand.arrays[0].dims) == 3]
        unread = 0.0
        if len(slots) == len(banks):
            shares = [min(1.0, slot.size / bank.arrays[0].dims[0]) for slot, bank in zip(slots, banks, strict=True)]
            unread = sum(bank.bytes * (1 - share) for bank, share in zip(banks, shares, strict=True))
        if product:
            return KernelCost((product,), moved - unread)
    if "triton" in name and "/level/" in instruction.attributes:  # `level_in_one_kernel` has no matmuls
        return KernelCost(bytes=moved)
    return KernelCost(bytes=moved, unknown=name)
