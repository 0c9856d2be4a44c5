"""A port that nothing listens on."""

import contextlib
import os
import pathlib
import socket


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def open_ports() -> list[tuple[str, int]]:
    """Return (address, port) of each TCP socket of this process that listens (Linux); an address is hexadecimal."""
    inodes, found = set(), []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    for table in ("tcp", "tcp6"):
        for row in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found
