"""No name that was decided against comes back: tests/former_names.csv says which, and where each may not stand.

where: `identifier` any name, attribute, argument or definition in Python; `module` a file's stem; `file` a file's name;
`binding` Name.field of a config; `flag` a command-line flag; `key` a key of JSON files, metrics and plan states. A text
that is a name and nothing else counts too (getattr, a tuple of keys), and so do the beginning of an f-string
("guests_{x}"), the cells of notebooks, and bindings and flags in gin files, job files, shell scripts and pages. Prose,
the table of renames, aliases of flags and the fixtures of old runs are exempt. docs/glossary.md has what replaced each.
"""

import ast
import csv
import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest

from moe_jax.config.run_config import CONFIG_CLASSES

ROOT = Path(__file__).parents[1]
FOLDERS = ("moe_jax", "scripts", "tests", "configs", "docs")
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


def trees():
    """Yield (path from the root, syntax tree) of every source and of every notebook's cells."""
    for path in sources():
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "scripts").rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        for cell in code:
            lines = ["pass" if line.startswith(("%", "!")) else line for line in cell.splitlines()]
            yield path.relative_to(ROOT), ast.parse("\n".join(lines))


def texts():
    """Yield (path from the root, text) of files that hold bindings or flags."""
    suffixes = {".py", ".gin", ".md", ".sh", ".sbatch", ".yaml", ".ipynb"}
    for path in [*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*"))]:
        if path.suffix in suffixes and str(path.relative_to(ROOT)) not in (*EXEMPT, "docs/glossary.md"):
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def names_in(node):
    """Yield (name, where) of one node of a syntax tree."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            yield name, "identifier"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name, "identifier"
        case ast.alias(name=name, asname=other):
            yield from ((part, "identifier") for part in (*name.split("."), other) if part)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name, "identifier"
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            yield from ((name, "identifier") for name in names)
        case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called), args=[ast.Constant(value=str(flag)), *_]):
            if called == "DEFINE_alias":
                node.args[0].value = ""  # the walk comes to it later
            elif called.startswith("DEFINE_"):
                yield flag, "flag"
            elif called == "add_argument":
                yield flag.lstrip("-"), "flag"
        case ast.Constant(value=str(text)) if text.isidentifier():
            yield text, "key"
            if "_" in text:  # a single word is a word too
                yield text, "identifier"
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), ast.FormattedValue(), *_]) if text.isidentifier():
            yield from ((name, "key") for name in {text, text.strip("_")})


def names_in_text(text):
    """Yield (name, where) of the bindings and flags in a file of any kind."""
    yield from ((name, "binding") for name in re.findall(rf"\b(?:{'|'.join(CONFIG_CLASSES)})\.\w+", text))
    yield from ((name, "flag") for name in re.findall(r"(?<![\w-])--(?:no)?(\w+)(?![\w-])", text))


@functools.cache
def found():
    """Return {(name, where): first place}."""
    places = {}
    for path, tree in trees():
        for node in ast.walk(tree):
            for entry in names_in(node):
                places.setdefault(entry, f"{path}:{getattr(node, 'lineno', 1)}")
    for path, text in texts():
        for entry in names_in_text(text):
            places.setdefault(entry, str(path))
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if "__pycache__" not in path.parts:
                places.setdefault((path.name, "file"), str(path))
                if path.suffix == ".py" or (path / "__init__.py").exists():
                    places.setdefault((path.stem, "module"), str(path))
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


@pytest.mark.parametrize(
    ("source", "entry"),
    [
        ("getattr(config, 'guest_slots')", ("guest_slots", "identifier")),
        ("def f(*, guest_slots): pass", ("guest_slots", "identifier")),
        ("dict(guest_slots=1)", ("guest_slots", "identifier")),
        ("try: pass\nexcept ValueError as told: pass", ("told", "identifier")),
        ("match x:\n    case [told, *wide]: pass", ("wide", "identifier")),
        ("def f():\n    global told", ("told", "identifier")),
        ("import a.copies as b", ("copies", "identifier")),
        ("record.get('guests')", ("guests", "key")),
        ("for key in ('guests', 'step'): pass", ("guests", "key")),
        ("record[f'guests_{kind}'] = 1", ("guests", "key")),
        ("DEFINE_integer('guest_slots', 4, '')", ("guest_slots", "flag")),
        ("parser.add_argument('--guests')", ("guests", "flag")),
    ],
)
def test_no_way_around_the_search(source, entry):
    assert entry in {found for node in ast.walk(ast.parse(source)) for found in names_in(node)}


def test_an_alias_may_keep_an_old_flag_and_texts_are_searched():
    tree = ast.parse("flags.DEFINE_alias('guest_slots', 'replica_slots')")
    assert "guest_slots" not in {name for node in ast.walk(tree) for name, _ in names_in(node)}
    text = "args: [--guest_slots=3, --nomaterialize, --no-cache]\n# '--gin_bindings=PlannerConfig.n = 1'\n"
    known = {("guest_slots", "flag"), ("materialize", "flag"), ("PlannerConfig.n", "binding")}
    assert known <= set(names_in_text(text))
