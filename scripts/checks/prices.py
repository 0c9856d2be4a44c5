"""How far the cost model is from the public tables that it was fitted to, on rows that the fit did not see.

    python scripts/checks/prices.py

Prints JSON, and exits with 1 where a figure is over its limit. Error = |ln(modelled / measured)|. Collectives: sizes
of each GPU, opcode and group in order, fitted on even places and tested on odd ones, and the reverse, pooled; and
groups of 4 from those of 2 and 8. Matmuls in bfloat16: a random half by three seeds, and every shape with a dimension
of 4,096 left out. Grouped matmuls and attention: left out one by one. NumPy only, seconds.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from moe_jax.cluster import fits

MB, KB = 1e6, 1024
GPUS = ("H100", "B200")
OPCODES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter")
LIMITS = {
    "from 4 MB": {"median": 0.08, "p90": 0.25},
    "64 KB to 4 MB": {"signed median": 0.10},
    "group left out": {"median": 0.15},
    "random half": {"median": 0.05, "p90": 0.12},
    "4,096 left out": {"median": 0.05, "p90": 0.12},
}


def rows_of(table: str, **wanted) -> list[dict[str, str]]:
    """Return the rows of a table whose columns are as wanted."""
    return [row for row in fits.rows_of(table) if all(row[key] == str(value) for key, value in wanted.items())]


def microseconds(rows) -> np.ndarray:
    """Return what was measured: [n]."""
    return np.array([float(row["microseconds"]) for row in rows])


def halves(rows) -> list[tuple[list, list]]:
    """Return (fitted, tested) rows by places in the order of bytes, even and odd, and the reverse."""
    rows = sorted(rows, key=lambda row: int(row["bytes"]))
    return [(rows[first::2], rows[1 - first :: 2]) for first in (0, 1)]


def line_errors(line, rows) -> tuple[np.ndarray, np.ndarray]:
    """Return (bytes, signed errors) of rows by a line."""
    size = np.array([float(row["bytes"]) for row in rows])
    return size, np.log(1e6 * line.seconds(np.sqrt(size), size) / microseconds(rows))


def collective_record(gpu: str, opcode: str) -> dict:
    """Return the errors of one opcode on one GPU, by range of sizes."""
    groups, found = {}, []
    for members in (2, 4, 8):
        groups[members] = rows_of("collectives", gpu=gpu, opcode=opcode, members=members)
        found += [line_errors(fits.fit_collective(fitted), tested) for fitted, tested in halves(groups[members])]
    size, errors = (np.concatenate(part) for part in zip(*found, strict=True))
    large, middle = errors[size >= 4 * MB], errors[(size >= 64 * KB) & (size < 4 * MB)]
    lines = {members: fits.fit_collective(groups[members]) for members in (2, 8)}
    left = line_errors(fits.collective_line(lines, 4, opcode), groups[4])
    return {
        "from 4 MB": spread(large),
        "64 KB to 4 MB": spread(middle),
        "group left out": spread(left[1][left[0] >= 4 * MB]),
    }


def matmul_record(gpu: str, arithmetic: str) -> dict:
    """Return the errors of matmuls, a random half by three seeds and shapes of 4,096 left out."""
    rows, half = rows_of("matmuls", gpu=gpu, arithmetic=arithmetic), []
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(rows))
        fitted, tested = ([rows[place] for place in part] for part in np.array_split(order, 2))
        half.append(kernel_errors("matmuls", fitted, tested))
    large = [row for row in rows if "4096" in (row["m"], row["n"], row["k"])]
    small = [row for row in rows if row not in large]
    left = kernel_errors("matmuls", small, large)
    return {"random half": spread(np.concatenate(half)), "4,096 left out": spread(left)}


def kernel_errors(table: str, fitted, tested) -> np.ndarray:
    """Return signed errors [n] of rows by the fit of others."""
    modelled = 1e6 * fits.columns_of(table, tested) @ fits.fit_kernel(table, fitted)
    return np.log(modelled / microseconds(tested))


def one_by_one(table: str, rows) -> dict:
    """Return the errors of rows, each by the fit of all others."""
    errors = (kernel_errors(table, [*rows[:at], *rows[at + 1 :]], [row]) for at, row in enumerate(rows))
    return spread(np.concatenate(list(errors)))


def spread(errors: np.ndarray) -> dict[str, float]:
    """Return what is said of signed errors [n]."""
    size = np.abs(errors)
    found = {"rows": len(errors), "median": np.median(size), "p90": np.percentile(size, 90)}
    found |= {"signed median": np.median(errors), "most": size.max()}
    return {name: round(float(value), 4) for name, value in found.items()}


def misses(record: dict, limits: dict) -> list[str]:
    """Return the figures of a record that are over their limits."""
    return [
        f"{part} {name} {record[part][name]} > {limit}"
        for part, wanted in limits.items()
        if part in record
        for name, limit in wanted.items()
        if abs(record[part][name]) > limit
    ]


def main() -> int:
    answer, missed = {"collectives": {}, "matmuls": {}, "grouped_matmuls": {}, "attention": {}}, []
    for gpu in GPUS:
        for opcode in OPCODES:
            answer["collectives"][f"{gpu} {opcode}"] = record = collective_record(gpu, opcode)
            missed += [f"{gpu} {opcode}: {line}" for line in misses(record, LIMITS)]
        for arithmetic in ("bf16", "tf32"):
            answer["matmuls"][f"{gpu} {arithmetic}"] = record = matmul_record(gpu, arithmetic)
            missed += [f"{gpu} {arithmetic}: {line}" for line in misses(record, LIMITS) if arithmetic == "bf16"]
        for kind in ("forward", "dlhs", "drhs"):
            rows = rows_of("grouped_matmuls", gpu=gpu, kind=kind)
            answer["grouped_matmuls"][f"{gpu} {kind}"] = one_by_one("grouped_matmuls", rows)
    for kind in ("forward", "backward"):
        rows = [row for row in rows_of("attention", kind=kind) if kind == "forward" or row["implementation"] == "cudnn"]
        answer["attention"][f"H100 {kind}"] = one_by_one("attention", rows)
    print(json.dumps({**answer, "limits": LIMITS, "missed": missed}, indent=1))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
