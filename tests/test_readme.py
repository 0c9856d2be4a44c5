"""The commands of README.md and BUILD.md are run, and every file, folder and module that a page names exists.

A command stands in a fenced or indented block, or in backquotes. All name what exists, and those that a CPU runs in
seconds are run: one that is run gets arguments appended that make it small; one that is not run is listed in NOT_RUN
with the reason. A new command fails here until it is in one of the two.
"""

import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from support.quick_compiles import QUICK

from moe_jax.config.gin_files import parse_run_config
from moe_jax.config.run_config import bindable

ROOT = pathlib.Path(__file__).parents[1]
PROGRAMS = ("python", "bash", "sbatch", "kubectl", "pip", "ruff")
TINY = (
    "ModelConfig.layers = 1", "ModelConfig.model_dim = 16", "ModelConfig.heads = 2", "ModelConfig.hidden_dim = 16",
    "train.steps = 6", "train.batch_size = 8", "train.warmup_steps = 2", "train.loads_every = 2",
)  # fmt: skip
SMALL_RUN = tuple(f"--gin_bindings={binding}" for binding in TINY)

# What a command begins with, or holds: the words that are put behind it. The first that fits counts.
RUN = {
    "python -m moe_jax.train --gin_file=runs/mine/config.gin": (),  # of the run below
    "--dry_run": (),
    "python -m moe_jax.generate": ("--max_new_tokens=2",),  # of that run too
    "--workdir=runs/mine ": SMALL_RUN,
    "python -m moe_jax.train --gin_file": ("--dry_run",),  # the same program without its steps
    "python scripts/train_tokenizer.py": (),
    "python -m moe_jax.replay --trace=runs": (),
    "python -m moe_jax.reproduce --paper": ("--table=figure_12",),
}
NOT_RUN = {
    "python scripts/chat_data": "tests/training/test_chat.py runs it",
    "python scripts/show_chats": "needs the data; tests/data/test_chat.py reads what it shows",
    "python -m moe_jax.train --gin_file=configs/run/chat.gin": "needs the data; tests/training/test_chat.py trains it",
    "python -m moe_jax.generate --chat": "reads questions; tests/training/test_chat.py asks some",
    "bash scripts/demo.sh": "makes an environment and trains for minutes",
    "bash scripts/test.sh": "makes an environment and runs the tests",
    "pip ": "installs",
    "python -m moe_jax.watch": "serves until Ctrl-C; tests/observe/test_watch.py starts it",
    "python -m moe_jax.calibrate": "measures for a minute; tests/calibration tries it in tiny sizes",
    "python -m moe_jax.tune": "measures for twenty; tests/tuning runs the command",
    "python -m moe_jax.convert": "needs a published model; tests/huggingface converts small ones",
    "python -m moe_jax.train --gin_file=runs/olmoe/config.gin": "goes on from it; tests/huggingface trains one on",
    "python -m moe_jax.inspect": "needs the CUDA wheels, 2 GB; pytest -m gpu_compile compiles for GPUs",
    "python scripts/gpu_day": "needs a GPU; tests/gpu_day tries its items in tiny sizes",
}


# Where the pages are that are checked for what they name, and from where they name it.
TOP = ("configs", "docs", "moe_jax", "scripts", "tests")
BASES = ("", "moe_jax", "docs", "docs/bench", "scripts")  # a page names paths from these folders, and from its own
PAGES = ["README.md", "BUILD.md"] + sorted(
    str(path.relative_to(ROOT))
    for top in TOP
    for path in (ROOT / top).rglob("*")
    if path.suffix == ".gin" or path.name == "README.md" or path.suffix == ".md" and top == "docs"
)
MADE = re.compile(r"^(runs|out|DIR)/|(^|/)(?!README|BUILD)[A-Z]+\.\w+$|config\.gin$")  # by a run; capitals: any name
PAGES_OF_COMMANDS = [page for page in PAGES if page.endswith(".md")]


def commands_of(page):
    """Return the commands in the fenced and indented blocks of a page, continued lines joined, each without comment."""
    text = re.sub(r"```(?!bash|sh\b)\w+\n.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    fenced = re.findall(r"```(?:bash|sh)?\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"^ {4}.*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", "\n".join([*fenced, *indented])).splitlines()
    lines = [re.sub(r"\s+# .*", "", line).strip() for line in lines]
    return [line for line in lines if line.split(" ")[0] in PROGRAMS]


def quoted_commands_of(page):
    """Return the commands between backquotes, such as those of a table."""
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text(encoding="utf-8"))
    return [text for text in quoted if text.startswith(("python -m moe_jax", "python scripts/", "bash scripts/"))]


def program_of(command):
    """Return (file of the program whose flags the command gives, its other words)."""
    words = shlex.split(command)
    words = [word for word in words if word != "..."]
    if words[:2] == ["python", "-m"]:
        spec = importlib.util.find_spec(words[2])
        assert spec is not None and spec.origin, f"{command}: there is no module {words[2]}"
        path = pathlib.Path(spec.origin)
        return (path.with_name("__main__.py") if path.name == "__init__.py" else path), words[3:]
    scripts = [word for word in words[1:] if word.startswith("scripts/")]
    if words[0] in ("pip", "kubectl", "ruff") or not scripts:
        return None, words[1:]
    script = ROOT / scripts[0]
    passes_on = script.suffix != ".py" and "moe_jax.train" in script.read_text(encoding="utf-8")  # launchers, the demo
    rest = words[words.index(scripts[0]) + 1 :]
    return (ROOT / "moe_jax" / "train.py" if passes_on else script), rest


def check_words(command):
    """Fail where a command names a program, flag, config, binding or file that does not exist."""
    for word in shlex.split(command):
        if word.startswith(("scripts/", "tests/", "configs/", "requirements")):
            assert (ROOT / word).exists(), f"{command}: {word} does not exist"
    path, words = program_of(command)
    if path is None:
        return
    sources = path, ROOT / "moe_jax" / "config" / "command_line.py"  # which has flags of several commands
    source = "".join(file.read_text(encoding="utf-8") for file in sources)
    flags = re.findall(r'DEFINE_\w+\(\s*"(\w+)"', source) + re.findall(r'"--([\w-]+)"', source)
    given = [word.removeprefix("--").split("=", 1) for word in words if word.startswith("--")]
    for flag, *_ in given:
        known = flag in flags or f"--{flag}" in source
        assert known or flag == "help", f"{command}: {path.name} has no flag --{flag}"
    values = {
        name: [flag[1] for flag in given if flag[0] == name and len(flag) == 2] for name in ("gin_file", "gin_bindings")
    }
    # a run's own config.gin is there once the command before it has run
    files = [name for name in values["gin_file"] if not name.startswith(("runs/", "DIR"))]
    parse_run_config([str(ROOT / name) for name in files], values["gin_bindings"])


def added_words(command):
    """Return the words that make a command small, None where it is not run."""
    if any(command.startswith(beginning) for beginning in NOT_RUN):
        return None
    fitting = [words for part, words in RUN.items() if command.startswith(part) or part in f"{command} "]
    assert fitting, f"{command!r} is new: add how it is made small to RUN, or why it is not run to NOT_RUN"
    return fitting[0]


def run_command(command, folder):
    """Run a command with what makes it small, as a user would, but with every cache under `folder`."""
    words = [*shlex.split(command), *added_words(command)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XLA_FLAGS": QUICK,  # the tests' eight devices are the tests' own
    }
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("page", PAGES_OF_COMMANDS)
def test_commands_name_what_exists(page):
    commands = commands_of(page) + quoted_commands_of(page)
    for command in commands:
        check_words(command)
    if page in ("README.md", "BUILD.md"):
        assert len(commands) > 4
        for command in commands_of(page):
            added_words(command)


@pytest.mark.slow
def test_commands_run(tmp_path):
    """In the order of the pages, in one folder: a command may read what an earlier one wrote."""
    (tmp_path / "my_texts").mkdir()
    for name, stride in (("a.txt", 7), ("b.txt", 11)):
        text = " ".join(f"{(i * stride) % 97} apples" for i in range(2000))
        (tmp_path / "my_texts" / name).write_text(text, encoding="utf-8")
    commands = dict.fromkeys(commands_of("README.md") + commands_of("BUILD.md"))
    outputs = {command: run_command(command, tmp_path) for command in commands if added_words(command) is not None}
    (trained,) = (out for command, out in outputs.items() if added_words(command) == SMALL_RUN)
    assert "held-out loss" in trained and "unigram entropy" in trained
    assert any("step 6: held-out loss" in out for out in outputs.values())
    assert any("over EP   speed-up" in out for out in outputs.values())
    assert (tmp_path / "tokenizer.json").exists()


def paths_in(text):
    """Return the paths of this repository that a text names: source files, folders, and targets of links."""
    text = re.sub(r"https?://\S+|~/\S+", "", text)
    words = {word.rstrip(".-") for word in re.findall(r"(?<![\w./=])[\w*-][\w.*-]*(?:/[\w.*-]+)*", text)}
    named = {word for word in words if re.search(r"\w\.(py|sh|md|gin|ipynb|sbatch)$", word)}
    named |= {word for word in words if "/" in word and word.split("/")[0] in TOP}
    named |= set(re.findall(r"`([\w./-]+/)`", text)) | set(re.findall(r"\]\(([^):#]+)", text))
    return sorted(word for word in named if not MADE.search(word))


def path_exists(word, page):
    """Return whether a page's path is there; outside the packages' READMEs a bare name may be of any folder."""
    if "/" not in word and page.count("/") < 3 and not page.startswith("moe_jax"):
        return (ROOT / word).exists() or any(next((ROOT / top).rglob(word), None) for top in TOP)
    folders = [(ROOT / page).parent, *(ROOT / base for base in BASES)]
    return any(next(folder.glob(word), None) if "*" in word else (folder / word).exists() for folder in folders)


def module_exists(name):
    """Return whether `moe_jax.a.b` is a module, a package, or a name that stands in the last of them."""
    place, rest = ROOT / "moe_jax", name.split(".")[1:]
    while rest and (place / rest[0]).is_dir():
        place = place / rest.pop(0)
    file = place / "__init__.py"
    if rest and (place / f"{rest[0]}.py").exists():
        file = place / f"{rest.pop(0)}.py"
    return not rest or re.search(rf"\b{rest[0]}\b", file.read_text(encoding="utf-8")) is not None


def missing_in(text, page):
    """Return what a text names that does not exist: paths, modules, bindings, headings that links point to."""
    missing = [word for word in paths_in(text) if not path_exists(word, page)]
    missing += [name for name in re.findall(r"\bmoe_jax(?:\.\w+)+", text) if not module_exists(name)]
    known = bindable()
    for name, field in re.findall(rf"(?<![\w/])({'|'.join(known)})\.(\w+)", text):
        if field not in known[name]:
            missing.append(f"{name}.{field}")
    for target, heading in re.findall(r"\]\(([^):#]+)#([^)]+)\)", text):
        headings = re.findall(r"^#+ (.*)", ((ROOT / page).parent / target).read_text(encoding="utf-8"), re.MULTILINE)
        if heading not in {re.sub(r"[^\w -]", "", entry.lower()).replace(" ", "-") for entry in headings}:
            missing.append(f"{target}#{heading}")
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page):
    missing = missing_in((ROOT / page).read_text(encoding="utf-8"), page)
    assert not missing, f"{page} names what is not there: {', '.join(missing)}"


def test_the_architecture_names_every_package():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = [path.parent.relative_to(ROOT / "moe_jax") for path in (ROOT / "moe_jax").rglob("*/__init__.py")]
    assert len(packages) > 10 and [name for name in packages if f"| `{name.as_posix()}/` |" not in text] == []


@pytest.mark.parametrize("script", ["reference", "draw_architecture"])
def test_what_a_script_writes_is_up_to_date(script):
    path = ROOT / "scripts" / "checks" / f"{script}.py"
    done = subprocess.run([sys.executable, path, "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"run python scripts/checks/{script}.py\n{done.stderr}"


def test_every_flag_of_the_trainer_is_named():
    page = (ROOT / "BUILD.md").read_text(encoding="utf-8")
    sources = ROOT / "moe_jax" / "train.py", ROOT / "moe_jax" / "config" / "command_line.py"
    source = "".join(path.read_text(encoding="utf-8") for path in sources)
    flags = re.findall(r"flags\.DEFINE_\w+\(\s*\"(\w+)\"", source)
    assert len(flags) > 15
    assert [flag for flag in flags if f"`--{flag}" not in page] == []
