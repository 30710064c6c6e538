"""Cut network connections between ranks: both ends of each connection of a rank to its peers are closed.

A connection is shut down through a copy of its descriptor (pidfd_getfd(2), Linux 5.6). The kernel allows that for
traceable processes of the same user, such as this process's descendants. Some containers forbid the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
from collections.abc import Iterable
from typing import Any

import psutil

_PIDFD_GETFD = 438  # on every architecture


def refused() -> str:
    """Why no connection can be cut here; empty if it is possible."""
    one, other = socket.socketpair()
    with one, other, subprocess.Popen(["sleep", "60"], stdin=one.fileno()) as child:  # a parent may always copy
        try:
            _taken(child.pid, 0).close()
        except (AttributeError, OSError) as error:
            return f"this kernel gives no copy of a socket of another process (pidfd_getfd): {error}"
        finally:
            child.kill()
    return ""


def cut(process: psutil.Process, peers: Iterable[psutil.Process]) -> int:
    """Shut down the connections of `process` to its peers. Returns their number. Raises psutil.Error and OSError."""
    theirs = {each.laddr for peer in peers for each in _connections(peer)}
    number = 0
    for each in _connections(process):
        if each.raddr in theirs:
            with contextlib.suppress(OSError), _taken(process.pid, each.fd) as connection:  # it ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)
                number += 1
    return number


def _connections(process: psutil.Process) -> list[Any]:
    return [each for each in process.net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED]


def _taken(pid: int, descriptor: int) -> socket.socket:
    """A copy of a socket of another process. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
        if copy < 0:
            raise OSError(number := ctypes.get_errno(), os.strerror(number))
        return socket.socket(fileno=copy)
    finally:
        os.close(process)
