"""Turns this process into the first process of a lab's host, then becomes the command to run there.

Called by processes.py inside the host's network namespace: enter_host.py LAB_PID HOST_NAME COMMAND...
It sets the host's name, and ends when the lab ends, even if the lab is killed.
"""

import ctypes
import os
import signal
import socket
import sys

_CLONE_NEWUTS = 0x04000000
_PR_SET_PDEATHSIG = 1


def enter(lab_pid: int, host_name: str, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "cannot have a host name of its own")
    socket.sethostname(host_name)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != lab_pid:  # the lab ended before the line above
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    try:
        enter(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    except OSError as error:
        print(f"{sys.argv[3]}: {error.strerror or error}", file=sys.stderr)
        sys.exit(127)
