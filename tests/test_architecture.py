"""Who may import whom. A reader can trust the folder tree because this file holds it to its word.

entry points -> training -> config, observe, inspection, distributed
config -> models, data, planner, whose config classes make one record
entry points -> replay -> config, planner, observe
models -> moe -> schedules -> dispatch -> collectives -> mesh
entry points -> calibration -> moe, distributed
moe -> after_gate -> dispatch, for plans that look at the counts first
moe -> grouped_matmul -> collectives
schedules -> cluster, for what an exchange costs
planner -> placement -> cluster
entry points, training -> inspection, which reads what the compiler wrote and nothing else
models, planner -> overlap, for what stands beside what
moe_jax.errors and moe_jax.user_cache lie below all.
"""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "moe_jax"

# room -> the rooms right below it; a room may import these and all that lie below them
BELOW = {
    "entry points": ("training", "calibration", "replay"),
    "replay": ("config", "planner", "observe"),
    "training": ("config", "observe", "inspection", "distributed"),
    "config": ("models", "data", "planner"),
    "inspection": (),
    "models": ("moe", "overlap"),
    "calibration": ("moe", "distributed"),
    "distributed": (),
    "observe": (),
    "data": (),
    "planner": ("placement", "overlap"),
    "overlap": (),
    "placement": ("cluster",),
    "cluster": (),
    "moe": ("schedules", "after_gate", "grouped_matmul"),
    "grouped_matmul": ("collectives",),
    "after_gate": ("dispatch",),
    "schedules": ("dispatch", "cluster"),
    "dispatch": ("collectives",),
    "collectives": ("mesh",),
    "mesh": (),
    "foundation": (),
}
FOUNDATION = ("errors", "renames", "user_cache")  # modules that every package may import, and that import none
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py")))
HOST_ROOMS = ("cluster", "overlap", "placement", "planner", "inspection", "replay")
ARRAY_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def statements(node, everywhere):
    """Yield the nodes below `node` but for type-checking blocks; functions are entered only if `everywhere`."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if not everywhere and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        yield child
        yield from statements(child, everywhere)


@functools.cache
def imports(everywhere):
    """Return {module: names of the modules that it imports}, of all files of the package.

    Args:
      everywhere: count the imports inside functions too.
    """
    paths = sorted(PACKAGE.rglob("*.py"))
    known = {module_name(path) for path in paths}
    found = {}
    for path in paths:
        names = set()
        for node in statements(ast.parse(path.read_text(encoding="utf-8")), everywhere):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports by a relative name"
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inside & known
                if inside - known or not inside:
                    names.add(node.module)
        found[module_name(path)] = names
    return found


def room_of(module):
    """Return the room of one of our modules."""
    parts = module.split(".")
    if len(parts) == 2 and parts[1] in FOUNDATION:
        return "foundation"
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "entry points"


def ours(names):
    return {name for name in names if name.split(".")[0] == "moe_jax"}


def below(room):
    """Return all rooms that `room` may import."""
    return {"foundation"}.union(*({lower} | below(lower) for lower in BELOW[room]))


def test_every_room_has_its_place():
    assert set(ROOMS) <= set(BELOW)


def test_imports_point_downwards():
    wrong = [
        f"{module} imports {name}: {room_of(module)} lies not above {room_of(name)}"
        for module, names in imports(everywhere=True).items()
        for name in ours(names)
        if room_of(name) != room_of(module) and room_of(name) not in below(room_of(module))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cycle_among_rooms():
    graph = {room: set() for room in BELOW}
    for module, names in imports(everywhere=True).items():
        graph[room_of(module)] |= {room_of(name) for name in ours(names)} - {room_of(module)}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises a CycleError that names the cycle


def test_no_cycle_among_files():
    graph = {module: ours(names) - {module} for module, names in imports(everywhere=True).items()}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("room", HOST_ROOMS)
def test_host_rooms_never_import_jax(room):
    for module, names in imports(everywhere=True).items():
        if room_of(module) == room:
            assert not ARRAY_LIBRARIES & {name.split(".")[0] for name in names}, module


@pytest.mark.parametrize("room", ["data", "observe"])
def test_rooms_that_import_without_jax(room):
    for module, names in imports(everywhere=False).items():
        if room_of(module) == room:
            assert not ARRAY_LIBRARIES & {name.split(".")[0] for name in names}, module


def test_host_rooms_import_with_jax_blocked():
    """Whatever the files say: with jax out of reach every module of the host rooms still imports."""
    modules = [module for module in imports(everywhere=False) if room_of(module) in (*HOST_ROOMS, "data", "observe")]
    modules.remove("moe_jax.data.train_tokenizer")  # a command, whose flags another run of it would define again
    code = f"""
import importlib, sys
for name in {sorted(ARRAY_LIBRARIES)}:
    sys.modules[name] = None  # import raises ImportError
for name in {modules}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_package_imports_nothing_heavy():
    code = "import sys; old = set(sys.modules); import moe_jax; print(sorted(set(sys.modules) - old))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['moe_jax']", done.stdout + done.stderr


def test_gin_stays_in_one_file():
    assert [module for module, names in imports(everywhere=True).items() if {"gin", "gin.config"} & names] == [
        "moe_jax.config.gin_files"
    ]


def test_names_say_what_a_module_is_for():
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
    for folder in ("moe_jax", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*"):
            assert path.stem not in vague, path


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_a_package_with_a_short_readme(room):
    assert (PACKAGE / room / "__init__.py").exists()
    readme = (PACKAGE / room / "README.md").read_text(encoding="utf-8")
    assert 3 <= len(readme.splitlines()) < 30
