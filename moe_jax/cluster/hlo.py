"""Read the text of a scheduled HLO module: instructions in launch order, groups of collectives, scopes.

%all-to-all-start.1 = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-to-all-start(%x), replica_groups={{0,1}}, ...
 name                  shape                             opcode           operands  attributes

op_name="jit(train_step)/transpose(jvp(moe))/while/body/closed_call/dispatch/all_to_all"   path of jax names
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

from moe_jax.errors import UserError

DTYPE_BITS = {
    "pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f4e2m1fn": 4, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64,
    "c128": 128,
}  # fmt: skip
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_OP_NAME = re.compile(r'metadata=\{[^{}]*?op_name="((?:[^"\\]|\\.)*)"')
_SCHEDULING_NAME = re.compile(r'scheduling_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape: dtype and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return -(-self.size * DTYPE_BITS.get(self.dtype, 8) // 8)  # else one of the float8 types


@functools.lru_cache(maxsize=4096)
def arrays_of(shape: str) -> tuple[Array, ...]:
    """Return the arrays of a shape, a tuple's in order, nested ones flattened."""
    found = []
    for dtype, dims in _ARRAY.findall(shape):
        if dtype not in DTYPE_BITS and not dtype.startswith("f8"):
            raise UserError(f"the compiled program has an array of dtype {dtype!r}, whose size is not known here")
        found.append(Array(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)))
    return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a computation."""

    name: str  # without '%'
    shape: str  # of the result, as written
    opcode: str  # such as 'fusion' or 'all-gather-start'
    operands: tuple[str, ...]  # names, in order
    attributes: str  # everything after the operands, as written
    root: bool  # whether it is the computation's result
    parameter: int = -1  # n of 'parameter(n)'

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result."""
        return arrays_of(self.shape)

    @property
    def bytes(self) -> int:
        """Of the result, all arrays together."""
        return sum(array.bytes for array in self.arrays)

    @functools.cached_property
    def started(self) -> str:
        """The shape of the result that an asynchronous start has at its done, '' where its own shape does not say.

        A start's shape is `((operands), results, context)`; the older all-gather-start, all-to-all-start and
        collective-permute-start of one operand, and all-reduce-start, leave the inner brackets out.
        """
        parts = split_outside(self.shape[1:-1], ",") if self.shape.startswith("((") else []
        return parts[1].strip() if len(parts) > 1 else ""

    @functools.cached_property
    def op_name(self) -> str:
        """The path of jax names that this instruction came from, '' where the compiler left none."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""

    @property
    def scheduling_name(self) -> str:
        """The name that this instruction had while it was scheduled."""
        found = _SCHEDULING_NAME.search(self.attributes)
        return found.group(1) if found else self.name

    def attribute(self, name: str) -> str:
        """Return the word that stands after `name=`, without '%'; '' where there is none."""
        found = re.search(rf"(?:^|[ ,]){name}=%?([^\s,{{}}]+)", self.attributes)
        return found.group(1) if found else ""

    def called(self) -> tuple[str, ...]:
        """Return the computations that this instruction runs: a loop's body, branches, a call's or fusion's target."""
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if branches:
            return tuple(name.strip().lstrip("%") for name in branches.group(1).split(","))
        names = ("body", "calls", "called_computation", "true_computation", "false_computation")
        names += ("to_apply",) if self.opcode == "call" else ()
        return tuple(found for name in names if (found := self.attribute(name)))

    @property
    def trip_count(self) -> int | None:
        """Turns of a loop as the compiler knows them, None where it does not."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(found.group(1)) if found else None


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in the order in which they are launched."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions whose results enter this one."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A whole program: its computations by name, and the one that it starts with."""

    name: str
    computations: dict[str, Computation]
    entry: Computation
    buckets: tuple = ()  # `costs.Buckets` of its exchanges, () where they are not known


def parse_module(text: str, buckets: tuple = ()) -> Module:
    """Return the module that a text describes; what is not the text of a scheduled one is a UserError."""
    first = text.split("\n", 1)[0]
    if not first.startswith("HloModule "):
        raise UserError(f"{first[:60]!r} is not the first line of an HLO module's text ('HloModule ...')")
    if "is_scheduled=true" not in first:
        raise UserError(
            "the HLO text is not scheduled (its first line lacks is_scheduled=true); take it from compiled.as_text()"
        )
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", []
    for line in text.split("\n")[1:]:
        if not name:
            header = _HEADER.match(line)
            if header:
                name, lines = header.group(2), []
                entry = name if header.group(1) else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(lines))
            name = ""
        elif " = " in line:
            own, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
            try:
                end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
                shape, rest = rest[:end], rest[end:].lstrip()
                opening = rest.index("(")
                closing = _closing(rest, opening)
                opcode, operands = rest[:opening], _COMMENT.sub("", rest[opening + 1 : closing])
                parameter = int(operands) if opcode == "parameter" else -1
            except ValueError as error:
                raise UserError(f"the HLO line {line[:80]!r} cannot be read; was the text cut off?") from error
            names = tuple(part.split()[-1].lstrip("%") for part in split_outside(operands, ",") if part.strip())
            lines.append(
                Instruction(
                    name=own.strip().lstrip("%"),
                    shape=_COMMENT.sub("", shape),
                    opcode=opcode,
                    operands=() if opcode in ("constant", "parameter") else names,
                    attributes=rest[closing + 1 :].lstrip(", "),
                    root=line.strip().startswith("ROOT "),
                    parameter=parameter,
                )
            )
    if entry not in computations:
        raise UserError("the HLO text ends before its ENTRY computation does; was the file cut off?")
    return Module(first.split()[1].rstrip(","), computations, computations[entry], buckets)


def _closing(text: str, start: int) -> int:
    """Return where the bracket that opens at `start` closes; brackets inside double quotes do not count."""
    depth, quoted = 0, False
    for place in range(start, len(text)):
        char = text[place]
        if char == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
            if depth == 0:
                return place
    raise UserError(f"brackets do not close in the HLO line {text[:80]!r}; was the text cut off?")


def split_outside(text: str, separator: str) -> list[str]:
    """Split at the separators (one character) that stand outside all brackets."""
    parts, depth, begin = [], 0, 0
    for place, char in enumerate(text):
        if char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
        elif char == separator and depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
    return [*parts, text[begin:]]


Groups = tuple[tuple[int, ...], ...]


# replica_groups={{0,1},{2,3}}                            the lists themselves
# replica_groups=[2,4]<=[8]  or  [4,2]<=[2,4]T(1,0)       iota, reshaped and transposed, rows are groups
# replica_groups=mesh['a'=2,'b'=4] {'b'}                  a mesh and the axes that a group spans
# replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}    likewise, of ids in another order
# source_target_pairs={{0,1},{1,2}}                       of a permute
def replica_groups(attributes: str, devices: int) -> Groups:
    """Return the groups of a collective, one of all devices where none are written; of a permute its pairs."""
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes):
        return tuple(tuple(_ints(one)) for one in re.findall(r"\{(\d+,\d+)\}", pairs.group(1)))
    _, found, text = attributes.partition("replica_groups=")
    if not found or text.startswith("{}"):
        return (tuple(range(devices)),)
    if lists := re.match(r"\{((?:\{[\d,]+\},?)+)\}", text):
        return tuple(tuple(_ints(one)) for one in re.findall(r"\{([\d,]+)\}", lists.group(1)))
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, turn = iota.groups()
        ids = np.arange(np.prod(_ints(dims))).reshape(_ints(dims))
        ids = ids.transpose(_ints(turn)) if turn else ids
        return tuple(map(tuple, ids.reshape(_ints(shape)).tolist()))
    ids_pattern = r"(?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))"
    mesh = re.match(rf"mesh\[([^\]]*)\](?:, device_ids=\({ids_pattern}\))? ?\{{([^}}]*)\}}", text)
    if not mesh:
        raise UserError(f"replica groups written as {text[:160]!r} are not known here")
    axes, shape, turn, listed, spanned = mesh.groups()
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'\s*=\s*(\d+)", axes)}
    wanted = re.findall(r"'([^']+)'", spanned)
    if ":" in spanned or not set(wanted) <= set(sizes):
        raise UserError(f"replica groups written as {text[:160]!r} are not known here: a part of an axis, or no axis")
    ids = np.array(_ints(listed)) if listed else np.arange(np.prod(list(sizes.values())))
    if shape:
        ids = ids.reshape(_ints(shape))
        ids = ids.transpose(_ints(turn)) if turn else ids
    if ids.size != devices:
        raise UserError(f"the mesh of {text[:60]!r} has {ids.size} devices and the program {devices}")
    inner = [list(sizes).index(name) for name in wanted]
    outer = [place for place in range(len(sizes)) if place not in inner]
    grid = ids.reshape(list(sizes.values())).transpose(outer + inner)
    return tuple(map(tuple, grid.reshape(-1, math.prod(sizes[name] for name in wanted)).tolist()))


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


# words that jax itself puts into a path
_STRUCTURE = re.compile(
    r"^(while|body|cond|closed_call|eval_jaxpr|checkpoint|remat\w*|rematted_computation|shard_map|branch_\d+_fun|"
    r"custom_\w+_call|custom_vjp_call\w*|pjit|core_call|jit|scan|main|(true|false|cond|body)_fun|blocks[_\d]+|)$"
)
_WRAPPER = re.compile(r"^(?:jvp|transpose|vmap|pmap|linearize|vjp)\((.*)\)$")

TRANS, AGG, EXCHANGE = "Trans", "Agg", "all-to-all"


def scope_of(op_name: str) -> str:
    """Return the named scopes of a path joined by '/', without what jax adds and without the operation itself."""
    names: list[str] = []
    for part in split_outside(op_name, "/")[:-1]:
        while wrapped := _WRAPPER.match(part):
            part = wrapped.group(1)
        if part.startswith("jit(") or _STRUCTURE.match(part) or "," in part or "->" in part:
            continue
        names += [name for name in part.split("/") if name and not _STRUCTURE.match(name) and "(" not in name]
    # the transpose of a scope repeats its name
    return "/".join(name for place, name in enumerate(names) if place == 0 or names[place - 1] != name)


def pass_of(op_name: str) -> str:
    """Return 'recompute', 'backward', 'forward', or '' where the compiler left no name."""
    if not op_name:
        return ""
    if "rematted_computation" in op_name:
        return "recompute"
    return "backward" if "transpose(" in op_name else "forward"


def role_of(kind: str, op_name: str) -> str:
    """Return what a collective is for: Trans, Agg, all-to-all (an exchange of tokens), or its kind."""
    parts = op_name.split("/")
    for scope, role in (("sparse_reduce_scatter", AGG), ("sparse_all_gather", TRANS)):
        if any(scope in part for part in parts):
            return role
    moves_tokens = any(name in part for part in parts for name in ("dispatch", "combine"))
    if kind == "all-to-all" or (kind == "collective-permute" and moves_tokens):
        return EXCHANGE
    return kind
