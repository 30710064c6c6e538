"""A port for a listener that begins later, on this machine: the ranks' meeting place is named before they start."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)  # below those that Linux by default gives to connections: none takes one meanwhile
TRIES = 100


def free_port() -> int:
    """A port that nobody uses, chosen at random, so that two that choose at once choose others. Raises OSError."""
    for port in random.SystemRandom().sample(PORTS, TRIES):
        with socket.socket() as candidate:
            try:
                candidate.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"{TRIES} ports of {PORTS.start}-{PORTS.stop - 1} are all in use: the ranks have nowhere to meet")
