"""The way of a plan: which packages one re-plan goes through, in order, as docs/architecture.md shows it."""

import dataclasses
import importlib.util
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = str(ROOT / "moe_jax") + "/"
spec = importlib.util.spec_from_file_location("simulated_runs", pathlib.Path(__file__).with_name("test_rejit.py"))
runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runs)


def package_of(frame):
    """The package of a function's frame, None of other code, of modules under all packages, of a record's methods."""
    path, top = frame.f_code.co_filename, frame.f_code.co_qualname.split(".")[0]
    if not path.startswith(PACKAGE):
        return None
    owner = frame.f_globals.get(top)
    is_record = isinstance(owner, type) and (dataclasses.is_dataclass(owner) or hasattr(owner, "_fields"))
    package, _, inside = path.removeprefix(PACKAGE).partition("/")
    return package if inside and not is_record else None


def stays(function):
    """The packages that a call goes through, by call and by return."""
    found, stack = [], []

    def note(frame, event, _):
        if event == "call":
            stack.append(package_of(frame))
        elif event == "return" and stack:
            stack.pop()
        now = next((package for package in reversed(stack) if package), None)
        if now and found[-1:] != [now]:
            found.append(now)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", ["hecate", "pro_prophet", "llep"])
def test_one_re_plan_enters_each_package_once(name):
    """From the loads of a step to the tables of the next."""
    engine = runs.build_engine(runs.session_of(name=name, swap_after=1))
    engine.start()
    loads = list(runs.drifting_loads(30))
    runs.drive(engine, loads[:-1])
    before = engine.plan_id

    def replan():
        engine.observe(29, {"ready": 0, "loads": loads[-1], "plan_hash_least": 1, "plan_hash_most": 1})
        engine.after_dispatch(30)
        engine.before_step(31, {}, 0)

    way = stays(replan)
    assert engine.plan_id == before + 1 and engine.pending is None
    assert len(way) <= 8 and all(way.count(package) == 1 for package in set(way) - {"replan"})
    written = re.search(r"(?m)^    (replan -> .*)$", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert way == written[1].split(" -> ")
    engine.close()
