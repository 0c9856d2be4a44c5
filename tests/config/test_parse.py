"""gin files and bindings: what is read, that every mistake is one line that names it, and how two texts differ."""

import pytest

from moe_jax.config.gin_files import fitted, parse_run_config
from moe_jax.config.run_config import (
    ABSENT,
    RENAMED,
    RunConfig,
    bindable,
    bound_in,
    check_resumable,
    config_differences,
    config_text,
)
from moe_jax.config.train_config import TrainConfig
from moe_jax.errors import UserError
from moe_jax.planning import PlannerConfig
from moe_jax.planning.hecate import Hecate


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return str(path)


def mistake(files=(), bindings=(), search_paths=()):
    """Return the message of the UserError that parsing must raise, and check that it is one line."""
    with pytest.raises(UserError) as caught:
        parse_run_config(files, bindings, search_paths)
    message = str(caught.value)
    assert "\n" not in message and "object at 0x" not in message
    return message


def test_parse_nothing_gives_defaults():
    run, text = parse_run_config()
    assert run == RunConfig()
    fields = sum(map(len, bindable().values()))
    assert len(text.splitlines()) == fields
    assert "train.steps = 100\n" in text


def test_parse_files_includes_macros_and_bindings_in_order(tmp_path):
    write(tmp_path, "base.gin", "EXPERTS = 16\nMoEConfig.num_experts = %EXPERTS\ntrain.steps = 10\n")
    lines = "include 'base.gin'\ntrain.steps = 20\ntrain.profile_steps = (%FIRST, 13)\nFIRST = 3\n"
    bindings = ["EXPERTS = 32", "train.learning_rate = 1", "DataConfig.path = 'a = b # c'"]
    run, text = parse_run_config([write(tmp_path, "run.gin", lines)], bindings, [str(tmp_path)])
    assert (run.moe.num_experts, run.train.steps, run.train.profile_steps) == (32, 20, (3, 13))
    assert run.train.learning_rate == 1.0 and type(run.train.learning_rate) is float
    assert run.data.path == "a = b # c"
    assert type(run.train) is TrainConfig
    assert "MoEConfig.num_experts = 32  # set\n" in text
    again, text_again = parse_run_config([write(tmp_path, "again.gin", text)])
    assert again == run and config_differences(text_again, text) == []


def test_parse_leaves_gin_empty():
    import gin

    parse_run_config(gin_bindings=["train.steps = 3"])
    assert gin.config_str() == "" and not gin.config.config_is_locked()
    with pytest.raises(UserError):
        parse_run_config(gin_bindings=["train.steps = 3", "train.stepz = 4"])
    with pytest.raises(UserError, match=r"train.steps \(1.5, a number\) must be a whole number \(--override\)"):
        parse_run_config(gin_bindings=["train.steps = 3"], overrides=["train.steps = 1.5"])
    run, _ = parse_run_config()
    assert run.train.steps == 100, "a binding of an earlier parse is still there"


def test_parse_finds_files_by_search_path_and_next_to_the_package(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "mine.gin", "train.steps = 7\n")
    monkeypatch.chdir(tmp_path)
    assert parse_run_config(["mine.gin"], search_paths=["sub"])[0].train.steps == 7
    assert parse_run_config(["configs/run/demo.gin"])[0].model.layers > 0


@pytest.mark.parametrize(
    ("binding", "parts"),
    [
        ("train.step = 3", ["train has no field 'step'", "did you mean train.steps?"]),
        ("MoeConfig.top_k = 3", ["unknown name 'MoeConfig'", "did you mean MoEConfig.top_k?"]),
        ("ModelConfig.num_experts = 3", ["did you mean MoEConfig.num_experts?"]),
        ("foo.bar = 3", ["unknown name 'foo'", "of a plugin need its --plugin; known names: train, DataConfig, "]),
        ("ModelConfig.zzz = 3", ["ModelConfig has no field 'zzz'", "its fields are: activation, attention"]),
        ("MoEConfig.zzz = 3", ["MoEConfig has no field 'zzz'", "its fields are: "]),
        ("steps = 3", ["the macro 'steps'", "did you mean train.steps?"]),
        ("eval/train.steps = 3", ["has a scope ('eval')", "write train.steps = 3"]),
        ("train.steps = %STEPS", ["the macro %STEPS, which is not defined", "a line: STEPS = ..."]),
        ("A = %B\nB = %A\ntrain.steps = %A", ["%A -> %B -> %A"]),
        ("train.steps = '40'", ["train.steps ('40', text) must be a whole number (--gin_bindings)"]),
        ("train.seed = 1180591620717411303424", ["(1180591620717411303424, beyond 64 bits) must be a whole number"]),
        ("train.seed = 4294967296", ["train.seed (4294967296) must be below 4294967296"]),  # whose key is that of 0
        ("ModelConfig.layers = 1000000000", ["num_experts (8)", "make 8000000000 experts", "at most 16777216"]),
        ("ModelConfig.layers = 2\nModelConfig.segments = ('layers=2 num_experts=9999999',)", ["make 19999998 experts"]),
        ("train.learning_rate = 1e999", ["must be a finite number"]),
        ("train.profile_steps = (1, 2, 3)", ["must be a tuple of 2 entries, each a whole number or None"]),
        ("ModelConfig.rotary_yarn = (2, '4')", ["must be a tuple, each a finite number"]),
        ("MoEConfig.renormalize = 1", ["MoEConfig.renormalize (1) must be True or False"]),
        ("ProProphet.skipped_devices = 1.5", ["must be a whole number or text in quotes"]),
        ("DataConfig.path = corpus.txt", ["'DataConfig.path = corpus.txt'", "'corpus' is no value", "text stands in"]),
        ("train.steps 3", ["'train.steps 3'", "expected ':' or '='"]),
        ("train.steps = {[1]: 2}", ["unhashable"]),
        ("train.steps = 3\n\0", ["NUL"]),
        ("train.steps = 0", ["train.steps (0) must be at least 1"]),
        ("DistillationConfig.alpha = 2.0", ["DistillationConfig.alpha (2.0) is not read without", ".teacher"]),
        ("import no_such_module_of_mine", ["'import no_such_module_of_mine' would run the code", "take the line out"]),
    ],
)
def test_parse_mistaken_binding(binding, parts):
    message = mistake(bindings=[binding])
    for part in parts:
        assert part in message


def test_parse_runs_no_code(tmp_path, monkeypatch):
    (tmp_path / "of_mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    file = write(tmp_path, "a.gin", "import of_mine\ntrain.steps = 3\n")
    file_of_text = write(tmp_path, "b.gin", "train.steps = 40\n\n# fine\ntrain.seed = fourty\n")
    assert f"{file_of_text}:4: 'train.seed = fourty'" in mistake([file_of_text])
    assert "a.gin:1" in mistake([file]) and not (tmp_path / "ran").exists()


def test_parse_file_mistakes(tmp_path):
    write(tmp_path, "demo.gin", "")
    assert "did you mean" in mistake([str(tmp_path / "dmo.gin")])
    assert "does not exist" in mistake([str(tmp_path / "zzz")])
    assert "is a folder" in mistake([str(tmp_path)])
    (tmp_path / "binary.gin").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in mistake([str(tmp_path / "binary.gin")])
    loop = write(tmp_path, "loop.gin", f"include '{tmp_path}/other.gin'\n")
    write(tmp_path, "other.gin", f"include '{loop}'\n")
    assert "includes itself" in mistake([loop])
    absent = write(tmp_path, "absent.gin", "\ninclude 'nowhere.gin'\n")
    assert f"({absent}:2)" in mistake([absent])


def test_parse_shows_nothing_of_a_file_that_a_config_includes(tmp_path):
    """A config of somebody else may include a private file, and its message may go to them."""
    for line in ("root:x:0:hunter2", "password = hunter2", "key/password.value = 'hunter2'"):
        private = write(tmp_path, "private", line + "\n")
        assert "hunter2" in mistake([private]) or "scope" in mistake([private])
        included = mistake([write(tmp_path, "theirs.gin", f"include '{private}'\n")])
        assert "hunter2" not in included and f"{private}:1" in included


def test_fitted_covers_every_field():
    """A field of a new kind would pass unchecked: its default must go through the check as it is."""
    for name, part in RunConfig().by_name().items():
        for field, annotation in bindable()[name].items():
            default = getattr(part, field)
            assert fitted(f"{name}.{field}", annotation, default, "default") == default


def test_a_config_of_a_run_keeps_its_marks(tmp_path):
    """Every value stands in config.gin, so a command that names it sets those alone that it marks or that differ."""
    (tmp_path / "environment.json").write_text("{}")
    _, text = parse_run_config((), ["train.steps = 100", "train.seed = 3"])  # 100 is the default, and set
    (tmp_path / "config.gin").write_text(text)
    file = [str(tmp_path / "config.gin")]
    assert parse_run_config(file, ())[1] == text
    assert bound_in(parse_run_config(file, ["MoEConfig.top_k = 2"])[1]) == bound_in(text) | {"MoEConfig.top_k"}
    (tmp_path / "operative_config.gin").write_text(text.replace("  # set", ""))  # which had no marks
    assert bound_in(parse_run_config([str(tmp_path / "operative_config.gin")], ())[1]) == {"train.seed"}


def test_a_moved_binding_names_its_successor_and_is_read_from_files_of_runs(tmp_path):
    """A run's file of a version that had planners' and routers' options in one class, None where a planner chose."""
    assert set(RENAMED.values()) <= {f"{name}.{field}" for name, fields in bindable().items() for field in fields}
    for old, new in RENAMED.items():
        message = mistake(bindings=[f"{old} = 3"])
        assert message == f"{old} (--gin_bindings) is {new} now"
    lines = "PlannerConfig.name = 'hecate'\nPlannerConfig.shard_every = 10  # set\nPlannerConfig.calibrate = None\n"
    lines += "DataConfig.add_special_tokens = True\n"
    assert "mine.gin:2" in mistake([write(tmp_path, "mine.gin", lines)])
    run, text = parse_run_config([write(tmp_path, "config.gin", lines)])
    assert run.planner == PlannerConfig(name="hecate", options=(Hecate(shard_every=10),))
    assert "Hecate.shard_every = 10  # set\n" in text and config_differences(lines, text) == []
    assert config_differences(lines.replace("10", "11"), text) == [("Hecate.shard_every", "11", "10")]


# Two texts compared: what may change when a run goes on.

BASE = config_text(RunConfig())


def test_config_differences_across_versions():
    """A field that the old text lacks counts at its default; one that no config has any more is absent; numbers may be
    written otherwise."""
    assert config_differences("train.clip_norm = 1\n", "train.clip_norm = 1.0\n") == []
    assert config_differences("MoEConfig.renormalize = 1\n", "MoEConfig.renormalize = True\n") != []
    without = "".join(line + "\n" for line in BASE.splitlines() if not line.startswith("train.seed"))
    assert config_differences(without, BASE) == []
    changed = BASE.replace("train.seed = 0", "train.seed = 5")
    assert config_differences(without, changed) == [("train.seed", "0", "5")]
    assert config_differences(BASE + "MoEConfig.gone = 3\n", BASE) == [("MoEConfig.gone", "3", ABSENT)]
    with pytest.raises(UserError, match="line 1: 'half a li' is not"):
        config_differences("half a li", BASE)


def test_check_resumable_lets_layout_and_cadence_change():
    text = BASE
    for old, new in (
        ("MeshConfig.data = 1", "MeshConfig.data = 4"),
        ("PlannerConfig.name = 'none'", "PlannerConfig.name = 'eplb'"),
        ("MoEConfig.schedule = 'deepspeed'", "MoEConfig.schedule = 's1'"),
        ("train.steps = 100", "train.steps = 200"),
        ("ModelConfig.remat = 'none'", "ModelConfig.remat = 'block'"),
        ("train.decay_steps = 0", "train.decay_steps = 40"),  # the decay may begin whenever the user likes
    ):
        assert old in text
        text = text.replace(old, new)
    check_resumable(BASE, text)


def test_check_resumable_refuses_the_rest_and_names_all():
    changed = BASE.replace("MoEConfig.num_experts = 8", "MoEConfig.num_experts = 16").replace(
        "train.learning_rate = 0.003", "train.learning_rate = 0.1"
    )
    with pytest.raises(UserError) as caught:
        check_resumable(BASE, changed, "runs/try")
    message = str(caught.value)
    assert "MoEConfig.num_experts was 8 and is 16 now" in message
    assert "train.learning_rate was 0.003 and is 0.1 now" in message
    assert "runs/try" in message and "--init_from=runs/try" in message and "\n" not in message
    assert "(--gin_file=runs/try/config.gin does)" in message


@pytest.mark.parametrize("name, refused", [("pro_prophet", True), ("hecate", False), ("auto", False), ("none", False)])
def test_an_option_that_the_planner_does_not_read_is_refused(name, refused):
    """`auto` reads the options of all, and without planning nothing is read."""
    bindings = ["Hecate.shard_every = 5", f"PlannerConfig.name = {name!r}"]
    if not refused:
        assert parse_run_config((), bindings)[0].planner.options == (Hecate(shard_every=5),)
        return
    with pytest.raises(UserError, match=r"Hecate.shard_every \(5\) is read by .* = 'hecate', not by 'pro_prophet'"):
        parse_run_config((), bindings)
