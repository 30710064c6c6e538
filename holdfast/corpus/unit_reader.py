"""Reader of the finished units of a corpus, in order.

The data read is the data written: a missing or damaged unit is made again immediately. So a lost unit costs only that
unit, and units that expired between two steps cause no error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from numpy.typing import NDArray

from holdfast.corpus.chat import ChatEncoder
from holdfast.corpus.encode import Encoder
from holdfast.corpus.units import Job, Part, Piece, read_index, read_part, tokenise
from holdfast.runtime.logs import log
from holdfast.spec.errors import DataError
from holdfast.store import Store

AHEAD = 4  # units that are read ahead of the current one

T = TypeVar("T")
Read = Callable[[Store, str, int], T | None]  # a part, by the unit's key and the part's number


class UnitReader:
    """The units of `pieces`, in order."""

    def __init__(self, store: Store, pieces: Sequence[Piece], job: Job) -> None:
        self._store, self.pieces, self._job = store, pieces, job
        self._settings = job.settings
        self.rebuilt: set[int] = set()  # numbers of the pieces that were made again

    def digests(self) -> Iterator[NDArray[Any]]:
        """The document digests of every part, without reading the tokens."""
        for _, index in self.indexes():
            yield index["digest"]

    def indexes(self) -> Iterator[tuple[Piece, NDArray[Any]]]:
        """The index of every part, with its piece, without reading the tokens."""
        for piece, found, _ in self._all(read_index, lambda found: found[1]):
            yield piece, found[0]

    def parts(self) -> Iterator[tuple[Piece, Part, bool]]:
        """Every part, with its piece, and whether it is the piece's last part."""
        return self._all(read_part, lambda part: part.last)

    def _all(self, read: Read[T], is_last: Callable[[T], bool]) -> Iterator[tuple[Piece, T, bool]]:
        """Read the first part of a unit ahead, because most units have one part."""
        waiting: deque[Future[T | None]] = deque()
        with ThreadPoolExecutor(AHEAD) as threads:
            try:
                for number, piece in enumerate(self.pieces):
                    for later in self.pieces[number + len(waiting) : number + AHEAD]:
                        waiting.append(threads.submit(read, self._store, later.key(self._settings), 0))
                    yield from self._unit(number, piece, waiting.popleft().result(), read, is_last)
            finally:
                threads.shutdown(cancel_futures=True)

    def _unit(
        self, number: int, piece: Piece, first: T | None, read: Read[T], is_last: Callable[[T], bool]
    ) -> Iterator[tuple[Piece, T, bool]]:
        at, last, part = 0, False, first
        while not last:
            if part is None:
                part = self._rebuild(number, piece, at, read)
            last = is_last(part)
            yield piece, part, last
            at += 1
            part = None if last else read(self._store, piece.key(self._settings), at)

    def _rebuild(self, number: int, piece: Piece, at: int, read: Read[T]) -> T:
        log.warning("unit %d of %d is missing or damaged: making it again", number + 1, len(self.pieces))
        self.rebuilt.add(number)
        key = piece.key(self._settings)
        tokenise(piece.here(), self._job, self._encoder, self._store)
        part = read(self._store, key, at)
        if part is None:
            raise DataError(
                f"{self._store.url}: unit {key} was damaged again as soon as it was written; check the store's disk, "
                "and that nothing deletes datasets/_units/ while preprocess runs"
            )
        return part

    @cached_property
    def _encoder(self) -> Encoder | ChatEncoder:
        return self._job.encoder()
