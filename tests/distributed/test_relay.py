"""The relay of jax's connections, with a service that sends back what it gets: who is passed on, and who is not."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_jax.errors import UserError
from moe_jax.recovery import relay as relay_module
from moe_jax.recovery.job_secret import seal
from moe_jax.recovery.relay import Relay
from moe_jax.recovery.rendezvous import Place

TOKEN = b"of the job"


def place(index: int, port: int, token: bytes = TOKEN) -> Place:
    return Place(index=index, count=2, host="127.0.0.1", port=port, token=token)


def echo(connection: socket.socket) -> None:
    with contextlib.suppress(OSError), connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


@pytest.fixture
def port():
    """The port of a process 0 whose service sends everything back; its relay ends with this process."""
    killed = tempfile.mkdtemp(prefix="moe_jax_relay_")
    with socket.socket(socket.AF_UNIX) as left:  # by a process 0 that was killed
        left.bind(f"{killed}/service")
    listener = socket.create_server(("127.0.0.1", 0))
    relay = Relay(place(0, listener.getsockname()[1]), [listener])
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(relay.service_address.removeprefix("unix:"))
        service.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=echo, args=(service.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        assert not os.path.exists(killed)
        assert os.stat(os.path.dirname(relay.service_address.removeprefix("unix:"))).st_mode & 0o777 == 0o700
        assert asks(relay.address) == b"hello"  # process 0's own client
        yield listener.getsockname()[1]
    relay.close()
    assert not os.path.exists(os.path.dirname(relay.service_address.removeprefix("unix:")))


def asks(address: str, said: bytes = b"hello", seconds: float = 10.0) -> bytes:
    """Return what comes back from a relay, b"" where it closes the connection."""
    host, _, number = address.rpartition(":")
    with socket.create_connection((host, int(number)), timeout=seconds) as connection:
        connection.sendall(said)
        back = b""
        with contextlib.suppress(ConnectionError):
            while len(back) < len(said) and (data := connection.recv(1 << 16)):
                back += data
        return back


def test_a_process_of_the_job_is_passed_on_whatever_strangers_do(port, caplog):
    """300 that say nothing, some that say much, one with another secret, one without handshake, one that came late."""
    allowed, before = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/dev/fd"))
    with contextlib.ExitStack() as strangers:
        for index in range(min(300, allowed // 4)):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
            if index % 10 == 0:
                with contextlib.suppress(OSError):  # cut off
                    stranger.sendall(b"a" * (1 << 18))
        late = strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        answers = late.makefile("rb")
        challenge = json.loads(answers.readline())["challenge"]
        late.sendall(json.dumps(seal(TOKEN, "hello", challenge, {"index": 1})).encode() + b"\n")
        assert answers.readline() == b""
        large = os.urandom(3 << 20)
        assert asks(Relay(place(1, port)).address, large) == large
        assert len(os.listdir("/dev/fd")) - before < 300 + 128 + 30  # theirs, and as many of ours as may wait
    assert caplog.text.count("from 127.0.0.1 was dropped") == 1


@pytest.mark.parametrize("said", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"[1]\n", b"[" * 9000 + b"\n"])
def test_what_is_no_handshake_reaches_no_service(said, port, caplog):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        back = connection.makefile("rb").read()
    assert json.loads(back)["kind"] == "challenge" and back.count(b"\n") == 1
    assert "from 127.0.0.1 was dropped" in caplog.text


def test_another_secret_is_refused_on_both_sides(port, monkeypatch):
    monkeypatch.setattr(relay_module, "_HOLD_SECONDS", 0.1)
    assert asks(Relay(place(1, port, b"of another")).address) == b""


def test_an_impostor_of_process_0_gets_nothing_by_a_processs_own_words(monkeypatch):
    """It lets a second connection answer what the first one asks."""
    monkeypatch.setattr(relay_module, "_HOLD_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor() as threads:
        address = Relay(place(1, impostor.getsockname()[1])).address
        asking = [threads.submit(asks, address, b"what jax says") for _ in range(2)]
        first, second = (impostor.accept()[0] for _ in range(2))
        with first, second:
            answers, challenge = [], "c"
            for connection in (first, second):
                connection.sendall(json.dumps({"kind": "challenge", "challenge": challenge}).encode() + b"\n")
                answers.append(connection.makefile("rb").readline())
                challenge = json.loads(json.loads(answers[-1])["content"])["challenge"]
            first.sendall(answers[1])
            assert first.recv(100) == b"" and TOKEN.hex().encode() not in answers[0]
        assert [one.result(10) for one in asking] == [b"", b""]


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc tells whose connection it is")
def test_the_loopback_port_is_for_its_own_process(port):
    address = Relay(place(1, port)).address
    assert asks(address) == b"hello"
    code = f"import socket; c = socket.create_connection(({address.split(':')[0]!r}, {address.split(':')[1]}), 10)\n"
    code += "c.sendall(b'hello')\ntry: print(c.recv(10))\nexcept ConnectionError: print(b'')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert found.stdout == "b''\n", found


def test_the_connection_outlives_process_0_for_a_while(port):
    """So the watchdog can name process 0 before jax aborts."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        relay = Relay(place(1, gone.getsockname()[1]))
    with pytest.raises(TimeoutError):  # neither bytes nor an end
        asks(relay.address, seconds=1.0)


def test_a_socket_that_takes_no_connection_holds_up_no_start():
    """Whoever may write to the temporary directory can leave one there, with the name of ours."""
    with tempfile.TemporaryDirectory() as usual, socket.socket(socket.AF_UNIX) as full:
        path = f"{usual}/moe_jax_relay_x/service"
        os.mkdir(os.path.dirname(path))
        full.bind(path)
        full.listen(0)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(path)
            sweep = threading.Thread(target=relay_module._sweep, args=(usual,), daemon=True)
            sweep.start()
            sweep.join(5)
            assert not sweep.is_alive() and os.path.exists(path)


def test_no_room_for_the_socket_is_one_line(monkeypatch):
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: open("/dev/null/no"))
    with pytest.raises(UserError, match="process 0 needs a folder for jax's socket .*Not a directory.*; set TMPDIR"):
        Relay(place(0, 1))
