"""Which collectives of a compiled program XLA:CPU may run next to a branch or loop that holds collectives.

It starts such a branch and goes on; only operations that read its result wait (see `parallel/ordering.py`).
"""

import re

COLLECTIVE = re.compile(r"^(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?$")
COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([a-z-]+)\((.*)$")
CALLED = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation|calls)=%([^\s,}]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def parse(text):
    """Return {computation: [(name, operation, operands, called computations)]}, in the order of the schedule."""
    computations, current = {}, None
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            current = computations.setdefault(head.group(1), [])
        elif current is not None and (found := INSTRUCTION.match(line)):
            name, operation, rest = found.groups()
            called = CALLED.findall(rest) + [
                c for group in BRANCHES.findall(rest) for c in re.findall(r"%(\S+?)(?:,|$)", group)
            ]
            current.append((name, operation, set(re.findall(r"%([^\s,()}]+)", rest)), called))
    return computations


def overtaking(text):
    """Return (branch or loop, collective behind it that does not wait for it), for all such pairs of a program."""
    computations = parse(text)
    holds: dict[str, bool] = {}

    def holding(computation):
        if computation not in holds:
            holds[computation] = any(
                COLLECTIVE.match(operation) or any(map(holding, called))
                for _, operation, _, called in computations.get(computation, ())
            )
        return holds[computation]

    found = []
    for instructions in computations.values():
        waits: dict[str, set[str]] = {}  # instruction -> branches and loops that are over before it starts
        started: list[str] = []
        for name, operation, operands, called in instructions:
            waits[name] = set().union(*(waits.get(operand, ()) for operand in operands))
            inside = any(map(holding, called))
            if inside or COLLECTIVE.match(operation):
                found += [(before, name) for before in started if before not in waits[name]]
            if inside:
                started.append(name)
                waits[name] = waits[name] | {name}
    return found
