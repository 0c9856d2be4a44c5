"""A checkpoint gives back every bit, on any mesh; is whole or absent; and says in one line why it will not do."""

import contextlib
import json
import os
import re
import resource
import shutil
import sys
import zlib

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from support import checkpoint_states as states
from support.tiny_run import finish_pair, start_pair

from moe_jax.errors import UserError
from moe_jax.models.language_model import flatten
from moe_jax.storage.bank_order import home_of, to_file
from moe_jax.storage.checkpoint import Checkpointer


@pytest.fixture(scope="module")
def here():
    """Eight devices, expert-parallel."""
    return states.abstract(1, 8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, here):
    """A folder with the checkpoint of step 1, written by eight devices whose experts live anywhere."""
    folder = tmp_path_factory.mktemp("saved")
    home = states.homes(8, seed=1)
    checkpointer = Checkpointer(folder, keep=3)
    checkpointer.save(1, states.state(here, home), home, states.HOST)
    checkpointer.close()
    return folder


def small_state(here, rows=8):
    """A state of one leaf in one piece, for what does not depend on the model."""
    return {"w": jax.device_put(jnp.ones((rows, 2), jnp.float32), here["step"].sharding)}


def abstract_of(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


# Every bit comes back.

# data, expert, ZeRO stage, seed of the homes (None: plain expert parallelism), schedule
MESHES = {
    "same_mesh_and_homes": (1, 8, 1, 1, "deepspeed"),
    "ep4_data2_zero3": (2, 4, 3, 3, "deepspeed"),
    "dp8_zero3": (8, 1, 3, None, "dp"),
    "one_device": (1, 1, 1, None, "deepspeed"),
}


@pytest.mark.parametrize("case", MESHES)
def test_restore_gives_back_every_bit(saved, case):
    data, expert, zero, seed, schedule = MESHES[case]
    there, home = states.abstract(data, expert, zero=zero, schedule=schedule), states.homes(expert, seed)
    reader = Checkpointer(saved, keep=3)
    state, host = reader.restore(1, there, home), reader.read_host(1)
    states.assert_state(state, there, home)
    assert host == states.HOST


@pytest.mark.parametrize("devices, seed", [(3, None), (5, 1)])
def test_any_count_of_devices_writes_and_reads_the_same_file(saved, tmp_path, devices, seed):
    there, home = states.abstract(1, devices), states.homes(devices, seed)
    reader = Checkpointer(saved, keep=3)
    state, host = reader.restore(1, there, home), reader.read_host(1)
    states.assert_state(state, there, home)
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, state, home, host)
    checkpointer.close()
    assert checkpointer.digest(1) == Checkpointer(saved, keep=3).digest(1)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax_alone:
        arrays, same = checkpointer.read_arrays(1), orbax_alone.restore(tmp_path / "00000001")
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: array.tobytes() for name, array in same.items()
    }
    four, at_four = states.abstract(1, 4), states.homes(4)
    states.assert_state(Checkpointer(tmp_path, keep=1).restore(1, four, at_four), four, at_four)


def test_a_checkpoint_of_the_format_before_is_read(here, tmp_path):
    home = states.homes(8)
    state = states.state(here, home)
    leaves = {name: leaf if home_of(name, home) is None else to_file(leaf, home["segment_0"])
              for name, leaf in flatten(state).items()}  # fmt: skip
    record = {"format": "moe_jax checkpoint 1", "step": 7, "host": states.HOST}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as writer:
        writer.save(tmp_path / "00000007", args=ocp.args.PyTreeSave(leaves, custom_metadata=record))
    reader = Checkpointer(tmp_path, keep=1)
    restored, host = reader.restore(7, here, home), reader.read_host(7)
    states.assert_state(restored, here, home)
    assert host == states.HOST


# Whole or absent, and enough of them.


def test_save_keeps_the_newest(here, tmp_path):
    checkpointer = Checkpointer(tmp_path / "new" / "checkpoints", keep=2)
    assert checkpointer.latest() is None
    for step in (3, 6, 9):
        checkpointer.save(step, small_state(here), {}, {"step": step})
        assert checkpointer.latest() in (step - 3 or None, step)
    checkpointer.wait()
    assert checkpointer.steps() == [6, 9]
    assert [checkpointer.read_host(step)["step"] for step in (6, 9)] == [6, 9]
    checkpointer.close()


def test_unfinished_checkpoints_do_not_count_and_go_with_the_next_save(here, tmp_path):
    for name in ("00000009.orbax-checkpoint-tmp", "00000003.deleted", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("half")
    assert Checkpointer(tmp_path, keep=1).latest() is None
    assert len(os.listdir(tmp_path)) == 3, "a reader deletes nothing"
    writer = Checkpointer(tmp_path, keep=1)
    writer.save(9, small_state(here), {}, {})
    with pytest.raises(UserError, match="00000009 exists already; move it away"):
        writer.save(9, small_state(here), {}, {})
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["00000009", "notes"]


# A disk that will not.


@pytest.fixture
def checkpointer(here, tmp_path):
    """The checkpoints of a folder, of which one is there."""
    checkpointer = Checkpointer(tmp_path, keep=2)
    checkpointer.save(1, small_state(here), {}, {})
    checkpointer.wait()
    yield checkpointer
    checkpointer.close()


def test_disk_that_fails_while_writing(checkpointer, here, tmp_path):
    """The writer's thread meets a real limit of the operating system: no file may grow beyond 4 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        checkpointer.save(2, small_state(here, rows=8000), {}, {})
        with pytest.raises(UserError, match=r"cannot write .*00000002 \(File too large\); check .*step 1 is kept"):
            checkpointer.save(3, small_state(here), {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpointer.latest() == 1
    checkpointer.restore(1, abstract_of(small_state(here)), {})
    checkpointer.save(4, small_state(here), {}, {})
    checkpointer.wait()
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000004"]


# Another model.


def test_restore_refuses_another_model(saved, here):
    def refusal(abstract_tree):
        with pytest.raises(UserError) as error:
            Checkpointer(saved, keep=3).restore(1, abstract_tree, states.homes(8))
        return str(error.value)

    assert refusal(states.abstract(1, 8, hidden_dim=64)) == (
        f"checkpoint {saved}/00000001 is not of this model: opt_state/1/0/mu/bank/segment_0/w_in is float32 [2, 8, "
        "16, 32] in the checkpoint and float32 [2, 8, 16, 64] in this run (and 5 more leaves differ); use the model, "
        "optimizer and tokenizer that it was trained with, or another --workdir"
    )
    wanted = "mu/bank/segment_0/w_gate is absent in the checkpoint and float32 [2, 8, 16, 32] in this run"
    assert wanted in refusal(states.abstract(1, 8, activation="swiglu"))
    dense = {name: leaf for name, leaf in here["params"]["dense"].items() if name != "embedding"}
    wanted = r"params/dense/embedding/\w+ is float32 .* in the checkpoint and absent in this run"
    assert re.search(wanted, refusal({**here, "params": {**here["params"], "dense": dense}}))
    half = jax.tree.map(  # orbax alone would cast without a word
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding), here["params"]["bank"]
    )
    params = {**here["params"], "bank": half}
    wanted = "params/bank/segment_0/w_in is float32 [2, 8, 16, 32] in the checkpoint and bfloat16 ["
    assert wanted in refusal({**here, "params": params})
    with pytest.raises(UserError, match="params/bank/segment_0/w_in is float32 .* and bfloat16"):
        Checkpointer(saved, keep=3).restore(1, params, states.homes(8), "params")


def test_restore_names_a_checkpoint_that_cannot_be_read(here, tmp_path):
    state = small_state(here)
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        checkpointer.save(step, state, {}, {})
    checkpointer.close()
    with pytest.raises(UserError, match=r"has no finished checkpoint of step 7, only \[1, 2\]"):
        checkpointer.restore(7, abstract_of(state), {})
    for arrays in (tmp_path / "00000001").rglob("d"):
        shutil.rmtree(arrays)
    assert checkpointer.read_host(1) == {}, "needs no array"
    with pytest.raises(UserError, match=r"checkpoint .*00000001 is damaged \(.*\); move it away"):
        checkpointer.restore(1, abstract_of(state), {})
    for text in ("{}", "", '{"custom_metadata": null}'):
        (tmp_path / "00000002" / "_METADATA").write_text(text)
        with pytest.raises(UserError, match=r"checkpoint .*00000002 is damaged \(.*\); move it away"):
            checkpointer.read_host(2)
    record = {"format": "moe_jax checkpoint 9", "step": 2}
    record["crc32"] = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    (tmp_path / "00000002" / "_METADATA").write_text(json.dumps({"custom_metadata": record}))
    with pytest.raises(UserError, match="has format 'moe_jax checkpoint 9', but this program reads"):
        checkpointer.restore(2, abstract_of(state), {}, "params")


# Two processes.


def test_two_processes_share_a_checkpoint(saved, tmp_path):
    """Two processes restore what one wrote, save, and donate; one process restores what two wrote."""
    folder = tmp_path / "shared"
    shutil.copytree(saved, folder)
    done = finish_pair(start_pair([sys.executable, states.__file__, str(folder)]))
    assert [code for code, *_ in done] == [0, 0] and "['00000003', '00000004']" in done[0][1], done
    there, home = states.abstract(1, 8), states.homes(8)
    reader = Checkpointer(folder, keep=2)
    restored, host = reader.restore(4, there, home), reader.read_host(4)
    states.assert_state(restored, there, home)
    assert host == states.HOST


@pytest.mark.parametrize("event", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("other"))])
def test_a_save_that_goes_with_its_folder_is_told_and_the_next_one_is_whole(here, tmp_path, event):
    folder, state = tmp_path / "checkpoints", small_state(here, rows=100_000)
    checkpointer = Checkpointer(folder, keep=2)
    for step in (1, 2):
        checkpointer.save(step, state, {}, {})
        while folder.exists() and step == 1:  # in the middle of writing
            with contextlib.suppress(OSError):
                event(folder)
        assert checkpointer.wait() == (step == 2)
    checkpointer.close()
    assert checkpointer.steps() == [2] and (checkpointer.read_arrays(2)["w"] == 1).all()
