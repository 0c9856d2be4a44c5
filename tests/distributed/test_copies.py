"""Copies in memory: files that are whole or do not count, connections between hosts, and whose history wins."""

import os
import resource
import socket
import threading
import types

import pytest

from moe_jax.errors import UserError
from moe_jax.recovery.copies import (
    CopyFolder,
    CopyServer,
    Link,
    folder_for,
    next_epoch,
    note_start,
    read_history,
    why_not_current,
)
from moe_jax.training.ram_state import Piece, RamCopies

KEY, RUN = b"k" * 32, "ab" * 8
PIECES = [b"first" * 100_000, b"", b"third" * 7]


def header_of(step, pieces=PIECES, process=3, epoch=2, layout=7):
    regions, offset = [], 0
    for index, piece in enumerate(pieces):
        regions.append([f"leaf {index}", [[0, len(piece)]], offset, len(piece), 0])
        offset += len(piece)
    leaves = {f"leaf {index}": ["uint8", [len(piece)]] for index, piece in enumerate(pieces)}
    header = {"epoch": epoch, "step": step, "process": process, "layout": layout, "leaves": leaves, "regions": regions}
    return {**header, "host": {"a": 1}}


@pytest.fixture
def folder(tmp_path):
    return CopyFolder(tmp_path / "memory" / RUN, RUN)


def steps(folder):
    return sorted(header["step"] for header in folder.headers().values())


def contents(source, name, header):
    return [bytes(source.read(name, region)) for region in header["regions"]]


# Files.


def test_two_generations_and_the_newest_that_all_have_stays(folder):
    for step, keep, held in [(4, None, [4]), (8, 4, [4, 8]), (12, 8, [8, 12]), (16, 8, [8, 16]), (20, 16, [16, 20])]:
        name = folder.write(header_of(step), [*PIECES[:2], b"%07d" % step * 5], keep and [keep, 7])
        assert steps(folder) == held, step
        assert contents(folder, name, folder.headers()[name]) == [*PIECES[:2], b"%07d" % step * 5]
    assert sorted(os.listdir(folder.path)) == ["3.0", "3.0.json", "3.1", "3.1.json"]
    assert os.stat(folder.path).st_mode & 0o077 == 0
    folder.forget(2, [20, 7])
    assert steps(folder) == [16, 20]
    folder.forget(3, [20, 7])  # of the epoch that went on from it
    assert steps(folder) == [20]
    with pytest.raises(OSError, match="a later start of the run has copies there"):
        folder.write(header_of(24, epoch=1), PIECES, None)
    assert steps(folder) == [20]
    assert CopyFolder(folder.path, "another run").headers() == {}


def test_of_two_copies_of_a_step_the_one_that_was_gone_on_from_stays(folder):
    """Epoch 3 went on from epoch 2's copy of step 4 and ended while it made its own; epoch 4 begins with the same."""
    for layouts, stays in (((7, 9), 2), ((9, 7), 3), ((7, 7), 3)):
        for epoch, layout in zip((2, 3), layouts, strict=True):
            folder.write(header_of(4, epoch=epoch, layout=layout), PIECES, [4, 7])
        folder.write(header_of(4, epoch=4), PIECES, [4, 7])
        assert sorted(header["epoch"] for header in folder.headers().values()) == [stays, 4], layouts
        folder.forget(4, None)
        assert [header["epoch"] for header in folder.headers().values()] == [4]
        folder.remove()
        folder.path.mkdir()


def test_no_flipped_bit_of_a_copy_is_read(folder):
    name = folder.write(header_of(4, [b"abcdefgh", b"ijk"]), [b"abcdefgh", b"ijk"], None)
    whole, header = (folder.path / name).read_bytes(), folder.headers()[name]
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        (folder.path / name).write_bytes(changed)
        with pytest.raises(ValueError, match="CRC differs"):
            contents(folder, name, header)
    (folder.path / name).write_bytes(whole[:-1])
    assert folder.headers() == {}
    (folder.path / name).write_bytes(whole)
    said = (folder.path / f"{name}.json").read_bytes()
    for place in range(len(said)):
        changed = bytearray(said)
        changed[place] ^= 1 << place % 7
        (folder.path / f"{name}.json").write_bytes(changed)
        assert folder.headers() in ({}, {name: header}), place  # a blank may be another blank
    (folder.path / f"{name}.json").write_bytes(said[:-1])
    assert folder.headers() == {}


def test_a_full_memory_is_an_error_that_leaves_the_newest_copy(folder):
    """A real limit of the operating system, met before anything is written."""
    folder.write(header_of(4, [b"small"]), [b"small"], None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.write(header_of(8), PIECES, [4, 7])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir(folder.path)) == ["3.0", "3.0.json"] and steps(folder) == [4]


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match="no copies can be kept in .* another user's.*MOE_JAX_COPIES"):
        CopyFolder(tmp_path / "memory", RUN)


def test_hosts_on_one_machine_have_folders_of_their_own():
    folders = {folder_for(RUN, {"NCCL_HOSTID": host}) for host in "ab"}
    assert len(folders) == 2 and all(str(path).startswith(f"/dev/shm/moe_jax-{os.geteuid()}/") for path in folders)
    assert str(folder_for(RUN, {"MOE_JAX_COPIES": "/ram"})) == f"/ram/{RUN}"


# Between hosts.


@pytest.fixture
def server(folder):
    server = CopyServer(folder, KEY, "127.0.0.1", lambda header: "" if header["epoch"] == 2 else "it is of epoch 1")
    yield server
    server.close()


def test_a_copy_goes_to_the_partner_and_back(folder, server, tmp_path):
    own = CopyFolder(tmp_path / "own", RUN)
    for step, keep in ((4, None), (8, 4), (12, 8)):
        header, keep = header_of(step), keep and [keep, 7]
        name = own.write(header, PIECES, keep)
        sent = {**header, "regions": header["regions"][:2]}
        with Link(("127.0.0.1", server.port), KEY) as link:
            link.push(sent, own.path / name, keep)
            (there,) = [name for name, held in folder.headers().items() if held["step"] == step]
            assert contents(link, there, sent) == PIECES[:2]
            with pytest.raises(ValueError, match="CRC differs"):
                link.read(there, [*sent["regions"][0][:4], 0])
            with pytest.raises(ValueError, match="not there any more"):
                link.read("../3.0", sent["regions"][0])
            assert contents(link, there, sent) == PIECES[:2]
    assert steps(folder) == [8, 12] and server.cpu_seconds > 0


def test_what_is_not_as_its_header_says_is_not_taken_in(folder, server, tmp_path):
    own = CopyFolder(tmp_path / "own", RUN)
    header = header_of(4)
    name = own.write(header, PIECES, None)
    with open(own.path / name, "r+b") as file:
        file.write(b"F")
    with pytest.raises(ConnectionError, match="CRC of leaf 0 differs"), Link(("127.0.0.1", server.port), KEY) as link:
        link.push(header, own.path / name, None)
    os.truncate(own.path / name, 1000)
    with pytest.raises(OSError), Link(("127.0.0.1", server.port), KEY) as link:
        link._socket.settimeout(0.5)
        link.push(header, own.path / name, None)
    assert folder.headers() == {} and not list(folder.path.glob("*.json"))


def test_a_stranger_and_an_earlier_start_are_dropped(folder, server, caplog):
    for _ in range(2):
        with pytest.raises(ConnectionError):
            Link(("127.0.0.1", server.port), b"of an earlier start".ljust(32))
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b'{"kind": "push", "header": {}}\n')
        stranger.settimeout(5)
        while stranger.recv(4096):
            pass
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"a stranger at port {server.port} from 127.0.0.1 was dropped")
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer():
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(b'{"challenge": "1"}\n')
                connection.recv(4096)
                connection.sendall(b'{"kind": "copies", "content": "{}", "proof": "0"}\n')

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConnectionError, match="does not hold the secret"):
            Link(impostor.getsockname(), KEY)


# The history of a run.


def test_a_history_is_written_down_and_read_again(tmp_path):
    path = tmp_path / "run.json"
    history = read_history(path)
    assert read_history(path)["id"] != history["id"] and next_epoch(history) == 1
    for epoch in range(1, 131):
        note_start(path, history, 10 * epoch, -1)
        history = read_history(path)
        assert history["starts"][-1] == [epoch, 10 * epoch, -1] and next_epoch(history) == epoch + 1
    assert len(history["starts"]) == 100
    path.write_text('{"id": "../..", "starts": []}')
    assert read_history(path)["id"] != "../.."


def test_only_copies_of_the_history_that_the_folder_tells_count():
    """Epoch 2 went on from step 100 of epoch 1, epoch 3 from a checkpoint of step 50: what was made after is gone."""
    history = {"starts": [[1, 0, -1], [2, 100, 40], [3, 50, 50]]}
    current = {(1, 50), (1, 40), (3, 50), (3, 1000)}
    for epoch, step in [*current, (1, 51), (1, 100), (1, 130), (2, 100), (2, 150), (3, 49), (4, 60), (0, 10)]:
        why = why_not_current({"epoch": epoch, "step": step}, history, 60)
        assert (not why) == ((epoch, step) in current), (epoch, step, why)
    assert "knows no epoch 4" in why_not_current({"epoch": 4, "step": 60}, history, 60)
    assert "epoch 3 of the run went on from step 50" in why_not_current({"epoch": 1, "step": 60}, history, 60)
    assert "checkpoint of step 50" in why_not_current({"epoch": 3, "step": 60}, history, 49)


def hosts_that_say(texts, index=0):
    """This process among two on two hosts; texts: {process: what is changed in what it says of its copies}."""

    def gather_text(topic, text, *_):
        return [texts.get(process, lambda text: text)(text) for process in range(2)]

    places = {"process_index": index, "process_count": 2, "host_ids": ["a", "b"], "is_main": index == 0}
    return types.SimpleNamespace(**places, addresses=("127.0.0.1",) * 2, key=KEY, gather_text=gather_text)


def test_a_host_that_comes_back_late_or_lies_does_not_win(tmp_path, monkeypatch, caplog):
    """Its copies are of later steps than the others', of an epoch that the run has left or never had."""
    monkeypatch.setenv("MOE_JAX_COPIES", str(tmp_path))
    history = {"id": RUN, "starts": [[1, 0, -1], [2, 8, -1]]}
    for process, epoch, step in [(0, 2, 12), (1, 1, 16), (2, 9, 99), (3, 1, 8)]:
        folder = CopyFolder(tmp_path / RUN, RUN)
        folder.write(header_of(step, process=process, epoch=epoch), PIECES, None)
    copies = RamCopies(history, -1, hosts_that_say({}))
    copies._server.close()
    assert copies.latest() == 12 and copies.latest(below=12) == 8 and copies.latest(below=8) is None
    lines = sorted(record.getMessage() for record in caplog.records)
    assert len(lines) == 2
    assert (
        "the copy of step 16 in RAM of process 0 (" in lines[0] and "epoch 2 of the run went on from step 8" in lines[0]
    )
    assert "step 99 " in lines[1] and "knows no epoch 9" in lines[1]


def test_a_copy_that_lacks_a_piece_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_JAX_COPIES", str(tmp_path))
    folder = CopyFolder(tmp_path / RUN, RUN)
    for step, lacks in ((4, 0), (8, 1)):
        header = header_of(step)
        folder.write({**header, "regions": header["regions"][lacks:]}, PIECES[lacks:], [4, 7])
    copies = RamCopies({"id": RUN, "starts": [[2, 0, -1]]}, -1, hosts_that_say({}))
    copies._server.close()
    assert copies.latest() == 4


def test_pieces_of_two_layouts_are_not_mixed_and_the_latest_whole_one_is_read(tmp_path, monkeypatch):
    """Epoch 3 cut the state of step 8 in another way, and ended before all of its processes had their copies."""
    monkeypatch.setenv("MOE_JAX_COPIES", str(tmp_path))
    folder, whole = CopyFolder(tmp_path / RUN, RUN), header_of(8, [b"abcd"], process=0)
    cut = [header_of(8, [b"ab"], process, epoch=3, layout=9) | {"leaves": whole["leaves"]} for process in range(2)]
    cut[1]["regions"][0][1] = [[2, 4]]
    history = {"id": RUN, "starts": [[2, 0, -1], [3, 8, -1]]}
    for header, epoch in ((whole, 2), (cut[0], 2), (cut[1], 3)):
        folder.write(header, [b"abcd"] if header is whole else [b"ab"], [8, 7])
        copies = RamCopies(history, -1, hosts_that_say({}))
        copies._server.close()
        assert copies.latest() == 8
        assert {held["epoch"] for _, _, held in copies._copies[8]} == {epoch}


def test_a_partner_takes_in_what_it_expects_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_JAX_COPIES", str(tmp_path / "memory"))
    copies = RamCopies({"id": RUN, "starts": [[1, 0, -1]]}, -1, hosts_that_say({}))
    pieces = [Piece(f"leaf {i}", ((0, len(piece)),), 1, len(piece), True) for i, piece in enumerate(PIECES)]
    copies._kept = [[], pieces]
    own = CopyFolder(tmp_path / "own", RUN)
    good = header_of(4, process=1)
    name = own.write(good, PIECES, None)
    larger = {**good, "regions": [*good["regions"], ["leaf 3", [[0, 1 << 40]], 500_035, 1 << 40, 0]]}
    for header, why in (
        ({**good, "epoch": 1}, "it is of epoch 1, and this is epoch 2"),
        ({**good, "process": 0}, "process 0 is not the partner of process 0"),
        (larger, "it has other pieces than those of process 1"),
        (good, ""),
    ):
        with Link(("127.0.0.1", copies._server.port), KEY) as link:
            if why:
                with pytest.raises(ConnectionError, match=why):
                    link.push(header, own.path / name, None)
            else:
                link.push(header, own.path / name, None)
        assert bool(list((tmp_path / "memory").rglob("*.json"))) == (not why)
    copies._server.close()
