"""No name that was decided against comes back: tests/former_names.csv says which, and where each may not stand.

where: `identifier` any name, attribute, argument or definition in Python; `module` a file's stem; `file` a file's name;
`binding` Name.field of a config; `flag` a command-line flag; `key` a key of JSON files, metrics and plan states. Prose,
the table of renames, aliases of flags and the fixtures of old runs are exempt. docs/glossary.md has what replaced each.
"""

import ast
import csv
import dataclasses
import functools
from pathlib import Path

import pytest

from moe_jax.config.run_config import CONFIG_CLASSES

ROOT = Path(__file__).parents[1]
EXEMPT = ("moe_jax/renames.py", "tests/config/test_renames.py", "tests/training/test_old_run.py", "tests/test_words.py")
WHERE = ("identifier", "module", "file", "binding", "flag", "key")


def former_names():
    with open(Path(__file__).with_name("former_names.csv"), newline="", encoding="utf-8") as table:
        return [(row["name"], row["where"]) for row in csv.DictReader(table)]


def sources():
    for folder in ("moe_jax", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if str(path.relative_to(ROOT)) not in EXEMPT:
                yield path


def names_in(node):
    """Yield (name, where) of one node of a syntax tree."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            yield name, "identifier"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name, "identifier"
        case ast.alias(name=name, asname=other):
            yield from ((part, "identifier") for part in (*name.split("."), other) if part)
        case ast.Dict(keys=keys):
            yield from ((key.value, "key") for key in keys if isinstance(key, ast.Constant))
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            yield key, "key"
        case ast.Call(func=ast.Attribute(attr=called), args=[ast.Constant(value=str(flag)), *_]):
            if called.startswith("DEFINE_") and called != "DEFINE_alias":
                yield flag, "flag"


@functools.cache
def found():
    """Return {(name, where): first place}."""
    places = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for entry in names_in(node):
                places.setdefault(entry, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}")
    for folder in ("moe_jax", "scripts", "tests", "configs", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if "__pycache__" not in path.parts:
                places.setdefault((path.name, "file"), str(path))
                places.setdefault((path.stem, "module"), str(path)) if path.suffix == ".py" else None
    for name, cls in CONFIG_CLASSES.items():
        for field in dataclasses.fields(cls):
            places[f"{name}.{field.name}", "binding"] = cls.__module__
    return places


def test_the_table_is_in_order():
    table = former_names()
    assert len(table) > 80 and len(set(table)) == len(table)
    assert {where for _, where in table} <= set(WHERE)


@pytest.mark.parametrize("where", WHERE)
def test_no_former_name_stands_in_the_tree(where):
    back = [f"{name} ({found()[name, where]})" for name, w in former_names() if w == where and (name, where) in found()]
    assert not back, f"{where}: {', '.join(back)}"


def test_the_search_finds_names_of_every_kind():
    """A search that finds nothing would pass whatever stands in the tree."""
    known = {("Placement", "identifier"), ("placement", "module"), ("README.md", "file"), ("train.steps", "binding"),
             ("workdir", "flag"), ("plan_id", "key")}  # fmt: skip
    assert known <= found().keys()
