"""A total deadline for a request over HTTP: a server that sends a byte now and then keeps no request forever.

Timeouts of sockets bound only the silence between two bytes. Here one thread of the process shuts down the socket of a
request that is overdue, wherever that request reads or writes; its thread then sees a closed connection. Large bodies
get more time, at a least rate.
"""

from __future__ import annotations

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
    """One request on its way. `overdue`: its time was up, and what came of it is not whole."""

    def __init__(self, due: float) -> None:
        self.due = due  # by the monotonic clock
        self.overdue = False
        self.sock: socket.socket | None = None

    def allow(self, size: int) -> None:
        """More time, for a body of `size` bytes."""
        self.due += size / LEAST_RATE


_current = threading.local()
_lock = threading.Lock()
_attempts: set[Attempt] = set()
_watching = False  # whether a thread of this process does


@contextlib.contextmanager
def attempt_until(due: float) -> Iterator[Attempt]:
    """What this thread sends in the context ends at `due`, by the monotonic clock."""
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
    """More time for the request of this thread, for a body of `size` bytes."""
    attempt = getattr(_current, "attempt", None)
    if attempt is not None:
        attempt.allow(size)


@contextlib.contextmanager
def within(seconds: float, kind: type[Exception] = TimeoutError) -> Iterator[None]:
    """What this thread sends in the context, over a client that is `bound`, and reads of the answer ends after so many
    seconds. Raises `kind` then."""
    with attempt_until(time.monotonic() + seconds) as attempt:
        try:
            yield
        except Exception:
            if not attempt.overdue:
                raise
        if attempt.overdue:
            raise kind(f"no whole answer within {seconds:.0f} s")


def bound(manager: Any) -> None:
    """Let the requests of a pool manager of urllib3 end with their attempt."""
    manager.pool_classes_by_scheme = {
        scheme: type(f"Bound{pool.__name__}", (pool,), {"ConnectionCls": bound_class(pool.ConnectionCls)})
        for scheme, pool in manager.pool_classes_by_scheme.items()
    }


def bound_class(connection: type) -> type:
    """A class of connections, of http.client or urllib3, whose requests end with their attempt."""

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
    """A child of a fork has no other threads, and maybe a lock that one of them held."""
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
                    # Not the method of a TLS socket, which would touch what another thread reads from.
                    socket.socket.shutdown(attempt.sock, socket.SHUT_RDWR)
