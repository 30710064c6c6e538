"""Log streams: the output of a process, in the store, as it grows.

A *stream* is the output of one process, and has one writer. Its folder has `stream.json` and the text in pieces. The
last piece grows by being put again; a full one is closed.

- Adding never waits.
- An unreachable store loses nothing until MAX_WAITING bytes wait; the log then reports how many were lost.
- At most KEPT_PIECES of a stream and KEPT_STREAMS of a folder are kept: the beginning and the end of each.
- Secrets are redacted before anything is written, in text that is cut at white space, which no secret contains.

`rank_logs` and `step_logs` decide which processes have a stream.
"""

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import ClassVar, Generic, TypeVar

from pydantic import BaseModel

from holdfast.runtime.output import LineCutter
from holdfast.runtime.secrets import redact
from holdfast.spec.errors import HoldfastError, MissingError
from holdfast.store.interface import ObjectInfo, Store

PIECE_BYTES = 256 * 2**10
FIRST_PIECES, KEPT_PIECES = 4, 64  # limits of a stream: 1 MiB of its beginning, 16 MiB in all
KEPT_STREAMS = 20  # limit of a folder
MAX_WAITING = 4 * 2**20  # bytes of a stream that wait for an unreachable store
DEADLINE = 20.0  # seconds for one write, all retries included
CLOSE_SECONDS = 4.0  # limit for the last lines of a process
DESCRIPTION = "stream.json"
_SPACE = re.compile(rb"\s(?=\S*\Z)")
_PIECE = re.compile(r"/(\d{6,})\.log$")

log = logging.getLogger("holdfast.logs")


class LogStream(BaseModel, frozen=True):
    """One process, and the folder of its output."""

    name: str  # name of its folder; the names of the streams of one folder are in the order of time
    node: str = ""
    pid: int = 0
    began: float = 0.0  # Unix seconds
    ended: float | None = None  # Unix seconds; None while it runs, and where its whole node was lost
    code: int | None = None  # exit code; None if no process saw it

    @property
    def writer(self) -> str:
        """The name of the process in messages."""
        return f"process {self.pid}"


S = TypeVar("S", bound=LogStream)


def stream_name() -> str:
    """A new name of a stream: names are in the order of time."""
    return f"{time.time_ns() // 1_000_000:013d}-{uuid.uuid4().hex[:8]}"


class StreamWriter(Generic[S]):
    """Writes one stream. `add` is for the thread that reads the lines, everything else for one other thread."""

    describes_silent: ClassVar[bool] = False  # whether a process that has printed nothing yet is described

    def __init__(self, opened: Callable[[], Store], folder: str, stream: S) -> None:
        """`opened` gives the store, and only that other thread calls it. `folder`: of all streams of this name."""
        self.stream: S = stream
        self._opened, self._folder = opened, folder
        self._waiting, self._taken, self._lost = bytearray(), 0, 0  # _taken: bytes at its head that are being written
        self._piece, self._number = b"", 0  # the content and the number of the open piece
        self._described: S | None = None
        self._away = False
        self._lock = threading.Lock()

    def add(self, data: bytes) -> None:
        """Add output. Never waits for the store."""
        with self._lock:
            self._waiting += data
            excess = len(self._waiting) - MAX_WAITING
            if excess > 0:  # the store is unreachable: drop the oldest whole lines
                line = self._waiting.find(b"\n", self._taken + excess)
                end = len(self._waiting) if line < 0 else line + 1
                self._lost += end - self._taken
                del self._waiting[self._taken : end]

    def describe(self, stream: S) -> None:
        """Set the current description of the process; the next flush writes it."""
        self.stream = stream

    def flush(self, *, last: bool = False) -> bool:
        """Write the waiting text, all of it if `last`. Return whether that succeeded. Text that is added meanwhile
        waits for the next flush, unless it fills a piece. So a process that prints all the time is written no more
        often."""
        try:
            if self._described is None and (self._waiting or last or self.describes_silent):
                self._make_room()
                self._describe()  # first: a reader of a line can then look up its process
            while batch := self._take(last):
                self._put(batch)
                if not last and len(self._waiting) < PIECE_BYTES:
                    break
            if self._described not in (None, self.stream):
                self._describe()
        except (HoldfastError, OSError) as error:
            if not self._away:
                log.warning(
                    "the log of %s waits in memory, %d bytes at most: %s", self.stream.writer, MAX_WAITING, error
                )
            self._away = True
            return False
        self._away = False
        return True

    def _take(self, last: bool) -> bytes:
        with self._lock:
            head = bytes(self._waiting[:PIECE_BYTES])
            if not last or len(self._waiting) > PIECE_BYTES:
                space = _SPACE.search(head)
                head = head[: space.end()] if space else head if len(head) == PIECE_BYTES else b""
            self._taken = len(head)
            return head

    def _put(self, batch: bytes) -> None:
        with self._lock:
            lost = self._lost
        note = f"\n[holdfast: {lost} bytes of this log were lost while the store was away]\n" if lost else ""
        text = redact(batch.decode("utf-8", "replace")).encode()
        piece = self._piece + note.encode() + text
        try:
            self._opened().put(self._key(f"{self._number:06d}.log"), piece)
        except BaseException:
            with self._lock:
                self._taken = 0
            raise
        with self._lock:
            del self._waiting[: self._taken]
            self._taken, self._lost = 0, self._lost - lost
        self._piece = piece
        if len(piece) >= PIECE_BYTES:
            self._piece, self._number = b"", self._number + 1
            old = self._number + FIRST_PIECES - KEPT_PIECES
            if old >= FIRST_PIECES:
                self._opened().delete(self._key(f"{old:06d}.log"))

    def _describe(self) -> None:
        stream = self.stream
        self._opened().put(self._key(DESCRIPTION), stream.model_dump_json().encode())
        self._described = stream

    def _make_room(self) -> None:
        """Remove the oldest surplus streams of this folder."""
        with suppress(HoldfastError, OSError):  # the next stream tries again
            keys = [info.key for info in self._opened().list(self._folder)]
            names = sorted({key[len(self._folder) :].partition("/")[0] for key in keys} - {self.stream.name})
            surplus = tuple(f"{self._folder}{name}/" for name in names[: max(0, len(names) - KEPT_STREAMS + 1)])
            self._opened().delete_many([key for key in keys if key.startswith(surplus)] if surplus else [])

    def _key(self, name: str) -> str:
        return f"{self._folder}{self.stream.name}/{name}"


class StreamReader:
    """Reads the lines of one stream, while it grows and afterwards."""

    def __init__(self, store: Store, folder: str) -> None:
        """`folder`: of the stream."""
        self._store, self._folder = store, folder
        self._read: dict[int, int] = {}  # bytes of each piece
        self._cutter = LineCutter()

    def new_lines(self, objects: Sequence[ObjectInfo] | None = None) -> Iterator[str]:
        """The lines since the last call; the last one only once it is whole. `objects`: of its folder, if listed."""
        infos = self._store.list(self._folder) if objects is None else objects
        pieces = ((int(match[1]), info) for info in infos if (match := _PIECE.search(info.key)))
        for number, info in sorted(pieces, key=lambda piece: piece[0]):
            start = self._read.get(number, 0)
            if info.size <= start or number < max(self._read, default=0):
                continue
            if number > max(self._read, default=-1) + 1:
                yield from self._lines(b"\n[holdfast: what was printed here is not kept; see docs/logs.md]\n")
            try:
                data = self._store.get(info.key, start)
            except MissingError:  # no longer kept
                continue
            self._read[number] = start + len(data)
            yield from self._lines(data)

    def rest(self) -> Iterator[str]:
        """The last line, if it has no end."""
        for line in self._cutter.rest():
            yield line.decode("utf-8", "replace")

    def _lines(self, data: bytes) -> Iterator[str]:
        for line in self._cutter.add(data):
            yield line.rstrip(b"\r").decode("utf-8", "replace")
