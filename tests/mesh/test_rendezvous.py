"""The rendezvous between threads of one process: every contradiction among the processes' flags has its line."""

import socket
import threading
import time

import pytest

from moe_jax.errors import HostLostError, UserError
from moe_jax.mesh import rendezvous
from moe_jax.mesh.rendezvous import connect, gather_peers


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Meeting:
    """Process 0 in a thread, so that the test can play the others."""

    def __init__(self, count: int, seconds: float):
        self.port, self.outcome = free_port(), None
        self._thread = threading.Thread(target=self._run, args=(count, seconds), daemon=True)
        self._thread.start()

    def _run(self, count: int, seconds: float) -> None:
        try:
            self.outcome = gather_peers(count=count, port=self.port, offer="jax at 77", seconds=seconds)
        except Exception as error:
            self.outcome = error

    def join(self, index: int, count: int, seconds: float = 30.0):
        return connect(index=index, count=count, host="127.0.0.1", port=self.port, seconds=seconds)

    def connect_stranger(self) -> socket.socket:
        deadline = time.monotonic() + 5
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port))
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def result(self):
        self._thread.join(10)
        return self.outcome


def close(*peers) -> None:
    for peer in peers:
        peer.connection.close()


def test_gather_peers_connects_all_and_hands_out_the_offer():
    meeting = Meeting(count=3, seconds=5)
    joined = {}
    threads = [threading.Thread(target=lambda i=i: joined.update({i: meeting.join(i, 3)})) for i in (2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peers = meeting.result()
    assert sorted(peer.index for peer in peers) == [1, 2]
    assert {offer for _, offer in joined.values()} == {"jax at 77"}
    assert all(hub.index == 0 and hub.name == socket.gethostname() for hub, _ in joined.values())
    peers[0].send({"kind": "hello again"})
    assert joined[peers[0].index][0].receive() == [{"kind": "hello again"}]
    close(*peers, *(hub for hub, _ in joined.values()))


def test_gather_peers_refuses_another_number_of_processes():
    meeting = Meeting(count=2, seconds=5)
    with pytest.raises(UserError, match=r"process 1 .* has num_processes=4 but process 0 .* has num_processes=2"):
        meeting.join(1, 4)
    assert isinstance(meeting.result(), UserError)


@pytest.mark.parametrize("index", [0, 2])
def test_gather_peers_refuses_an_index_that_cannot_be(index):
    meeting = Meeting(count=2, seconds=5)
    with pytest.raises(UserError, match=r"process_id must lie in 1..1"):
        meeting.join(index, 2)
    assert isinstance(meeting.result(), UserError)


def test_gather_peers_refuses_a_second_process_of_an_index_and_waits_for_the_right_one():
    meeting = Meeting(count=3, seconds=30)
    first = {}
    thread = threading.Thread(target=lambda: first.update(peer=meeting.join(1, 3)[0]))
    thread.start()
    time.sleep(1.5)  # the first has joined by then, on a busy machine too
    with pytest.raises(UserError, match=r"process 1 .* joined although process 1 .* has that process_id"):
        meeting.join(1, 3)
    second, _ = meeting.join(2, 3)
    thread.join()
    peers = meeting.result()
    assert len(peers) == 2
    close(*peers, first["peer"], second)


def test_gather_peers_takes_a_process_that_was_started_again():
    meeting = Meeting(count=3, seconds=30)
    with meeting.connect_stranger() as first:  # joins and dies
        first.sendall(b'{"kind": "hello", "index": 1, "count": 3, "name": "a"}\n')
        time.sleep(1.5)  # the first has joined by then, on a busy machine too
    again = {}
    thread = threading.Thread(target=lambda: again.update(peer=meeting.join(1, 3)[0]))
    thread.start()
    second, _ = meeting.join(2, 3)
    thread.join()
    close(*meeting.result(), again["peer"], second)


def test_gather_peers_names_who_did_not_come_to_everybody():
    meeting = Meeting(count=4, seconds=0.7)
    with pytest.raises(HostLostError, match=r"processes \[1, 3\] of 4 have not joined process 0"):
        meeting.join(2, 4)
    assert isinstance(meeting.result(), HostLostError)


def test_gather_peers_ignores_strangers():
    meeting = Meeting(count=2, seconds=5)
    with meeting.connect_stranger() as stranger:
        stranger.sendall(b"GET / HTTP/1.1\n")
        hub, _ = meeting.join(1, 2)
    close(*meeting.result(), hub)


def test_connect_says_that_process_0_does_not_answer():
    with pytest.raises(HostLostError, match=r"process 1 .* could not join process 0 at 127.0.0.1:\d+ within 0.5 s"):
        connect(index=1, count=2, host="127.0.0.1", port=free_port(), seconds=0.5)


def test_gather_peers_says_that_the_port_is_taken(monkeypatch):
    monkeypatch.setattr(rendezvous, "_BIND_SECONDS", 0.1)
    with (
        socket.create_server(("", 0)) as holder,
        pytest.raises(UserError, match="cannot listen at the coordinator's port"),
    ):
        gather_peers(count=2, port=holder.getsockname()[1], offer="", seconds=1)
