"""Total deadline for an HTTP request: a server that sends a byte now and then cannot keep a request forever.

Socket timeouts bound only the silence between two bytes. Here, one thread of the process shuts down the socket of an
overdue request, wherever that request reads or writes. Its thread then sees a closed connection. Large bodies get more
time, at a minimum rate.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

LEAST_RATE = 64 * 2**10  # bytes per second of a body
LOOK_SECONDS = 0.25


class Attempt:
    """One request in progress. `overdue`: its time was up, so its result is incomplete."""

    def __init__(self, due: float) -> None:
        self.due = due  # by the monotonic clock
        self.overdue = False
        self.sock: socket.socket | None = None

    def allow(self, size: int) -> None:
        """Add time for a body of `size` bytes."""
        self.due += size / LEAST_RATE


_current = threading.local()
_lock = threading.Lock()
_attempts: set[Attempt] = set()
_watching = False  # whether a thread of this process watches


@contextlib.contextmanager
def attempt_until(due: float) -> Iterator[Attempt]:
    """End requests that this thread sends in the context at `due`, by the monotonic clock."""
    attempt, outer = Attempt(due), getattr(_current, "attempt", None)
    _current.attempt = attempt
    with _lock:
        _watch()
        _attempts.add(attempt)
    try:
        yield attempt
    finally:
        _current.attempt = outer
        with _lock:
            _attempts.discard(attempt)


def allow(size: int) -> None:
    """Add time to the request of this thread, for a body of `size` bytes."""
    attempt = getattr(_current, "attempt", None)
    if attempt is not None:
        attempt.allow(size)


@contextlib.contextmanager
def within(seconds: float, kind: type[Exception] = TimeoutError) -> Iterator[None]:
    """End requests of this thread in the context after `seconds`, including the reading of the response. Their client
    must be `bound`. Raises `kind` when the time is up."""
    with attempt_until(time.monotonic() + seconds) as attempt:
        try:
            yield
        except Exception:
            if not attempt.overdue:
                raise
        if attempt.overdue:
            raise kind(f"no whole answer within {seconds:.0f} s")


def bound(manager: Any) -> None:
    """Let the requests of a urllib3 pool manager end with their attempt."""
    manager.pool_classes_by_scheme = {
        scheme: type(f"Bound{pool.__name__}", (pool,), {"ConnectionCls": bound_class(pool.ConnectionCls)})
        for scheme, pool in manager.pool_classes_by_scheme.items()
    }


def bound_class(connection: type) -> type:
    """A connection class, of http.client or urllib3, whose requests end with their attempt."""

    def send(self: Any, data: Any) -> Any:
        if self.sock is None and self.auto_open:
            self.connect()
        attempt = getattr(_current, "attempt", None)
        if attempt is not None:
            attempt.sock = self.sock
        return connection.send(self, data)  # type: ignore[attr-defined]

    return type(f"Bound{connection.__name__}", (connection,), {"send": send})


def _watch() -> None:
    global _watching  # noqa: PLW0603 - one thread for each process
    if not _watching:
        _watching = True
        threading.Thread(target=_end_overdue, daemon=True, name="holdfast-deadlines").start()


def _forget() -> None:
    """Reset after a fork: the child has no other threads, and possibly a lock that one of them held."""
    global _lock, _watching
    _lock, _watching = threading.Lock(), False
    _attempts.clear()


os.register_at_fork(after_in_child=_forget)


def _end_overdue() -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        now = time.monotonic()
        with _lock:
            late = [attempt for attempt in _attempts if attempt.due < now]
        for attempt in late:
            attempt.overdue = True
            if attempt.sock is not None:
                with contextlib.suppress(OSError):
                    # Not the method of a TLS socket, which would touch state that another thread reads.
                    socket.socket.shutdown(attempt.sock, socket.SHUT_RDWR)
