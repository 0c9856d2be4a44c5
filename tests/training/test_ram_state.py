"""A killed run goes on from the memory of its hosts, its own or another's, before the disk, and loses few steps."""

import pathlib
import re
import shutil

import numpy as np
import pytest
from support.tiny_run import (
    arrays_of,
    assert_same_run,
    command,
    finish_pair,
    run_here,
    session_of,
    start_pair,
)

from moe_jax.errors import UserError
from moe_jax.models.language_model import flatten
from moe_jax.recovery.copies import read_history
from moe_jax.training.bank_order import copied, described_for_file, shapes_in_file
from moe_jax.training.hosts import Hosts
from moe_jax.training.ram_state import RamCopies, bytes_of_hosts, layout, partners

EVERY = 4
FLAT = ("train.learning_rate = 1e-3", "train.final_learning_rate = 1.0", "train.warmup_steps = 0")
RUN = (*FLAT, f"train.copy_every = {EVERY}", "train.checkpoint_every = 10", "train.steps = 20")
WORKER = pathlib.Path(__file__).with_name("ram_state_worker.py")


def memories(work):
    return [work.with_name(f"{work.name}_memory_{index}") for index in range(2)]


def start_job(folder, work, *changes, killed_after=None):
    """Start two processes on two hosts, as NCCL would name them, each with memory of its own."""
    changed = [{"NCCL_HOSTID": f"host {i}", "MOE_JAX_COPIES": str(memory)} for i, memory in enumerate(memories(work))]
    programs = f"--compilation_cache={folder / 'programs'}"
    python, *arguments = command(folder, work, *RUN, *changes, devices=1, flags=[programs])
    killed = [WORKER, str(killed_after), *arguments[2:]]
    return start_pair([python, *(arguments if killed_after is None else killed)], changed)


def said_by(done):
    return "\n".join(f"{out}{err}" for _, out, err in done)


def flip_all(memory):
    """Change a bit of each copy's first piece."""
    for path in memory.glob("*/*.[01]"):
        with open(path, "r+b") as file:
            (byte,) = file.read(1)
            file.seek(0)
            file.write(bytes([byte ^ 4]))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run that was killed three times, and what it said when it came back; another that nothing disturbed.

    After the first and the second kill a host's memory is gone, with no step of a copy in between.
    """
    folder = tmp_path_factory.mktemp("killed")
    whole, work, said = folder / "whole", folder / "work", []
    done = finish_pair(start_job(folder, whole, "train.checkpoint_every = 4", "train.keep_checkpoints = 9"))
    assert [code for code, *_ in done] == [0, 0], done
    said.append(said_by(done))
    for step, lost in ((13, 1), (14, 0), (17, None)):
        done = finish_pair(start_job(folder, work, killed_after=step))
        assert {code for code, *_ in done} <= {-9, 4} and -9 in {code for code, *_ in done}, done
        said.append(said_by(done))
        if lost is not None:
            shutil.rmtree(memories(work)[lost])
    shutil.copytree(memories(work)[0], folder / "memory")
    for memory in memories(work):
        flip_all(memory)
    done = finish_pair(start_job(folder, work))
    assert [code for code, *_ in done] == [0, 0], done
    return folder, [*said, said_by(done)]


def test_a_killed_run_goes_on_from_own_memory_then_the_partners_then_the_disk(killed):
    folder, (undisturbed, _, partners, again, disk) = killed
    assert re.search(r"resuming at step 12 from own RAM \(.*\), RAM of process 0 \(\S+\) \(.*B\)\n", partners), partners
    assert re.search(r"resuming at step 12 from own RAM \(.*\), RAM of process 1 \(\S+\) \(.*B\)\n", again), again
    assert disk.count("CRC differs") >= 4 and disk.count("is damaged") == 2, disk
    assert "resuming at step 10 from disk\n" in disk
    assert "resuming" not in undisturbed
    assert re.search(r"4 copies in RAM of \S+ ?\w*B each: \S+ ?\w*B/s, .* CPU seconds", undisturbed), undisturbed


def test_kills_change_no_bit_of_what_is_trained(killed):
    folder, _ = killed
    assert_same_run(folder / "whole", folder / "work", 20)
    assert not any(path.is_file() for memory in memories(folder / "work") for path in memory.rglob("*"))


@pytest.mark.parametrize("devices", [1, 8])
def test_copies_of_two_processes_are_read_by_one_on_another_mesh(killed, monkeypatch, devices):
    folder, _ = killed
    monkeypatch.setenv("MOE_JAX_COPIES", str(folder / "memory"))
    history = read_history(folder / "work" / "run.json")
    history["starts"] = history["starts"][:-1]  # before the run went on from the disk
    copies, session = RamCopies(history, 10, Hosts()), session_of(folder, devices)
    assert copies.latest() == 16 and copies.latest(below=16) == 12
    state, host = copies.restore(16, session.abstract_state(), session.home)
    want = arrays_of(folder / "whole", 16)
    got = copied(state, session.home, lambda _, leaf: np.asarray(leaf))
    assert got.keys() == want.keys()
    for name, leaf in flatten(session.abstract_state()).items():
        assert flatten(state)[name].sharding == leaf.sharding
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert host["data"]["step"] == 16 and "copy_every" in host["config"]


# Who keeps what.


UNEVEN = "MoEConfig.num_experts = 12"  # on eight devices


@pytest.mark.parametrize("mesh", ["MeshConfig.data = 2", "MeshConfig.expert_shard = 2", "MeshConfig.model = 2", UNEVEN])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_each_expert_and_each_other_leaf_is_kept_on_two_hosts(tmp_path, mesh, zero):
    """Eight processes of a device each on four hosts; what a host loses, the others have, to the last element."""
    session = session_of(tmp_path, 8, f"train.zero_stage = {zero}", "MoEConfig.num_experts = 16", mesh)
    leaves = described_for_file(flatten(session.abstract_state()), session.home)
    host_ids = [f"host {process // 2}" for process in range(8)]
    shapes = shapes_in_file(leaves, session.home)
    kept = layout(leaves, shapes, lambda device: (device, host_ids[device]), 8)
    holders = {name: np.zeros((4, *shape), int) for name, shape in shapes.items()}
    assert (shapes != {name: leaf.shape for name, leaf in leaves.items()}) == (mesh == UNEVEN)
    stored = [0] * 4
    for process, (pieces, partner) in enumerate(zip(kept, partners(host_ids), strict=True)):
        for piece in pieces:
            leaf, at = leaves[piece.name], tuple(slice(*bounds) for bounds in piece.bounds)
            parts = leaf.sharding.devices_indices_map(leaf.shape)[session.devices[piece.device]]
            parts = [part.indices(size)[:2] for part, size in zip(parts, leaf.shape, strict=True)]
            assert tuple(parts) == piece.bounds and piece.device == process
            assert all(stop <= size for (_, stop), size in zip(piece.bounds, shapes[piece.name], strict=True))
            for holder in (process, *([partner] if piece.sent else [])):
                holders[piece.name][holder // 2, *at] += 1
                stored[holder // 2] += 2 * piece.nbytes
    for name, held in holders.items():
        assert held.max() == 1 and held.sum(axis=0).min() >= 2, name
    replicated = zero == 0 and mesh == "MeshConfig.data = 2"  # four devices, and two hosts, hold each replica
    assert any(piece.sent for pieces in kept for piece in pieces) != replicated
    if zero < 3:  # what all hosts hold, both processes of each keep by turns
        assert all(any(not piece.sent for piece in pieces) for pieces in kept)
    assert bytes_of_hosts(kept, host_ids) == {f"host {host}": count for host, count in enumerate(stored)}


def test_partners_are_on_the_next_host():
    assert partners(["a", "a", "b", "b", "c"]) == [2, 3, 4, 4, 0]
    assert partners(["a", "a"]) == [None, None]


# What goes wrong.


def test_more_than_half_of_the_memory_ends_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_JAX_COPIES", str(tmp_path / "memory"))
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 300_000}[name])
    words = r"need \S+ bytes on this host, more than half of this host's RAM: 150,000; .*copy_every = 0"
    with pytest.raises(UserError, match=words):
        run_here(tmp_path, tmp_path / "work", "train.copy_every = 2")


def test_a_full_memory_is_said_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MOE_JAX_COPIES", str(tmp_path / "memory"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert run_here(tmp_path, tmp_path / "work", "train.copy_every = 1")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no copy of step" in line]
    assert "step 1 in RAM: RAM of process 0" in line and "No space left on device" in line and "copies go off" in line
    assert not list((tmp_path / "memory").rglob("*.[01]"))
