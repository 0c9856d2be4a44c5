"""The rendezvous between threads of one process: every contradiction among the processes' flags has its line."""

import contextlib
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.ports import free_port

from moe_jax.errors import HostLostError, UserError
from moe_jax.recovery import rendezvous
from moe_jax.recovery.job_secret import read_secret, seal, unseal
from moe_jax.recovery.rendezvous import MalformedMessage, Peer, Place, connect, gather_peers

TOKEN = b"of the job"


def place(index: int, count: int, port: int, token: bytes = TOKEN) -> Place:
    return Place(index=index, count=count, host="127.0.0.1", port=port, token=token, host_id=f"machine of {index}")


class Meeting:
    """Process 0 in a thread, so that the test can play the others; its block closes what was opened."""

    def __init__(self, count: int, seconds: float):
        self.count, self.port, self.threads, self.opened = count, free_port(), ThreadPoolExecutor(), []
        self.gathering = self.threads.submit(gather_peers, place(0, count, self.port), seconds=seconds)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        for connection in self.opened:
            connection.close()
        self.threads.shutdown()

    def join(self, index: int, count: int = 0, seconds: float = 30.0, token: bytes = TOKEN) -> Peer:
        hub, host_ids, epoch = connect(place(index, count or self.count, self.port, token), seconds=seconds)
        self.opened.append(hub.connection)
        assert host_ids == [f"machine of {index}" for index in range(self.count)]
        assert epoch == self.gathering.result(10)[2] and len(epoch) == 32
        return hub

    def start_joining(self, index: int):
        return self.threads.submit(self.join, index)

    def connect_stranger(self) -> socket.socket:
        deadline = time.monotonic() + 5
        while True:
            try:
                self.opened.append(socket.create_connection(("127.0.0.1", self.port)))
                return self.opened[-1]
            except ConnectionRefusedError:
                if self.gathering.done():  # nobody listens any more
                    raise
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def peers(self) -> list[Peer]:
        """Return process 0's connections to all others."""
        peers, host_ids, _, listeners = self.gathering.result(10)
        self.opened += [*(peer.connection for peer in peers), *listeners]
        assert [peer.index for peer in peers] == list(range(1, self.count)) and len(host_ids) == self.count
        return peers


def test_gather_peers_connects_all_and_hands_out_the_offer():
    with Meeting(count=3, seconds=5) as meeting:
        joining = [meeting.start_joining(index) for index in (2, 1)]
        hubs, peers = [one.result(10) for one in joining], meeting.peers()
        assert all(hub.index == 0 and hub.name == socket.gethostname() for hub in hubs)
        peers[0].send({"kind": "hello again"})
        assert hubs[1].read() and hubs[1].next_message() == {"kind": "hello again"} and hubs[1].next_message() is None


@pytest.mark.parametrize(
    ("index", "count", "words"),
    [
        (1, 4, r"process 1 .* has num_processes=4 but process 0 .* has num_processes=2"),
        (2, 2, r"process_id must lie in 1..1"),
    ],
)
def test_gather_peers_refuses_flags_that_contradict_its_own(index, count, words):
    with Meeting(count=2, seconds=5) as meeting:
        with pytest.raises(UserError, match=words):
            meeting.join(index, count)
        with pytest.raises(UserError):
            meeting.peers()


def test_gather_peers_refuses_a_second_process_of_an_index_and_waits_for_the_right_one():
    with Meeting(count=3, seconds=30) as meeting:
        first = meeting.start_joining(1)
        time.sleep(1.5)  # the first has joined by then, on a busy machine too
        with pytest.raises(UserError, match=r"process 1 .* joined although process 1 .* has that process_id"):
            meeting.join(1)
        meeting.join(2)
        assert first.result(10) and meeting.peers()


def test_gather_peers_takes_a_process_that_was_started_again():
    with Meeting(count=3, seconds=30) as meeting:
        with meeting.connect_stranger() as first:  # joins and dies
            first.sendall(hello(first, index=1, count=3))
            time.sleep(1.5)  # the first has joined by then, on a busy machine too
        again = meeting.start_joining(1)
        meeting.join(2)
        assert again.result(10) and meeting.peers()  # two and not three: the dead connection gave way


def test_gather_peers_names_who_did_not_come_to_everybody():
    with Meeting(count=4, seconds=0.7) as meeting:
        with pytest.raises(HostLostError, match=r"processes \[1, 3\] of 4 have not joined process 0"):
            meeting.join(2)
        with pytest.raises(HostLostError):
            meeting.peers()


# Strangers.


def hello(connection: socket.socket, *, token: bytes = TOKEN, **content) -> bytes:
    """Return what a process of the job would say to the challenge that it read."""
    challenge = json.loads(connection.makefile("rb").readline())["challenge"]
    content = {"name": "a", "versions": rendezvous.VERSIONS, "host_id": "m", "challenge": "c"} | content
    return json.dumps(seal(token, "hello", challenge, content)).encode() + b"\n"


def say_a_huge_line(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # cut off, as it should be
        connection.sendall(b"a" * (1 << 20))


def say_a_wrong_token(connection: socket.socket) -> None:
    connection.sendall(hello(connection, token=b"of another", index=1, count=2))


def say_a_hello_of_another_program(connection: socket.socket) -> None:
    connection.sendall(hello(connection, index="1", count=2))  # sealed with this job's token


def say_a_sealed_line(connection: socket.socket) -> None:
    challenge = json.loads(connection.makefile("rb").readline())["challenge"]
    message = seal(TOKEN, "hello", challenge, {})
    connection.sendall(json.dumps(message).encode() + b"\n")


def say_slow_bytes(connection: socket.socket) -> None:
    def drip() -> None:
        with contextlib.suppress(OSError):
            for _ in range(100):
                connection.sendall(b"a")
                time.sleep(0.1)

    threading.Thread(target=drip, daemon=True).start()


@pytest.mark.parametrize(
    "say", [say_a_huge_line, say_a_wrong_token, say_a_hello_of_another_program, say_a_sealed_line, say_slow_bytes]
)
def test_strangers_neither_end_nor_delay_a_start(say, caplog):
    with Meeting(count=2, seconds=20) as meeting:
        for stranger in [meeting.connect_stranger() for _ in range(3)]:
            say(stranger)
        time.sleep(0.2)
        began = time.monotonic()
        meeting.join(1)
        assert time.monotonic() - began < 1.0
        meeting.peers()
    expected = 0 if say is say_slow_bytes else 1  # the job started before their time was up
    assert caplog.text.count("from 127.0.0.1 was dropped") == expected


def test_strangers_do_not_stretch_the_deadline(monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.3)
    began = time.monotonic()
    with Meeting(count=2, seconds=0.8) as meeting:
        while not meeting.gathering.done():
            if len(meeting.opened) < 20:
                with contextlib.suppress(OSError):  # dropped in the middle
                    say_slow_bytes(meeting.connect_stranger())
            time.sleep(0.05)
        assert time.monotonic() - began < 1.4
        words = r"processes \[1\] of 2 have not joined .* strangers came from 127.0.0.1"
        with pytest.raises(HostLostError, match=words):
            meeting.peers()
    assert caplog.text.count("from 127.0.0.1 was dropped") == 1


def test_more_strangers_than_may_wait_make_way(caplog):
    with Meeting(count=2, seconds=20) as meeting:
        for _ in range(150):
            meeting.connect_stranger()
        meeting.join(1)
        meeting.peers()
    assert "made way for others" in caplog.text


def test_process_with_another_secret_hears_of_it_and_may_be_mended(caplog):
    with Meeting(count=2, seconds=20) as meeting:
        with pytest.raises(HostLostError, match=r"within 0.5 s \(process 0 there holds another secret; give all"):
            meeting.join(1, seconds=0.5, token=b"of another")
        assert caplog.text.count("process 1 (") == 1 and "of another" not in caplog.text
        meeting.join(1)
        meeting.peers()


def test_connect_does_not_believe_a_stranger_at_the_coordinator():
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port, answers = impostor.getsockname()[1], []

        def answer() -> None:
            with impostor.accept()[0] as connection:
                connection.sendall(b'{"kind": "challenge", "challenge": "c"}\n')
                answers.append(connection.makefile("rb").readline())
                refusal = {"lost": False, "line": "go away"}
                connection.sendall(json.dumps(seal(b"guessed", "refused", "c", refusal)).encode() + b"\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(HostLostError, match="what answers there does not hold this job's secret"):
            connect(place(1, 2, port), seconds=0.6)
        assert TOKEN not in answers[0] and TOKEN.hex().encode() not in answers[0]


def test_gather_peers_refuses_another_version():
    here = rendezvous.VERSIONS
    words = rf"process 1 \(a\) runs protocol \d, jax 0.0.1, .* but process 0 .*, jax {here['jax']}, .*; install"
    with Meeting(count=2, seconds=20) as meeting:
        other = meeting.connect_stranger()
        other.sendall(hello(other, index=1, count=2, versions=here | {"jax": "0.0.1"}))
        with pytest.raises(UserError, match=words):
            meeting.peers()


# The secret.


def test_seal_holds_for_its_key_kind_and_challenge_only():
    message = seal(TOKEN, "hello", "c", {"index": 1})
    assert unseal(TOKEN, "c", message) == {"index": 1}
    assert unseal(TOKEN, "d", message) is None and unseal(b"other", "c", message) is None
    for field, value in {"kind": "go", "content": '{"index": 2}', "proof": "0" * 64}.items():
        assert unseal(TOKEN, "c", message | {field: value}) is None
        assert unseal(TOKEN, "c", {k: v for k, v in message.items() if k != field}) is None
    assert unseal(TOKEN, "c", message | {"proof": "\u00e9" * 64}) is None


def test_secret_is_given_by_the_environment_or_a_file_of_its_user(tmp_path):
    secret, path, pipe = "a secret of the job", tmp_path / "secret", tmp_path / "pipe"
    path.write_text(f"{secret}\n")
    path.chmod(0o600)
    os.mkfifo(pipe)
    key = read_secret({"MOE_JAX_JOB_TOKEN": f"{secret} "})
    assert key == read_secret({"MOE_JAX_JOB_TOKEN_FILE": str(path)}) and len(key) == 32
    assert key != read_secret({"MOE_JAX_JOB_TOKEN": secret + "."})
    for environment, words in {
        (): "a job of several processes needs a secret, in MOE_JAX_JOB_TOKEN or in a file",
        (("SLURM_JOB_ID", "5000"),): "needs a secret",  # nothing that others can guess takes its place
        (("MOE_JAX_JOB_TOKEN", "short"),): "MOE_JAX_JOB_TOKEN holds 5 characters and must have at least 16",
        (("MOE_JAX_JOB_TOKEN_FILE", str(pipe)),): "must be a file that other users cannot read",
        (("MOE_JAX_JOB_TOKEN_FILE", str(tmp_path / "none")),): r"cannot be read \(No such file",
    }.items():
        with pytest.raises(UserError, match=words):
            read_secret(dict(environment))
    path.chmod(0o604)
    with pytest.raises(UserError, match="must be a file that other users cannot read; chmod 600"):
        read_secret({"MOE_JAX_JOB_TOKEN_FILE": str(path)})


# Where process 0 listens.


def test_process_0_listens_at_the_coordinators_address_only():
    (listener,) = rendezvous.listen("127.0.0.1", free_port(), time.monotonic())
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "found", "why"),
    [
        ("192.0.2.1", None, "it means 192.0.2.1, which is no address of this machine"),  # TEST-NET-1
        ("service", "198.51.100.7", "it means 198.51.100.7, which is no address of this machine"),
        ("node1", "127.0.1.1", "127.0.1.1, which it means here, is reached from this machine only"),
        ("unknown", OSError("no such name"), "it is not known here (no such name)"),
    ],
)
def test_process_0_listens_everywhere_where_its_address_is_not_its_own(host, found, why, monkeypatch, caplog):
    real = socket.getaddrinfo

    def resolve(name, *rest, **more):
        if name != host or found is None:
            return real(name, *rest, **more)
        if isinstance(found, OSError):
            raise found
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    port = free_port()
    (listener,) = rendezvous.listen(host, port, time.monotonic())
    with listener, socket.create_connection(("127.0.0.1", port)):
        pass
    (record,) = caplog.records
    assert record.getMessage() == f"process 0 listens at all addresses: the coordinator's host is {host!r}, and {why}"


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"[1]\n", b'{"kind": 3}\n', b"[" * 9000 + b"\n"])
def test_peer_names_a_line_that_is_no_message(line):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b'{"kind": "beat"}\n' + line)
        peer = Peer(index=1, name="a", connection=ours)
        assert peer.read() and peer.next_message() == {"kind": "beat"}
        with pytest.raises(MalformedMessage, match="instead of a message"):
            peer.next_message()
        with pytest.raises(MalformedMessage, match="a line of more than 3 bytes"):
            Peer(index=1, name="a", connection=ours, received=b"aaaa").next_message(most=3)


def test_connect_says_that_process_0_does_not_answer():
    with pytest.raises(HostLostError, match=r"process 1 .* could not join process 0 at 127.0.0.1:\d+ within 0.5 s"):
        connect(place(1, 2, free_port()), seconds=0.5)


def test_gather_peers_says_that_the_port_is_taken(monkeypatch):
    monkeypatch.setattr(rendezvous, "_BIND_SECONDS", 0.1)
    words = "cannot listen at the coordinator's port"
    with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(UserError, match=words):
        gather_peers(place(0, 2, holder.getsockname()[1]), seconds=1)
