"""Ports for servers that cannot be told to take any free one."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

PORTS = range(22_000, 32_000)  # below those that the system gives to connections: none of them takes one meanwhile


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses at any address, chosen at random, so that two that choose at once choose others."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        if _is_free(port):
            found.append(port)
    return found


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def free_neighbours() -> int:
    """A port that nobody uses, and neither the one above it: for what takes both."""
    chosen = random.SystemRandom().sample(PORTS, len(PORTS))
    return next(port for port in chosen if _is_free(port) and _is_free(port + 1))


def _is_free(port: int) -> bool:
    with socket.socket() as one, suppress(OSError):
        one.bind(("", port))  # Ray's nodes listen at other addresses of the loopback, Slurm's daemons at all of them
        return True
    return False
