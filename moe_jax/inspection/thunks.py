"""What the compiler puts into command buffers, and what the host launches by itself.

Inputs: two texts that XLA dumps beside a program compiled for GPUs: its thunks after all passes over them, and the
instructions that they came from. Outputs: a `Thunks` record, counted for one step. A thunk is what the runtime runs: a
kernel, a copy, a collective, a loop. Those of a command buffer are one launch together; each other one is a launch by
the host, and a conditional, or a loop whose turns are data, makes the host wait for what it decides by.

    000: kCommandBuffer [prev=.. | next=..]
        001: kCustomKernel [..] loop_broadcast_fusion_33 grid: ..
    047: kWhile [..]
    condition:
        048: kCustomKernel [..] loop_compare_fusion
      body:
        049: kCopy [..]
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

from moe_jax.errors import UserError
from moe_jax.inspection.hlo import Module

BUFFER, LOOP, CONDITIONAL = "kCommandBuffer", "kWhile", "kConditional"
AROUND = frozenset("kSequential kDynamicSliceFusion kDynamicSlice kAsyncStart kAsyncDone kWaitForStreams".split())
COPIES = frozenset("kCopy kCopyDone kMemset kMemset32BitValue kMemzero kPartitionId kReplicaId".split())
COLLECTIVES = frozenset(
    "kAllGather kAllReduce kAllToAll kReduceScatter kCollectivePermute kCollectiveBroadcast kRaggedAllToAll "
    "kCollectiveGroup kCollectiveKernel kSend kRecv kNcclGroup".split()
)
GROUPS = ("kernels", "memory_copies", "collectives", "conditionals", "loops")
_THUNK = re.compile(r"^( *)(\d+): (k\w+)")
_SECTION = re.compile(r"^( *)(condition|body|true_branch|false_branch|branch_?\d+):?$")
_RECORD = re.compile(r"thunk_metadata \{\s*thunk_info \{(.*?)\}", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thunks:
    """What one step launches.

    Attributes:
      buffers: launches of command buffers; inside: {group: thunks in them}; outside: {group: thunks in none}, over
        `GROUPS`. A loop counts once however many turns it has, what it runs once for each.
      outside_kinds: {XLA's name of the kind: thunks in no buffer}.
    """

    buffers: int
    inside: dict[str, int]
    outside: dict[str, int]
    outside_kinds: dict[str, int]


@dataclasses.dataclass
class _Node:
    """One thunk of the text and, in it, (section or '', thunk) in order."""

    kind: str
    number: int
    inner: list[tuple[str, _Node]] = dataclasses.field(default_factory=list)

    def section(self, name: str) -> list[_Node]:
        return [node for section, node in self.inner if section == name]

    def sections(self) -> list[str]:
        return list(dict.fromkeys(section for section, _ in self.inner))


def count_thunks(sequence: str, metadata: str, module: Module) -> Thunks:
    """Return what one execution of a program launches.

    Args:
      sequence: the file `*.thunk_sequence_after_thunk_passes.txt` of a dump; metadata: `*.thunk_metadata.txt`.
      module: the program, which knows how often its loops turn; one whose turns are data counts one.

    Raises:
      UserError: the text has no thunks.
    """
    turns = {
        instruction.name: instruction.trip_count or 1
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "while"
    }
    loops = {number: turns.get(name, 1) for number, name in _instructions(metadata).items()}
    nodes = _read(sequence)
    if not nodes:
        raise UserError("the compiler's dump holds no thunks; its text has a form that is not known here")
    counted = _count(nodes, loops, inside=False)
    inside, outside = Counter[str](), Counter[str]()
    for (kind, in_buffer), count in counted.items():
        if kind not in AROUND and kind != BUFFER:
            (inside if in_buffer else outside)[_group(kind)] += count
    kinds = {kind: n for (kind, in_buffer), n in counted.items() if not in_buffer and kind not in {*AROUND, BUFFER}}
    return Thunks(
        buffers=counted[BUFFER, False],
        inside={group: inside[group] for group in GROUPS},
        outside={group: outside[group] for group in GROUPS},
        outside_kinds=dict(sorted(kinds.items(), key=lambda item: -item[1])),
    )


def _group(kind: str) -> str:
    if kind in COPIES:
        return "memory_copies"
    if kind in COLLECTIVES:
        return "collectives"
    return {CONDITIONAL: "conditionals", LOOP: "loops"}.get(kind, "kernels")


def _instructions(metadata: str) -> dict[int, str]:
    """Return {number of a thunk: name of its instruction}."""
    found = {}
    for record in _RECORD.findall(metadata):
        name, number = re.search(r'profile_annotation: "([^"]*)"', record), re.search(r"thunk_id: (\d+)", record)
        if name and number:
            found[int(number.group(1))] = name.group(1)
    return found


def _read(text: str) -> list[_Node]:
    """Return the thunks of a text as trees, by their indentation; sections belong to the loop or conditional above."""
    root = _Node("", -1)
    above: list[tuple[int, _Node]] = [(-1, root)]  # (indentation, thunk) from the outside in
    for line in text.splitlines():
        thunk, head = _THUNK.match(line), _SECTION.match(line.rstrip())
        if head:
            # the heading of a loop's condition stands at the margin, right below the loop
            name, indent = head.group(2), len(head.group(1))
            if name == "condition":
                owner, heading = above[-1][1], above[-1][0]
            else:
                heading, owner = next((own for own in above if own[0] == indent - 2), above[-1])
            while above[-1][0] > heading:
                above.pop()
            owner.inner.append((name, _Node("", -1)))
        elif thunk:
            indent, node = len(thunk.group(1)), _Node(thunk.group(3), int(thunk.group(2)))
            while above[-1][0] >= indent:
                above.pop()
            parent = above[-1][1]
            inner = [name for name, _ in parent.inner if name] if parent.kind in (LOOP, CONDITIONAL) else []
            parent.inner.append((inner[-1] if inner else "", node))
            above.append((indent, node))
    return [node for _, node in root.inner]


def _count(nodes: list[_Node], loops: dict[int, int], inside: bool) -> Counter[tuple[str, bool]]:
    """Return {(kind, in a command buffer): how often it runs}; of a conditional the branch with the fewest."""
    total: Counter[tuple[str, bool]] = Counter()
    for node in nodes:
        if node.kind:
            total[node.kind, inside] += 1
        inner = inside or node.kind == BUFFER
        if node.kind == LOOP:
            for key, count in _count(node.section("body"), loops, inner).items():
                total[key] += loops.get(node.number, 1) * count
        elif node.kind == CONDITIONAL:
            branches = [_count(node.section(name), loops, inner) for name in node.sections()]
            total += min(branches, key=lambda branch: branch.total(), default=Counter())
        else:
            total += _count([own for _, own in node.inner], loops, inner)
    return total
