"""A store with a limited upload rate, so that checkpoints leave the network to training.

The rate holds over everything that passes through one throttle, for all threads and stores. Writes of bytes (put,
put_stream, upload) are delayed before they are sent, a MiB at a time, so no request waits half sent. One request's
bytes are sent at the speed of the network. Commits (put_if_absent, compare_and_swap) and reads never wait.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from holdfast.spec.errors import MissingError
from holdfast.store.interface import Buffer, Data, Store
from holdfast.store.payload import size_of, views

BLOCK_BYTES = 2**20
LOOK_SECONDS = 0.5  # how soon a waiting write notices that the throttle was lifted


class Throttle:
    """Lets `bytes_per_second` through, first come, first served. Once `lifted()` is true, everything passes: a last
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
        self._free = clock()  # when the bytes admitted so far have had their time

    def take(self, size: int) -> None:
        """Wait for the slot of `size` more bytes."""
        with self._lock:
            turn = max(self._free, self._clock())
            self._free = turn + size / self._rate
        while not self._lifted() and (remaining := turn - self._clock()) > 0:
            self._sleep(min(remaining, LOOK_SECONDS))


def throttled(store: Store, throttle: Throttle) -> Store:
    """`store`, with its uploads limited by the throttle."""
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
