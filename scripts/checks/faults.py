"""One-line faults that the tests must see: two in each package of five files or more, drawn by a seed.

    python scripts/checks/faults.py                     # plant each in a copy of this tree, run its test
    python scripts/checks/faults.py --tree=DIR          # the same in a checkout of the commit that they were drawn on
    python scripts/checks/faults.py --tree=DIR --draw   # draw them there, by its own tests; hours

Inputs: faults.json, a list of {"package", "kind", "then", "now"}; `then` and `now` are {"path", "old", "new", "test"}:
a text that stands once in the file, what takes its place, and the test that fails by it. `then` is of the tree that the
faults were drawn on, `now` of this one. Outputs: a line for each fault, and exit code 1 where a test does not fail with
the fault, or fails without it. A site is a comparison, a sign, a constant index or a term of a sum or product; what the
six test files that speak most of it do not see is drawn again.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SEED = 26
ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".json")
# Files and texts of what this tree has in no form any more, so that nothing could be planted there.
GONE = (
    "config/values.py",  # gin's own parser reads values
    "OLD_BINDINGS",  # names of bindings before the first release
    "routers/quantile_bias.py",
    "routers/expert_choice.py",
    "dispatch/by_choice.py",  # dispatch of expert_choice
    "self._inferred",  # device counts guessed from loads
    "one == end_id",  # documents as lists
)
FLIPPED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Add: "-",
    ast.Sub: "+",
}


def sites(path: Path):
    """Yield (kind, name of the function, line number, line with the fault) of each place of a file, in its order."""
    text = path.read_text()
    lines = text.split("\n")

    def changed(node, new):
        line = lines[node.lineno - 1].encode()
        return (line[: node.col_offset] + new.encode() + line[node.end_col_offset :]).decode()

    def visit(node, function):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = node.name
        for child in ast.iter_child_nodes(node):
            if getattr(child, "lineno", 0) == getattr(child, "end_lineno", 1) and function:
                source = ast.unparse
                if isinstance(child, ast.Compare) and type(child.ops[0]) in FLIPPED and len(child.ops) == 1:
                    new = f"{source(child.left)} {FLIPPED[type(child.ops[0])]} {source(child.comparators[0])}"
                    yield "comparison", function, child.lineno, changed(child, new)
                elif isinstance(child, ast.BinOp) and isinstance(child.op, (ast.Add, ast.Sub, ast.Mult)):
                    if not any(
                        isinstance(n, (ast.Constant, ast.JoinedStr))
                        and not isinstance(getattr(n, "value", ""), (int, float))
                        for n in ast.walk(child)
                    ):
                        if type(child.op) in FLIPPED:
                            new = f"({source(child.left)} {FLIPPED[type(child.op)]} {source(child.right)})"
                            yield "sign", function, child.lineno, changed(child, new)
                        yield "term", function, child.lineno, changed(child, f"({source(child.left)})")
                elif isinstance(child, ast.Subscript) and re.fullmatch(r"-?\d", source(child.slice)):
                    other = 1 if source(child.slice) == "0" else 0
                    yield "index", function, child.lineno, changed(child, f"{source(child.value)}[{other}]")
            yield from visit(child, function)

    yield from visit(ast.parse(text), "")


def pytest(tree: Path, tests: list[str], seconds: int) -> tuple[bool, str]:
    """Return whether the tests failed, and the first that did; out of time counts as failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return True, ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\[\s]+(?:\[.*?\])?)?)(?: - |$)", done.stdout, re.M)
    return done.returncode not in (0, 5), found.group(1) if found else ""


def check(tree: Path, column: str) -> int:
    """Plant each fault in turn; return the number of those that their test misses, or that fails without them."""
    missed = 0
    for number, fault in enumerate(json.loads(LIST.read_text()), 1):
        here = fault[column]
        path = tree / here["path"]
        text = path.read_text() if path.exists() else ""
        if text.count(here["old"]) != 1:
            verdict = f"STANDS {text.count(here['old'])} TIMES in {here['path']}"
        elif pytest(tree, [here["test"]], 600)[0]:
            verdict = "FAILS WITHOUT IT"
        else:
            path.write_text(text.replace(here["old"], here["new"]))
            verdict = "caught" if pytest(tree, [here["test"]], 600)[0] else "MISSED"
            path.write_text(text)
        missed += verdict != "caught"
        line = f"{number:2} {fault['package']:14} {fault['kind']:10} {verdict}: {here['path']}, {here['test']}"
        print(line, flush=True)
    return missed


def draw(tree: Path):
    """Write faults.json for a tree by its own suite, two faults of different kinds a package; goes on from it."""
    faults = json.loads(LIST.read_text()) if LIST.exists() else []
    packages = sorted(d for d in (tree / "moe_jax").iterdir() if len(list(d.glob("*.py"))) >= 5)
    for package in packages:
        places = [(f, *site) for f in sorted(package.glob("*.py")) for site in sites(f)]
        random.Random(f"{SEED} {package.name}").shuffle(places)
        have = [f["kind"] for f in faults if f["package"] == package.name]
        for path, kind, function, line, new in places:
            if len(have) == 2 or kind in have:
                continue
            name, text = str(path.relative_to(tree)), path.read_text()
            old = text.split("\n")[line - 1]
            if text.count(old) != 1 or any(f["then"]["old"] == old for f in faults):
                continue
            if any(gone in name or gone in old for gone in GONE):
                continue
            # the tests that speak of the function, of its module or its package come first
            words = (function.strip("_"), path.stem, package.name)
            score = {
                t: sum(w * t.read_text().count(x) for w, x in zip((9, 3, 1), words, strict=True))
                + 30 * (package.name in t.parts)
                for t in (tree / "tests").rglob("test_*.py")
            }
            tests = [str(t.relative_to(tree)) for t in sorted(score, key=lambda t: (-score[t], str(t)))[:6] if score[t]]
            path.write_text(text.replace(old, new))
            _, test = pytest(tree, tests, 900)
            path.write_text(text)
            if "::" not in test or pytest(tree, [test], 300)[0]:
                print(f"{package.name}: drawn again, {name}:{line} {kind} ({test or 'seen by no test'})", flush=True)
                continue
            have.append(kind)
            then = {"path": name, "old": old, "new": new, "test": test}
            faults.append({"package": package.name, "kind": kind, "then": then, "now": then})
            faults.sort(key=lambda f: f["package"])
            LIST.write_text(json.dumps(faults, indent=1) + "\n")
            print(f"{package.name}: {name}:{line} {kind} seen by {test}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="a checkout of the commit that they were drawn on")
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    if args.draw:
        draw(args.tree.resolve())
        return 0
    if args.tree:
        return int(check(args.tree.resolve(), "then") > 0)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "runs"))
        return int(check(tree, "now") > 0)


if __name__ == "__main__":
    sys.exit(main())
