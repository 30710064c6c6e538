"""Whether this process was asked to leave, and who has to know at once.

Where KFP's launcher runs a step, SIGTERM reaches the process group: the launcher ends by it, Argo's executor looks
once a second whether it is gone, and the container ends with it (docs/retries.md). So what must happen happens in the
first tenths of a second; cleaning up is the exit handler's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Asked:
    def __init__(self) -> None:
        self.yet = False
        self.told: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a signal handler may put: it takes no lock


_asked = _Asked()


def was_asked_to_leave() -> bool:
    """Whether it was: then nothing is begun again."""
    return _asked.yet


def asked_to_leave() -> None:
    """Note it, and wake whoever wants to know. For signal handlers as well as for threads."""
    _asked.yet = True
    _asked.told.put(True)


@contextmanager
def when_asked_to_leave(listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener`, once and in a thread of its own, if this process is asked to leave inside. What was asked before
    is forgotten: another step begins in this process."""
    global _asked  # noqa: PLW0603 - a process works on one step at a time
    _asked = asked = _Asked()

    def wait() -> None:
        if asked.told.get():
            listener()

    thread = threading.Thread(target=wait, name="leaving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        asked.told.put(False)
