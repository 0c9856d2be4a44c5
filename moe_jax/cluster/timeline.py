"""Simulate a scheduled program: which compute runs while which collective is in flight, and how long the device waits.

The device launches instructions in program order. Kernels run one after the other and take what `prices.py` says of
their products, or of their bytes where that is longer; a collective starts when it is launched and its links are free
(one transfer at a time inside nodes, one across), and a `-done` waits for its end: that wait is exposed. A synchronous
collective is exposed whole. `scheduler_profile` writes modelled seconds for XLA's scheduler, whose own estimates depend
on its version (docs/results.md compares them).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter

from moe_jax.cluster.collectives import KINDS, traffic
from moe_jax.cluster.costs import FREE, KernelCost, cost_of, used_share
from moe_jax.cluster.hlo import (
    EXCHANGE,
    Computation,
    Instruction,
    Module,
    arrays_of,
    pass_of,
    replica_groups,
    role_of,
    scope_of,
)
from moe_jax.cluster.prices import Prices
from moe_jax.errors import UserError


@dataclasses.dataclass
class Flight:
    """One collective of the program text, summed over its executions."""

    name: str  # of the instruction
    computation: str  # where it stands
    kind: str  # without -start
    scope: str  # see `scope_of`
    part: str  # see `pass_of`
    role: str  # see `role_of`
    bytes: int  # of one device's operand or result, whichever is larger, of one execution
    groups: int  # how many
    group_size: int  # devices of one
    nodes_of_a_group: int  # that the widest group touches
    bytes_inside_nodes: float  # of one execution, see `traffic`
    bytes_leaving_a_node: float
    alone: float  # seconds of one execution
    asynchronous: bool  # False where the program waits at once
    loops: tuple[int, ...]  # turns of the loops around it, outermost first
    executions: int = 0
    seconds: float = 0.0  # modelled time
    exposed_seconds: float = 0.0  # waits at its end
    waited_for_links_seconds: float = 0.0
    executions_overlapping_kernels: int = 0  # with at least one kernel between start and done
    executions_overlapping_matmuls: int = 0
    overlapped: Counter[str] = dataclasses.field(default_factory=Counter)  # what computed there: name -> seconds


@dataclasses.dataclass
class Timeline:
    """What `play` returns."""

    flights: dict[str, Flight] = dataclasses.field(default_factory=dict)  # by instruction name
    # each execution of a kernel, a transfer or a wait, in order of their begin on each row: the row ('compute', 'inside
    # nodes', 'across nodes' or 'wait'), the instruction's name, its scope or role, begin and end in seconds
    events: list[tuple[str, str, str, float, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0  # of the whole program
    exposed_seconds: float = 0.0  # of all collectives
    compute_seconds: float = 0.0  # of all kernels
    matmul_seconds: float = 0.0  # of kernels with matmuls
    kernels: int = 0  # launched, each turn of a loop counted
    shortest: int = 0  # those of them that last no longer than a launch
    flops: Counter[str] = dataclasses.field(default_factory=Counter)  # by arithmetic
    by_scope: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)  # (part, scope) -> compute seconds
    overlapped: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)  # of it, with token exchanges
    # conditional -> scope, part, executions, seconds of the branch taken and of the others, and collectives in those
    skipped: dict[str, dict] = dataclasses.field(default_factory=dict)
    assumed_turns: dict[str, int] = dataclasses.field(default_factory=dict)  # of loops whose turns are data
    unknown_loops: set[str] = dataclasses.field(default_factory=set)  # of those, of which nothing is expected
    unknown_calls: Counter[str] = dataclasses.field(default_factory=Counter)  # custom calls without FLOPs


def play(module: Module, prices: Prices, taken: float = 0.0) -> Timeline:
    """Return the modelled timeline of one execution of the program on one device of the prices' target.

    Args:
      module: where it has buckets, loops over blocks of rows turn for the rows that are expected; all else works on
        those of its shapes.
      taken: share of the device's cores that a transfer under way takes from the kernels next to it.
    """
    player = _Player(module, prices, taken)
    player.run(module.entry, ())
    line = player.timeline
    line.seconds, line.exposed_seconds = player.now, sum(flight.exposed_seconds for flight in line.flights.values())
    return line


def instruction_seconds(module: Module, prices: Prices) -> dict[Instruction, tuple[float, Instruction | None]]:
    """Return {instruction: (modelled seconds, its start, for a done)} of every instruction that takes time.

    A collective has its seconds at its start and again, as the time between the two, at its done. Loops and branches
    have the sum of what they run, without overlap.
    """
    player, found = _Player(module, prices), {}
    for instruction, computation in launched_instructions(module, module.entry):
        opcode = instruction.opcode
        if opcode.endswith("-done"):
            start = next(iter(computation.operands(instruction)), None)
            if start in found:
                found[instruction] = found[start][0], start
        elif collective_of(instruction, module) or opcode not in (*FREE, "async-start", "async-update"):
            found[instruction] = player.seconds_alone(instruction, computation), None
    return found


def launched_instructions(module: Module, start: Computation) -> list[tuple[Instruction, Computation]]:
    """Return what `start` launches, and where it stands: its own instructions, those of loops, branches and calls."""
    found, left = {}, [start]
    while left:
        computation = left.pop()
        found[computation.name] = computation
        for instruction in computation.instructions:
            if instruction.opcode in ("while", "conditional", "call"):
                left += [module.computations[name] for name in instruction.called() if name not in found]
    return [(instruction, computation) for computation in found.values() for instruction in computation.instructions]


def collective_of(instruction: Instruction, module: Module) -> Instruction | None:
    """Return the collective that an instruction is, starts, or wraps in a computation; None for everything else."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        return instruction
    if instruction.opcode == "async-start":
        body = module.computations[instruction.called()[0]]
        return next((inner for inner in body.instructions if inner.opcode in KINDS), None)
    return None


class _Player:
    """The state of a simulation: one device's compute stream, its links and the transfers in flight."""

    def __init__(self, module: Module, prices: Prices, taken: float = 0.0):
        self.module, self.target, self.prices, self.taken = module, prices.target, prices, taken
        self.timeline = Timeline()
        self.now = 0.0  # the compute stream's clock
        self.link_free = {"inside nodes": 0.0, "across nodes": 0.0}
        self.open: list[dict] = []  # transfers in flight
        self.kernels: dict[str, tuple[KernelCost, float, str]] = {}
        self.estimates: dict[str, float] = {}

    def run(self, computation: Computation, loops: tuple[int, ...]):
        started: dict[str, dict] = {}
        computations, line = self.module.computations, self.timeline
        for instruction in computation.instructions:
            opcode, name = instruction.opcode, instruction.name
            if opcode == "while":
                turns = self.turns(instruction)
                for _ in range(turns):
                    self.run(computations[instruction.attribute("body")], (*loops, turns))
            elif opcode == "conditional":
                # the cheapest branch is taken: here the others hold overflow passes, which the report lists apart
                branches = [computations[called] for called in instruction.called()]
                times = [self.estimate(branch) for branch in branches]
                taken = times.index(min(times))
                others = [place for place in range(len(times)) if place != taken]
                first = {
                    "scope": scope_of(instruction.op_name),
                    "part": pass_of(instruction.op_name),
                    "executions": 0,
                    "seconds_taken": times[taken],
                    "seconds_not_taken": [times[place] for place in others],
                    "collectives_not_taken": sum(
                        collective_of(inner, self.module) is not None
                        for place in others
                        for inner, _ in launched_instructions(self.module, branches[place])
                    ),
                }
                line.skipped.setdefault(name, first)["executions"] += 1
                self.now += self.prices.assumed("conditional")
                self.run(branches[taken], loops)
            elif opcode == "call":
                self.run(computations[instruction.called()[0]], loops)
            elif opcode.endswith("-done"):
                if instruction.operands and instruction.operands[0] in started:
                    self.finish(started.pop(instruction.operands[0]))
            elif collective_of(instruction, self.module):
                transfer = self.start(instruction, computation, loops)
                if opcode.endswith("-start"):
                    started[name] = transfer
                if not transfer["flight"].asynchronous:
                    self.finish(transfer)
            elif opcode == "async-update":
                if instruction.operands[0] in started:
                    started[name] = started.pop(instruction.operands[0])
            elif opcode == "async-start":
                self.run(computations[instruction.called()[0]], loops)
            elif opcode not in FREE:
                self.kernel(instruction, computation)
        assert not started, f"{computation.name} ends while {sorted(started)} are in flight"

    def turns(self, loop: Instruction) -> int:
        """Return the turns of a loop; where they are data, as if all groups had equally many of the expected rows.

        `kernels.blocked.for_each_block` writes into the names of its loop and of the loop's body: rows by shape, groups
        that share them, groups of the loop, rows of the tallest block, and from above how many to how many rows it
        takes as the last block of a group: where both are the tallest, it takes all other blocks.
        """
        if loop.trip_count is not None:
            return loop.trip_count
        turns = 1
        if written := re.search(r"\bblocks((?:_\d+){6})\b", loop.op_name):
            rows, sharing, groups, tallest, above, height = map(int, written.group(1)[1:].split("_"))
            mean = rows / sharing * used_share(self.module.buckets, rows)
            size = max(1, math.ceil(mean - 1e-6))  # 128 rows may be a little more in floating point
            full, filled = (size - 1) // tallest, min(groups, math.ceil(groups * mean - 1e-6))
            turns = filled * (full if above == height else above < size - full * tallest <= height)
        else:
            self.timeline.unknown_loops.add(loop.name)
        self.timeline.assumed_turns[loop.name] = turns
        return turns

    def estimate(self, computation: Computation) -> float:
        """Return seconds of a computation if nothing overlapped, by which the cheapest branch is chosen."""
        if computation.name not in self.estimates:
            total = sum(self.seconds_alone(instruction, computation) for instruction in computation.instructions)
            self.estimates[computation.name] = total
        return self.estimates[computation.name]

    def seconds_alone(self, instruction: Instruction, computation: Computation) -> float:
        """Return seconds of an instruction if nothing overlapped; a collective's are counted at its start."""
        inner = [self.module.computations[name] for name in instruction.called()]
        if instruction.opcode == "while":
            return self.turns(instruction) * self.estimate(self.module.computations[instruction.attribute("body")])
        if instruction.opcode == "conditional":
            return self.prices.assumed("conditional") + min(map(self.estimate, inner))
        if instruction.opcode == "call":
            return self.estimate(inner[0])
        if collective_of(instruction, self.module):
            return self.flight(instruction, computation, ()).alone
        if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
            return 0.0
        return self.cost(instruction, computation)[1]

    def cost(self, instruction: Instruction, computation: Computation) -> tuple[KernelCost, float, str]:
        """Return a kernel's cost, its seconds with all cores, and its scope: of its root where it has none itself."""
        if instruction.name in self.kernels:
            return self.kernels[instruction.name]
        cost, named = cost_of(instruction, computation, self.module), instruction
        if not scope_of(named.op_name) and instruction.called():
            body = self.module.computations[instruction.called()[0]]
            named = next((i for i in reversed(body.instructions) if i.op_name), instruction)
        scope = scope_of(named.op_name)
        seconds = self.prices.memory(cost.bytes)
        if cost.products:
            seconds = max(seconds, sum(product.seconds(self.prices) for product in cost.products))
        self.kernels[instruction.name] = cost, seconds, scope
        return self.kernels[instruction.name]

    def kernel(self, instruction: Instruction, computation: Computation):
        cost, seconds, scope = self.cost(instruction, computation)
        line, begin, label = self.timeline, self.now, scope or "other compute"
        line.shortest += seconds <= self.prices.assumed("launch")
        if self.taken and self.open:  # slower for as long as transfers are under way
            now, left, rate = begin, seconds, 1 - self.taken
            for transfer in sorted(self.open, key=lambda transfer: transfer["begin"]):
                alone = max(0.0, transfer["begin"] - now)
                if left <= alone:
                    break
                now, left = now + alone, left - alone
                slowed = min(left / rate, max(0.0, transfer["end"] - now))
                now, left = now + slowed, left - slowed * rate
            seconds = now + left - begin
        self.now += seconds
        line.events.append(("compute", instruction.name, label, begin, self.now))
        line.compute_seconds += seconds
        line.kernels += 1
        key = (pass_of(instruction.op_name), scope)
        line.by_scope[key] += seconds
        line.overlapped[key] += self.exchanging(begin)
        line.flops.update(cost.flops)
        line.matmul_seconds += seconds if cost.products else 0.0
        if cost.unknown:
            line.unknown_calls[cost.unknown] += 1
        for transfer in self.open:
            flight = transfer["flight"]
            flight.overlapped[label] += seconds
            transfer["kernel"] = True
            transfer["matmul"] |= bool(cost.products)

    def exchanging(self, begin: float) -> float:
        """Return seconds from `begin` until now in which at least one token exchange moved."""
        spans = [(own["begin"], own["end"]) for own in self.open if own["flight"].role == EXCHANGE]
        total = 0.0
        for start, end in sorted(spans):
            start, end = max(start, begin), min(end, self.now)
            if end > start:
                total, begin = total + end - start, end
        return total

    def flight(self, instruction: Instruction, computation: Computation, loops: tuple[int, ...]) -> Flight:
        flights = self.timeline.flights
        if instruction.name in flights:
            return flights[instruction.name]
        inner = collective_of(instruction, self.module)
        kind, starts = inner.opcode.removesuffix("-start"), instruction.opcode.endswith("-start")
        entering = sum(operand.bytes for operand in computation.operands(instruction))
        leaving = sum(array.bytes for array in arrays_of(inner.started or inner.shape))
        # where a start's own shape does not part them it holds the operands too, but that of old all-reduces
        if inner.opcode.endswith("-start") and not inner.started and kind != "all-reduce":
            leaving -= entering
        size = max(entering, leaving)
        groups = replica_groups(inner.attributes, self.target.devices)
        most = max((device for group in groups for device in group), default=0)
        if most >= self.target.devices:
            raise UserError(
                f"{instruction.name} joins device {most}, but the target has "
                f"{self.target.devices} devices; name the topology that the program was compiled for"
            )
        op_name = instruction.op_name or inner.op_name
        intra_bytes, inter_bytes, alone = traffic(kind, size, groups, self.prices)
        return Flight(
            name=instruction.name,
            computation=computation.name,
            kind=kind,
            scope=scope_of(op_name),
            part=pass_of(op_name),
            role=role_of(kind, op_name),
            bytes=size,
            groups=len(groups),
            group_size=max(map(len, groups), default=2),
            nodes_of_a_group=max((len({d // self.target.per_node for d in group}) for group in groups), default=1),
            bytes_inside_nodes=intra_bytes,
            bytes_leaving_a_node=inter_bytes,
            alone=alone,
            asynchronous=starts and '"is_sync":true' not in instruction.attributes,
            loops=loops,
        )

    def start(self, instruction: Instruction, computation: Computation, loops: tuple[int, ...]) -> dict:
        flight = self.flight(instruction, computation, loops)
        self.timeline.flights[flight.name] = flight
        used = zip(self.link_free, (flight.bytes_inside_nodes, flight.bytes_leaving_a_node), strict=True)
        links = [row for row, moved in used if moved]
        begin = max([self.now, *(self.link_free[name] for name in links)])
        end = begin + flight.alone
        for name in links:
            self.link_free[name] = end
        flight.executions += 1
        flight.seconds += flight.alone
        flight.waited_for_links_seconds += begin - self.now
        row = links[-1] if links else "inside nodes"
        self.timeline.events.append((row, flight.name, f"{flight.role} {flight.scope}".strip(), begin, end))
        transfer = {"flight": flight, "begin": begin, "end": end, "kernel": False, "matmul": False}
        if flight.asynchronous:
            self.open.append(transfer)
        return transfer

    def finish(self, transfer: dict):
        flight, end = transfer["flight"], transfer["end"]
        if transfer in self.open:
            self.open.remove(transfer)
        flight.executions_overlapping_kernels += transfer["kernel"]
        flight.executions_overlapping_matmuls += transfer["matmul"]
        if end > self.now:
            self.timeline.events.append(("wait", flight.name, flight.role, self.now, end))
            flight.exposed_seconds += end - self.now
            self.now = end


def scheduler_profile(module: Module, prices: Prices) -> str:
    """Return the profile: microseconds of each instruction, and between the start and the done of each transfer."""
    lines = []
    for instruction, (took, start) in instruction_seconds(module, prices).items():
        name = instruction.scheduling_name
        if start is not None:
            lines.append(
                f'latencies {{ source: "{start.scheduling_name}" target: "{name}" latency_us: {1e6 * took:.3f} }}'
            )
        # the scheduler looks up a kernel's done among the costs too
        if start is None or not collective_of(start, module):
            lines.append(f'costs {{ name: "{name}" cost_us: {1e6 * took if start is None else 0.0:.3f} }}')
    return "\n".join(lines) + "\n"
