"""Ports for servers that cannot choose a free port themselves."""

import random
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from holdfast.runtime import sealing

RESERVED_SECONDS = 600  # for a chosen port: a busy machine starts its server minutes later
PORTS = range(22_000, 32_000)  # below the ephemeral ports, so no connection takes one meanwhile


def free_ports(count: int) -> list[int]:
    """Ports that are free at every address, and that no process of this machine's test runs has reserved recently."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(ports) == count:
            break
        if _is_free(port) and _reserve(port):
            ports.append(port)
    return ports


def free_port() -> int:
    """One free port."""
    return free_ports(1)[0]


def free_neighbours() -> int:
    """A free port whose next higher port is free too, for a server that uses both."""
    chosen = random.SystemRandom().sample(PORTS, len(PORTS))
    return next(
        port for port in chosen if all(_is_free(neighbour) and _reserve(neighbour) for neighbour in (port, port + 1))
    )


def _is_free(port: int) -> bool:
    with socket.socket() as listener, suppress(OSError):
        # Ray's nodes listen at other loopback addresses; Slurm's daemons listen at all addresses.
        listener.bind(("", port))
        return True
    return False


def _reserve(port: int) -> bool:
    folder = Path(tempfile.gettempdir()) / "holdfast-test-ports"
    folder.mkdir(exist_ok=True)
    file = folder / str(port)
    with suppress(FileNotFoundError):
        if time.time() - file.stat().st_mtime > RESERVED_SECONDS:
            file.unlink()
    with suppress(FileExistsError):
        file.touch(exist_ok=False)
        return True
    return False


# The arguments of each node's torchrun in a launch of several nodes, as from a launcher.
LAUNCH_KEY = {sealing.VARIABLE: "0123456789abcdef" * 4}
