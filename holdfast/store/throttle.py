"""A store whose uploads keep to a rate, so that checkpoints leave the network to what trains.

Promises the rate over everything that goes through one throttle, whatever the threads and stores. It holds writes of
bytes (put, put_stream, upload) before they are sent, a MiB at a time, so no request waits half sent; what one request
carries goes out as fast as the network takes it. Commits (put_if_absent, compare_and_swap) and reads never wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from holdfast.spec.errors import MissingError
from holdfast.store.interface import Buffer, Data, Store
from holdfast.store.payload import size_of, views

BLOCK_BYTES = 2**20
LOOK_SECONDS = 0.5  # how soon a waiting write sees that the throttle was lifted


class Throttle:
    """Lets `bytes_per_second` through, first come, first served. Once `lifted()` says so, everything passes: a last
    save before a deadline must not be late."""

    def __init__(
        self,
        bytes_per_second: float,
        lifted: Callable[[], bool] = lambda: False,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._lifted, self._clock, self._sleep = bytes_per_second, lifted, clock, sleep
        self._lock = threading.Lock()
        self._free = clock()  # when all that was let through before has had its time

    def take(self, size: int) -> None:
        """Wait until it is the turn of `size` more bytes."""
        with self._lock:
            turn = max(self._free, self._clock())
            self._free = turn + size / self._rate
        while not self._lifted() and (left := turn - self._clock()) > 0:
            self._sleep(min(left, LOOK_SECONDS))


def throttled(store: Store, throttle: Throttle) -> Store:
    """`store`, its uploads held to what the throttle lets through."""
    return cast(Store, _Throttled(store, throttle))


class _Throttled:
    def __init__(self, store: Store, throttle: Throttle) -> None:
        self._store, self._throttle = store, throttle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __repr__(self) -> str:
        return f"{self._store!r}, throttled"

    def put(self, key: str, data: Data) -> None:
        pieces = views(data)

        def content() -> Iterator[Buffer]:
            for piece in pieces:
                for start in range(0, piece.nbytes, BLOCK_BYTES):
                    yield piece[start : start + BLOCK_BYTES]

        self.put_stream(key, size_of(pieces), content)

    def put_stream(self, key: str, size: int, content: Callable[[], Iterator[Buffer]]) -> None:
        def held() -> Iterator[Buffer]:
            for block in content():
                self._throttle.take(memoryview(block).nbytes)
                yield block

        self._store.put_stream(key, size, held)

    def upload(self, path: Path, key: str) -> None:
        if not path.is_file():
            raise MissingError(f"upload {key}: {path}: no such file")

        def content() -> Iterator[Buffer]:
            with path.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    yield block

        self.put_stream(key, path.stat().st_size, content)
