"""What a run does with a folder that something else has damaged, renamed or taken."""

import json
import logging
import os
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_run import arrays_of, assert_same_run, command, finish, finish_pair, run_here, start, start_pair

from moe_jax.errors import NonFiniteError, UserError
from moe_jax.models.language_model import flatten
from moe_jax.observe.metrics_file import read_metrics
from moe_jax.storage.checkpoint import Checkpointer
from moe_jax.training import loop
from moe_jax.training.stepper import Stepper

FLAT = ("train.learning_rate = 1e-3", "train.final_learning_rate = 1.0", "train.warmup_steps = 0")
SAVING = (*FLAT, "train.checkpoint_every = 1", "train.keep_checkpoints = 9")


def largest_file(folder):
    """The data file, which holds the arrays."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path, place=0.5):
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 4
    path.write_bytes(data)


def zero_half(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


# What happens to a checkpoint: folder -> None.
DAMAGES = {
    "bit_flipped": lambda folder: flip(largest_file(folder)),
    "half_zeroed": lambda folder: zero_half(largest_file(folder)),
    "data_cut": lambda folder: cut(largest_file(folder)),
    "data_gone": lambda folder: largest_file(folder).unlink(),
    "metadata_cut": lambda folder: cut(folder / "_METADATA"),
    "metadata_changed": lambda folder: (folder / "_METADATA").write_text(
        (folder / "_METADATA").read_text().replace('"position": 7', '"position": 8')
    ),
    "metadata_gone": lambda folder: (folder / "_METADATA").unlink(),
    "manifest_flipped": lambda folder: flip(folder / "manifest.ocdbt"),
    "manifest_cut": lambda folder: cut(folder / "manifest.ocdbt"),
    "manifest_gone": lambda folder: (folder / "manifest.ocdbt").unlink(),
    "empty": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "metadata_nested": lambda folder: (folder / "_METADATA").write_text('{"custom_metadata": ' + "[" * 10**5),
    "metadata_a_pipe": lambda folder: ((folder / "_METADATA").unlink(), os.mkfifo(folder / "_METADATA")),
    "renamed": lambda folder: (shutil.rmtree(folder), shutil.copytree(folder.parent / "00000001", folder)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 1 and 2, whose large leaf is in eight pieces."""
    folder = tmp_path_factory.mktemp("saved")
    mesh = jax.make_mesh((8,), ("expert",))
    places = [jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("expert",), ())]
    state = {
        "w": jax.device_put(jnp.arange(64 * 64.0).reshape(64, 64), places[0]),
        "count": jax.device_put(7, places[1]),
    }
    checkpointer = Checkpointer(folder, keep=3)
    for step in (1, 2):
        checkpointer.save(step, state, {}, {"position": 7})
    checkpointer.close()
    return folder, state


def restored(folder, like):
    """The (step, state) that a run goes on from, which sets aside what it passed over."""
    checkpointer, step, state = Checkpointer(folder, keep=3), None, None
    while state is None:
        step = checkpointer.latest(step)
        try:
            state, host = checkpointer.restore(step, like, {}), checkpointer.read_host(step)
        except UserError as error:
            logging.warning("%s", error)
    assert host == {"position": 7}
    checkpointer.set_aside(step)
    return step, state


@pytest.mark.parametrize(("damage", "mesh"), [(damage, (8, 2)[at % 2]) for at, damage in enumerate(DAMAGES)])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(saved, tmp_path, caplog, damage, mesh):
    source, state = saved
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    DAMAGES[damage](tmp_path / "00000002")
    mesh = jax.make_mesh((mesh,), ("expert",), devices=jax.devices()[:mesh])
    like = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, leaf.sharding.spec))
        for name, leaf in state.items()
    }
    step, found = restored(tmp_path, like)
    assert step == 1 and all((found[name] == np.asarray(state[name])).all() for name in state)
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.match(r"checkpoint \S+/00000002 is damaged \(.*\); ", line) and "\n" not in line and len(line) < 500
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002.damaged"]


# A whole run, and copies of its folder.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("run")
    assert run_here(folder, folder / "whole", *SAVING)
    return folder


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(whole, capsys):
    work = whole / "parts #1?%41"
    shutil.copytree(whole / "whole", work)
    checkpoints = work / "checkpoints"
    shutil.rmtree(checkpoints / "00000006")
    flip(largest_file(checkpoints / "00000005"))
    zero_half(largest_file(checkpoints / "00000004"))
    cut(checkpoints / "00000003" / "_METADATA")
    (checkpoints / "00000013").mkdir()
    shutil.copytree(checkpoints / "00000002", checkpoints / "99999999")
    assert run_here(whole, work, *SAVING)
    out = capsys.readouterr().out
    assert "resuming at step 2" in out and out.count("is damaged") == 2, out
    assert ", step 2 of 6, " in out and out.count("; compiling the step") == 1  # and nothing says that it goes on at 5
    assert_same_run(whole / "whole", work, 6)
    damaged = {f"{step:08d}.damaged" for step in (3, 4, 5, 13, 99999999)}
    assert damaged <= set(os.listdir(checkpoints))
    # down to none: nothing is trained from the start, however often the command is given
    for step in range(1, 7):
        cut(largest_file(checkpoints / f"{step:08d}"))
    for _ in range(2):
        with pytest.raises(UserError, match="no checkpoint of .* is whole, of 6; put one back from a copy"):
            run_here(whole, work, *SAVING, "train.steps = 7")


@pytest.mark.slow
def test_damage_that_one_of_two_processes_meets_sends_both_to_the_one_before(tmp_path):
    work, steps = tmp_path / "work", ("train.steps = 3", "train.steps = 5")
    assert [code for code, *_ in finish_pair(start_pair(command(tmp_path, work, *SAVING, steps[0])))] == [0, 0]
    flip(largest_file(work / "checkpoints" / "00000003" / "ocdbt.process_1"))
    done = finish_pair(start_pair(command(tmp_path, work, *SAVING, steps[1])))
    assert [code for code, *_ in done] == [0, 0], done
    assert done[0][1].count("00000003 is damaged") == 1 and "resuming at step 2" in done[0][1]
    assert [record["step"] for record in read_metrics(work)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_state_that_is_not_finite_pushes_out_no_finite_one(whole, monkeypatch):
    """One moment is NaN after step 3: that step's loss and gradients are finite, and all later ones may be skipped."""
    dispatch = Stepper.dispatch

    def poisoned(self, *arguments):
        dispatch(self, *arguments)
        if self.step == 3:
            leaves, tree = jax.tree.flatten(self.state)
            places = [index for index, name in enumerate(flatten(self.state)) if "/nu/" in name]
            leaves[places[-1]] *= np.float32(np.nan)
            self.state = jax.tree.unflatten(tree, leaves)

    monkeypatch.setattr(Stepper, "dispatch", poisoned)
    changes = (*SAVING, "train.keep_checkpoints = 1", "train.max_skipped_steps = 20")
    words = r"step 3: 'opt_state/\S*nu\S*' is the first leaf .* not saved; the checkpoint of step 2 is the last finite"
    with pytest.raises(NonFiniteError, match=words):
        run_here(whole, whole / "poisoned", *changes)
    checkpoints = Checkpointer(whole / "poisoned" / "checkpoints", keep=1)
    assert checkpoints.steps() == [2]
    assert all(np.isfinite(leaf).all() for leaf in checkpoints.read_arrays(2).values())
    with monkeypatch.context() as blind:
        blind.setattr(loop, "build_local_finite", lambda *_: lambda leaves: jnp.ones((1, len(leaves)), bool))
        assert run_here(whole, whole / "poisoned", *changes, "train.steps = 3")
    with pytest.raises(NonFiniteError, match="step 3: 'opt_state/.* move the checkpoint of this step away"):
        run_here(whole, whole / "poisoned", *changes)


def remove(folder):
    while folder.exists():  # a writer may put something in meanwhile
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_whose_folder_goes_writes_all_again(whole, tmp_path, monkeypatch):
    """No save is under way then: orbax awaits the first of several leaves that fail, and others end in warnings."""
    work, dispatch, evaluate, save = tmp_path / "work", Stepper.dispatch, loop.Loop.evaluate, Checkpointer.save
    events = {
        1: lambda: remove(work / "checkpoints"),
        3: lambda: (
            [remove(work / name) for name in ("checkpoints", "loads")] + [(work / "lock.json").unlink()]
        ),  # half of `rm -rf`
        4: lambda: remove(work),
        6: lambda: remove(work),  # after the last save
    }

    def dispatched(self, *arguments):
        dispatch(self, *arguments)
        if self.step < 6 and self.step in events:
            events.pop(self.step)()

    def evaluated(self):
        evaluate(self)
        if self.stepper.step in events:
            events.pop(self.stepper.step)()

    def saved(self, *arguments):
        save(self, *arguments)
        self._writer.wait_until_finished()

    monkeypatch.setattr(Checkpointer, "save", saved)
    monkeypatch.setattr(Stepper, "dispatch", dispatched)
    monkeypatch.setattr(loop.Loop, "evaluate", evaluated)
    assert run_here(whole, work, *SAVING) and not events
    want, found = arrays_of(whole / "whole", 6), arrays_of(work, 6)
    assert want.keys() == found.keys() and all(np.array_equal(want[name], found[name]) for name in want)
    assert (work / "config.gin").read_bytes() == (whole / "whole" / "config.gin").read_bytes()
    assert json.loads((work / "lock.json").read_text())["released"]


# Two jobs, one folder.


def wait_until(is_so, process, seconds=180):
    end = time.monotonic() + seconds
    while not is_so():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(process.communicate())
        time.sleep(0.05)


def test_a_second_command_on_a_folder_is_refused_before_it_trains(tmp_path):
    """And the first ends in one line when it finds another's record, as after a long sleep."""
    work = tmp_path / "work"
    first = start(command(tmp_path, work, "train.steps = 100000", "train.checkpoint_every = 0"))
    wait_until((work / "lock.json").exists, first)
    code, out, err = finish(start(command(tmp_path, work)))
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and f"is held by process {first.pid} on " in line and "step" not in out, err
    wait_until(lambda: len(read_metrics(work)) >= 3, first)
    (work / "lock.json").write_text('{"host": "far", "pid": 5, "id": "later"}')
    began = time.monotonic()
    code, out, err = finish(first, 120)
    assert code == 2 and err.count("is held by process 5 on far; wait") == 1 and time.monotonic() - began < 6, err
    steps = [record["step"] for record in read_metrics(work)]
    assert steps == list(range(1, len(steps) + 1))
