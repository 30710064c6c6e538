"""Locks of files that other processes may hold: waited for, and not for ever."""

from __future__ import annotations

import fcntl
import time

_PAUSE = 0.005  # seconds between two tries


def lock_within(descriptor: int, seconds: float) -> bool:
    """Take the exclusive lock of an open file; whether it was free within so long. Raises OSError where there are
    no locks."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        else:
            return True
