"""Shutdown requests: whether this process was asked to stop, and which listeners are notified.

Where KFP's launcher runs a step, SIGTERM reaches the process group: the launcher ends by it, Argo's executor looks
once a second whether it is gone, and the container ends with it (docs/retries.md). So what must happen happens in the
first tenths of a second; cleaning up is the exit handler's.
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
    """Whether it was: then nothing is begun again."""
    return _request.requested


def request_shutdown() -> None:
    """Note it, and wake whoever wants to know. For signal handlers as well as for threads."""
    _request.requested = True
    _request.queue.put(True)


@contextmanager
def on_shutdown_request(listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener`, once and in a thread of its own, if this process is asked to leave inside. What was asked before
    is forgotten: another step begins in this process."""
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
