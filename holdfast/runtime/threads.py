"""Bounded wait for a thread."""

from __future__ import annotations

import threading

SLICE = 0.1  # seconds


def join_within(thread: threading.Thread, seconds: float) -> None:
    """Wait at most `seconds` for a thread to end. Time counts only while this process gets CPU time: otherwise a
    process that was suspended meanwhile would not wait at all."""
    while seconds > 0.0 and thread.is_alive():
        thread.join(min(SLICE, seconds))
        seconds -= SLICE
