"""An object whose bytes are produced as they are written: none of it is in memory or on a disk beforehand.

The bytes are requested once and in their order, for any number of threads that write them in parts. A producer that
yields another number of bytes than announced leaves no object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from holdfast.spec.errors import DataError
from holdfast.store.durable import COPY_BYTES, write
from holdfast.store.interface import Buffer
from holdfast.store.payload import Pieces

Content = Callable[[], Iterator[Buffer]]  # yields the bytes from the first one, each time it is called


class Stream:
    """The `size` bytes of the object `key`, in parts. Each thread waits until the bytes before its part are
    produced."""

    def __init__(self, key: str, size: int, content: Content) -> None:
        self._key, self._size, self._content = key, size, content
        self._turn = threading.Condition()
        self._made: Iterator[Buffer] = iter(())
        self._rest = memoryview(b"")
        self._position = 0
        self._failed = False

    def part(self, start: int, length: int) -> Pieces:
        """The bytes [start, start + length), which follow those of the previous call; start 0 begins anew. Raises
        DataError, and any error of the producer."""
        with self._turn:
            if start == 0:
                self._made, self._rest, self._position, self._failed = self._content(), memoryview(b""), 0, False
            self._turn.wait_for(lambda: self._position == start or self._failed)
            if self._failed:
                raise DataError(f"{self._key}: not written, since what comes before byte {start} could not be made")
            try:
                made = self._next(length)
            except BaseException:
                self._failed = True
                raise
            finally:
                self._turn.notify_all()
            return made

    def write_to(self, descriptor: int) -> None:
        """Write all of it to a file. Raises as `part` does."""
        for start in range(0, max(self._size, 1), COPY_BYTES):
            write(descriptor, self.part(start, min(COPY_BYTES, self._size - start)))

    def _next(self, length: int) -> Pieces:
        made: Pieces = []
        filled = 0
        while filled < length:
            if not self._rest.nbytes:
                following = next(self._made, None)
                if following is None:
                    raise self._wrong(f"ends after {self._position + filled}")
                self._rest = memoryview(following).cast("B")
            taken = self._rest[: length - filled]
            # Immutable bytes are not copied. The producer may reuse any other buffer for the next bytes.
            made.append(taken if type(taken.obj) is bytes else memoryview(bytes(taken)))
            filled += taken.nbytes
            self._rest = self._rest[taken.nbytes :]
        self._position += length
        if self._position == self._size and (self._rest.nbytes or any(memoryview(each).nbytes for each in self._made)):
            raise self._wrong("goes on beyond them")
        return made

    def _wrong(self, how: str) -> DataError:
        return DataError(f"{self._key}: {self._size} bytes were to be written, and what makes them {how}")
