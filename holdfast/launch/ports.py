"""Port for a listener that starts later on this machine: the ranks' meeting address is set before they start."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)  # below Linux's default range for outgoing connections, so none takes one meanwhile
TRIES = 100


def free_port() -> int:
    """A free port, chosen at random, so that two concurrent callers get different ports. Raises OSError."""
    for port in random.SystemRandom().sample(PORTS, TRIES):
        with socket.socket() as candidate:
            try:
                candidate.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"{TRIES} ports of {PORTS.start}-{PORTS.stop - 1} are all in use: the ranks have nowhere to meet")
