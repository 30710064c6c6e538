"""Listening sockets of a run's processes, and the modes of their open files."""

import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

LISTENS = "0A"  # the state of a TCP socket
SHARED = (Path("/dev/shm"), Path(tempfile.gettempdir()))


def family(root: psutil.Process) -> list[psutil.Process]:
    """A process and all its descendants that still run."""
    return [root, *root.children(recursive=True)]


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """The addresses at which processes accept connections or datagrams, each in the network of its process."""
    addresses = set()
    for process in processes:
        inodes = _inodes(process)
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in _table(process, table):
                _, own, peer, state, *more = line.split()
                listens = state == LISTENS if table.startswith("tcp") else not int(peer.rpartition(":")[2], 16)
                if listens and more[5] in inodes:
                    host, _, port = own.rpartition(":")
                    addresses.add((_address(host), int(port, 16)))
    return addresses


def unix_listeners(processes: Iterable[psutil.Process]) -> set[str]:
    """The names of Unix sockets at which processes listen; one that begins with @ is in no folder."""
    accepting, names = 0x10000, set()
    for process in processes:
        inodes = _inodes(process)
        for line in _table(process, "unix"):
            fields = line.split(None, 7)
            if len(fields) == 8 and fields[6] in inodes and int(fields[3], 16) & accepting:
                names.add(fields[7])
    return names


def open_to_others(path: Path) -> bool:
    """Whether another user can reach a path, by its mode and by that of its folder."""
    if not path.exists():
        return False
    own, folder = path.stat().st_mode, path.parent.stat().st_mode
    return bool(own & (stat.S_IRWXG | stat.S_IRWXO)) and bool(folder & (stat.S_IXGRP | stat.S_IXOTH))


def shared_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """Open files of processes in folders that every user may write to."""
    paths = (Path(link) for process in processes for link in _links(process) if link.startswith("/"))
    return {path for path in paths if any(path.is_relative_to(folder) for folder in SHARED)}


def _links(process: psutil.Process) -> Iterator[str]:
    with suppress(OSError):  # it has ended
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                yield str(link.readlink())


def _inodes(process: psutil.Process) -> set[str]:
    return {link[8:-1] for link in _links(process) if link.startswith("socket:[")}


def _table(process: psutil.Process, name: str) -> list[str]:
    """The rows of a table of sockets, of the network namespace of a process."""
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]
    return []


def _address(host: str) -> str:
    """An address of the kernel's tables: words of four bytes, in the order of this machine."""
    words = [bytes.fromhex(host[start : start + 8]) for start in range(0, len(host), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
