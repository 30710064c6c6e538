"""Shutdown requests: whether this process has to stop, and which listeners are notified.

Where KFP's launcher runs a step, SIGTERM reaches the process group and ends the launcher. Argo's executor polls once a
second whether the launcher is gone, and then the container ends (docs/retries.md). So everything necessary happens in
the first tenths of a second. The exit handler does the cleanup.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _ShutdownRequest:
    def __init__(self) -> None:
        self.requested = False
        self.queue: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a signal handler may put: it takes no lock


_request = _ShutdownRequest()


def shutdown_requested() -> bool:
    """Whether a shutdown was requested: then nothing starts again."""
    return _request.requested


def request_shutdown() -> None:
    """Record a shutdown request and wake the listener. For signal handlers and threads."""
    _request.requested = True
    _request.queue.put(True)


@contextmanager
def on_shutdown_request(listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener` once, in a separate thread, if a shutdown is requested within the context. Clears earlier
    requests: another step begins in this process."""
    global _request  # noqa: PLW0603 - a process works on one step at a time
    _request = request = _ShutdownRequest()

    def wait() -> None:
        if request.queue.get():
            listener()

    thread = threading.Thread(target=wait, name="leaving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        request.queue.put(False)


# Bounded wait for a thread.

SLICE = 0.1  # seconds


def join_within(thread: threading.Thread, seconds: float) -> None:
    """Wait at most `seconds` for a thread to end. Time counts only while this process gets CPU time: otherwise a
    process that was suspended meanwhile would not wait at all."""
    while seconds > 0.0 and thread.is_alive():
        thread.join(min(SLICE, seconds))
        seconds -= SLICE
