"""Waiting for a thread whose last work may not hold this process up for ever."""

from __future__ import annotations

import threading

SLICE = 0.1  # seconds


def join_within(thread: threading.Thread, seconds: float) -> None:
    """Wait for a thread to end, so long at most. Time counts only while this process is given some: one that stood
    still for all of it would not wait at all."""
    while seconds > 0.0 and thread.is_alive():
        thread.join(min(SLICE, seconds))
        seconds -= SLICE
