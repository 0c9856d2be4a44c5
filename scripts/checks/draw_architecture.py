"""Draw docs/architecture.svg: the packages, who may import whom, and the two paths through them.

    python scripts/checks/draw_architecture.py           writes the picture
    python scripts/checks/draw_architecture.py --check   exit code 1 where the picture is not what would be drawn

Boxes and arrows are `BELOW` of tests/test_architecture.py, which that test holds against every import of the package;
the colours are the two paths below, whose names must be packages of it. Standard library alone.
"""

from __future__ import annotations

import ast
import html
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "architecture.svg"
WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT, TOP = 860, 76, 190, 42, 20

PATHS = {  # colour: packages, what it says below the boxes
    "#cfe3f7": (
        ("data", "models", "moe", "moe.schedules", "moe layer", "moe.routers", "moe parts", "kernels", "parallel"),
        "token path (devices, every step): tokens -> gate -> route -> dispatch -> experts -> combine -> tokens",
    ),
    "#f9dfc0": (
        ("training", "planning", "cluster"),
        "planning path (host, between steps): loads -> predictor -> planner -> placement -> tables -> next step",
    ),
}
NOTES = {
    "commands": "train, generate, inspect, ...",
    "analysis": "inspect, replay, calibrate",
    "inference": "generate, Hugging Face",
    "training": "step, loop, optimizer",
    "jobs": "several processes, a folder's lock",
    "config": "gin files to one record",
    "observe": "metrics, loads, report",
    "storage": "checkpoints, a run's folder",
    "models": "transformer, loss, prefetch",
    "data": "text to windows",
    "moe": "a layer from its config",
    "moe.schedules": "other orders of exchanges",
    "moe layer": "gate to combine, experts, bank",
    "moe.routers": "experts of each token",
    "moe parts": "routing, permutation of rows",
    "planning": "placements, NumPy only",
    "kernels": "grouped matmuls",
    "parallel": "mesh, collectives",
    "cluster": "links and seconds, NumPy only",
    "foundation": "errors: all may import it",
}


def read_below() -> dict[str, tuple[str, ...]]:
    """Return {package: packages right below it} as the architecture test has it."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BELOW":
            return ast.literal_eval(node.value)
    raise SystemExit("tests/test_architecture.py has no BELOW")


def draw(below: dict[str, tuple[str, ...]]) -> str:
    """Return the SVG."""
    missing = [name for path, _ in PATHS.values() for name in path if name not in below]
    if missing:
        raise SystemExit(f"BELOW has no {', '.join(missing)}, which a path goes through")
    depth = dict.fromkeys(below, 0)  # each package stands below all that import it
    for _ in below:  # as many rounds as packages settle every path
        for package, lower in below.items():
            for name in lower:
                depth[name] = max(depth[name], depth[package] + 1)
    last, named = max(depth.values()), set().union(*below.values())
    depth |= {name: last + 1 for name in below if name not in named and not below[name]}  # everything imports these
    rows = [[name for name in below if depth[name] == row] for row in range(max(depth.values()) + 1)]
    colours = {name: colour for colour, (path, _) in PATHS.items() for name in path}
    places = {
        name: (WIDTH * (i + 1) / (len(names) + 1), TOP + row * ROW)
        for row, names in enumerate(rows)
        for i, name in enumerate(names)
    }
    arrows, boxes = [], []
    for package, (x, y) in places.items():
        for name in below[package]:
            to_x, to_y = places[name]
            start, end = y + BOX_HEIGHT, to_y - 2
            bend = (end - start) / 2
            side = 0 if to_y - y <= ROW else (WIDTH - 60 if to_x >= WIDTH / 2 else 60)
            first, second = (side, side) if side else (x, to_x)
            arrows.append(
                f'<path d="M {x:.0f} {start:.0f} C {first:.0f} {start + bend:.0f} {second:.0f} {end - bend:.0f} '
                f'{to_x:.0f} {end:.0f}" fill="none" stroke="#777" marker-end="url(#head)"/>'
            )
        boxes.append(
            f'<rect x="{x - BOX_WIDTH / 2:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" '
            f'fill="{colours.get(package, "#eeeeee")}" stroke="#555"/>'
            f'<text x="{x:.0f}" y="{y + 17:.0f}" font-weight="bold">{package}</text>'
            f'<text x="{x:.0f}" y="{y + 33:.0f}" font-size="11">{html.escape(NOTES.get(package, ""))}</text>'
        )
    bottom = TOP + len(rows) * ROW
    legend = [
        f'<rect x="60" y="{bottom + 26 * i}" width="16" height="16" fill="{colour}" stroke="#555"/>'
        f'<text x="86" y="{bottom + 26 * i + 13}" style="text-anchor: start">{html.escape(text)}</text>'
        for i, (colour, (_, text)) in enumerate(PATHS.items())
    ]
    height = bottom + 26 * len(PATHS) + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
            'font-size="13" text-anchor="middle">',
            '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
            '<path d="M 0 0 L 8 4 L 0 8 z" fill="#777"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *arrows,
            *boxes,
            *legend,
            "</svg>\n",
        ]
    )


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        return int(not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != draw(read_below()))
    if arguments:
        print("error: the only argument is --check", file=sys.stderr)
        return 2
    PICTURE.write_text(draw(read_below()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
