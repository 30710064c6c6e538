"""Listening sockets of a run's processes, and the modes of their open files."""

import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

SHARED = (Path("/dev/shm"), Path(tempfile.gettempdir()))


def family(root: psutil.Process) -> list[psutil.Process]:
    """A process and all its descendants that still run."""
    return [root, *root.children(recursive=True)]


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """The addresses at which processes accept connections or datagrams."""
    addresses = set()
    for process in processes:
        for connection in process.net_connections("inet"):
            bound = connection.type != 1 and connection.laddr and not connection.raddr  # a datagram's
            if connection.status == psutil.CONN_LISTEN or bound:
                addresses.add((str(connection.laddr.ip), int(connection.laddr.port)))
    return addresses


def unix_listeners(processes: Iterable[psutil.Process]) -> set[str]:
    """The names of Unix sockets at which processes listen; one that begins with @ is in no folder."""
    inodes = {link[8:-1] for process in processes for link in _links(process) if link.startswith("socket:[")}
    lines = [line.split(None, 7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    accepting = 0x10000
    return {
        fields[7] for fields in lines if len(fields) == 8 and fields[6] in inodes and int(fields[3], 16) & accepting
    }


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
