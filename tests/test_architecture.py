"""Who may import whom. The folder tree shows it, and this file checks it.

Every import counts: at the top of a file, inside a function, under TYPE_CHECKING, and by a name that is text, as
importlib takes it. `BELOW` lists the packages from the entry points down; nothing is exempt.
"""

import ast
import functools
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "moe_jax"

# package -> the packages right below it, from the top down; one may import these and all that lie below them
BELOW = {
    "commands": ("papers", "inference"),
    "papers": ("analysis",),
    "analysis": ("training",),
    "inference": ("training",),
    "training": ("jobs", "replan"),
    "replan": ("storage",),
    "jobs": ("observe",),
    "observe": ("storage",),
    "storage": ("config",),
    "config": ("models", "data"),
    "models": ("moe",),
    "moe": ("moe.schedules",),
    "moe.schedules": ("moe layer",),
    "moe layer": ("moe.routers",),
    "moe.routers": ("moe parts",),
    "moe parts": ("planning", "kernels"),
    "planning": ("cluster", "parallel"),
    "kernels": ("parallel",),
    "parallel": (),
    "cluster": (),
    "data": (),
    "foundation": (),
}
MOE_PARTS = ("config", "routing", "permute")  # what the layer and the routers are built from
MOE_TOP = (
    "build",
    "choosers",
    "flax_layer",
)  # modules of `moe` that know of all schedules; the rest is the layer
FOUNDATION = ("errors", "registry", "shipped")  # modules that every package may import, and that import none
PACKAGES = sorted(path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py"))[1:]
HOST_PACKAGES = ("cluster", "planning")
BY_TEXT = ("import_module", "__import__", "resolve_name", "run_module")
ARRAY_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def text_imports(node, module):
    """Return the modules that a call such as importlib.import_module imports; a name that is computed is refused.

    `f"{__name__}.x"` may compute what follows, since that stays inside the package.
    """
    match node:
        case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called), args=[name, *_]) if called in BY_TEXT:
            pass
        case _:
            return set()
    match name:
        case ast.Constant(value=str(text)):
            return {text.partition(":")[0]}
        case ast.JoinedStr(values=[ast.FormattedValue(value=ast.Name(id="__name__")), *_]):
            return {module}
    raise AssertionError(f"{module} imports what {ast.unparse(name)} names; write the name as text")


def statements(node, everywhere):
    """Yield the nodes below `node`, in type-checking blocks too; functions are entered only if `everywhere`."""
    for child in ast.iter_child_nodes(node):
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
            names |= text_imports(node, module_name(path))
        found[module_name(path)] = names
    return found


def package_of(module):
    """Return the package of one of our modules, the key of `BELOW`."""
    parts = module.split(".")
    if len(parts) == 2 and parts[1] in FOUNDATION:
        return "foundation"
    if len(parts) > 2 and parts[1] == "moe":
        own = f"moe.{parts[2]}"
        if own in BELOW or parts[2] in MOE_TOP:
            return own if own in BELOW else "moe"
        return "moe parts" if parts[2] in MOE_PARTS else "moe layer"
    return parts[1] if len(parts) > 1 and parts[1] in PACKAGES else "commands"


def ours(names):
    return {name for name in names if name.split(".")[0] == "moe_jax"}


def below(package):
    """Return all packages that `package` may import."""
    return {"foundation"}.union(*({lower} | below(lower) for lower in BELOW[package]))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("importlib.import_module('moe_jax.training.run')", {"moe_jax.training.run"}),
        ("__import__('moe_jax.train')", {"moe_jax.train"}),
        ("pkgutil.resolve_name('moe_jax.train:main')", {"moe_jax.train"}),
        ("import_module(f'{__name__}.{part}')", {"moe_jax.config"}),
        ("print('moe_jax.train')", set()),
    ],
)
def test_imports_by_text_count(source, names):
    assert set().union(*(text_imports(node, "moe_jax.config") for node in ast.walk(ast.parse(source)))) == names


def test_an_import_of_a_computed_name_is_refused():
    with pytest.raises(AssertionError, match="write the name as text"):
        text_imports(ast.parse("importlib.import_module('moe_jax.' + name)", mode="eval").body, "moe_jax.config")


def test_every_package_has_its_place():
    assert {name.replace("/", ".") for name in PACKAGES} <= set(BELOW)


def test_imports_point_downwards():
    wrong = [
        f"{module} imports {name}: {package_of(module)} lies not above {package_of(name)}"
        for module, names in imports(everywhere=True).items()
        for name in ours(names)
        if package_of(name) != package_of(module) and package_of(name) not in below(package_of(module))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cycle_among_packages():
    graph = {package: set() for package in BELOW}
    for module, names in imports(everywhere=True).items():
        graph[package_of(module)] |= {package_of(name) for name in ours(names)} - {package_of(module)}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises a CycleError that names the cycle


def test_no_cycle_among_files():
    graph = {module: ours(names) - {module} for module, names in imports(everywhere=True).items()}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("package", HOST_PACKAGES)
def test_host_packages_never_import_jax(package):
    for module, names in imports(everywhere=True).items():
        if package_of(module) == package:
            assert not ARRAY_LIBRARIES & {name.split(".")[0] for name in names}, module


@pytest.mark.parametrize("package", ["data", "observe"])
def test_packages_that_import_without_jax(package):
    for module, names in imports(everywhere=False).items():
        if package_of(module) == package:
            assert not ARRAY_LIBRARIES & {name.split(".")[0] for name in names}, module


def test_host_packages_import_with_jax_blocked():
    """Whatever the files say: with jax out of reach every module of the host packages still imports."""
    light = (*HOST_PACKAGES, "data", "observe")
    modules = [module for module in imports(everywhere=False) if package_of(module) in light]
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
    assert [module for module, names in imports(everywhere=True).items() if {"gin", "gin.config_parser"} & names] == [
        "moe_jax.config.gin_files"
    ]


def test_orbax_is_used_by_its_public_names():
    for module, names in imports(everywhere=True).items():
        assert not any(name.startswith("orbax.checkpoint._") for name in names), module


def test_what_concerns_several_processes_stays_in_one_package():
    alone = {"socket", "selectors", "ctypes", "signal"}
    for module, names in imports(everywhere=True).items():
        if package_of(module) != "jobs" and module != "moe_jax.watch":
            assert not alone & {name.split(".")[0] for name in names}, module
    variables = re.compile(r"SLURM_|OMPI_|JAX_(COORDINATOR|NUM_PROCESSES|PROCESS_ID|LOCAL_DEVICE_IDS)|JOB_COMPLETION")
    read = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if variables.search(path.read_text())}
    assert read == {"jobs"}


def test_names_say_what_a_module_is_for():
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
    for folder in ("moe_jax", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*"):
            assert path.stem not in vague, path


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_a_short_readme_that_names_its_own_files(package):
    readme = (PACKAGE / package / "README.md").read_text(encoding="utf-8")
    assert 3 <= len(readme.splitlines()) <= 20
    named = re.findall(r"`(\w+\.py)`", readme)
    assert named or package in ("observe",)
    assert all((PACKAGE / package / name).exists() for name in named)
