"""Listens at the coordinator's address and at no other, as far as this machine knows that address. No arrays, no jax.

Inputs: the coordinator's host, as all processes name it, and a port. Outputs: listening sockets. A name may mean
another address here than elsewhere (behind address translation, for a service of Kubernetes, or where /etc/hosts gives
the machine's own name a loopback address); then only listening at all addresses reaches every process, logged once.
Also the port of jax's service, kept until jax opens it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import random
import socket
import sys
import time
from collections.abc import Iterator

from moe_jax.errors import UserError

_LOG = logging.getLogger(__name__)
_BACKLOG = 1024
_SERVICE_PORTS = (20000, 30000)  # above them Kubernetes has its node ports, then come those of outgoing connections
_PORT_ATTEMPTS = 20
_NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)  # the last: link-local, without its interface


def listen(host: str, port: int, deadline: float) -> list[socket.socket]:
    """Return sockets that listen at the addresses of `host` on this machine, or at all addresses.

    Raises:
      UserError: the port is still taken at the deadline (time.monotonic()).
    """
    addresses, why = own_addresses(host)
    while True:
        try:
            if addresses:
                opened = _open_each(addresses, port)
                if opened:
                    return opened
                why = f"it means {', '.join(addresses)}, which is no address of this machine"
            opened = [_open_all(port)]
            _LOG.warning("process 0 listens at all addresses: the coordinator's host is %r, and %s", host, why)
            return opened
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"process 0 cannot listen at the coordinator's port {port} ({error.strerror}); another job or a "
                    "second process 0 holds it: set --coordinator to a free port, and --process_id=0 only once"
                ) from None
            time.sleep(0.5)


@contextlib.contextmanager
def held_port() -> Iterator[str]:
    """Keep a free port for jax's service, which process 0 opens when all processes have joined, minutes later perhaps.

    It lies below the ports that systems give to outgoing connections (32768 on Linux, 49152 elsewhere) and is drawn at
    random, so that neither a connection nor another job on this machine takes it meanwhile. On Linux a socket that is
    bound and does not listen keeps it too: the service may share it (gRPC opens with SO_REUSEPORT), others may not.
    """
    ports = random.SystemRandom()
    dual = socket.has_dualstack_ipv6()
    for port in (*(ports.randrange(*_SERVICE_PORTS) for _ in range(_PORT_ATTEMPTS)), 0):
        holder = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
        try:
            socket.create_server(("", port)).close()  # raises where another job's holder is, which would share as well
            if dual:
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if sys.platform == "linux":
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(("", port))
        except OSError:  # taken
            holder.close()
            continue
        with holder:
            found = str(holder.getsockname()[1])
            if sys.platform != "linux":
                holder.close()
            yield found
        return
    raise OSError("no port is free")


def own_addresses(host: str) -> tuple[list[str], str]:
    """Return the addresses that a name has, or none and why listening there would not reach every process."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return [], f"it is not known here ({error.strerror or error})"
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    looped = [address for address in addresses if ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if looped and not _means_loopback(host):
        return [], f"{looped[0]}, which it means here, is reached from this machine only"
    return addresses, ""


def _means_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _open_all(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=_BACKLOG)


def _open_each(addresses: list[str], port: int) -> list[socket.socket]:
    """Return a listening socket for each address of this machine; raise OSError if the port is taken at one."""
    opened: list[socket.socket] = []
    try:
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                opened.append(socket.create_server((address, port), family=family, backlog=_BACKLOG))
            except OSError as error:
                if error.errno not in _NOT_LOCAL:
                    raise
    except OSError:
        for listener in opened:
            listener.close()
        raise
    return opened
