"""How much of the experts' time has an exchange in flight in a scheduled program, and how much of s2's gathers has one.

    python -m moe_jax.inspection.beside --target=h200:4x8 FILE.hlo.gz ...

The files are those that `python -m moe_jax.inspect` and `scripts/bench/overlap.py --out` write; times are modelled, of
one step. One line for each file: milliseconds of the experts' kernels and how many of them run while a transfer of rows
is on its way; the same for the all-gathers of computed rows; transfers of rows in all; the step.
"""

from __future__ import annotations

import argparse
import gzip
import pathlib

from moe_jax.inspection.hlo import parse_module
from moe_jax.inspection.measured import merge_spans
from moe_jax.inspection.targets import parse_target
from moe_jax.inspection.timeline import Timeline, play

GATHERS = ("all-gather moe/combine", "all-gather moe/dispatch")  # s2's, forward and backward


def seconds(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in merge_spans(spans))


def shared(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Return the seconds that lie in both."""
    return seconds(one) + seconds(other) - seconds(one + other)


def beside_text(line: Timeline) -> str:
    """Return the line of one simulated program, as the docstring of this file says."""
    moving = [e for e in line.events if e.row in ("inside nodes", "across nodes")]
    rows = [(e.begin, e.end) for e in moving if e.label.startswith("all-to-all")]
    gathers = [(e.begin, e.end) for e in moving if e.label in GATHERS]
    experts = [(e.begin, e.end) for e in line.events if e.row == "compute" and "experts" in e.label]
    found = [seconds(experts), shared(experts, rows), seconds(gathers), shared(gathers, rows), seconds(rows)]
    ms = [f"{1e3 * value:.2f}" for value in (*found, line.seconds)]
    return (
        f"experts {ms[0]} ms, {ms[1]} beside rows; gathers {ms[2]} ms, {ms[3]} beside rows; "
        f"rows {ms[4]} ms; step {ms[5]} ms"
    )


def main() -> None:
    """Print one line for each file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="h200:4x8", help="DEVICE:NODESxDEVICES that the programs are compiled for")
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="scheduled programs, .hlo or .hlo.gz")
    options = parser.parse_args()
    target = parse_target(options.target)
    for path in options.files:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        print(f"{path.name}: {beside_text(play(parse_module(text), target))}")


if __name__ == "__main__":
    main()
