"""What the ranks of a run printed, in the store: how it is kept there, and how it is written.

Each process of a rank is a *stream* with one writer, who sees what it prints: `runs/<id>/logs/rank-NNNNN/<stream>/` has
`stream.json` and the text in pieces. The last piece grows by being put again; a full one is closed. Promises: adding
never waits; a store that is away loses nothing until MAX_WAITING bytes wait, and the log then says how many were lost;
no more than KEPT_PIECES of a stream and KEPT_STREAMS of a rank are kept, the beginning and the end of each; and
secrets are redacted before anything is written, in text that is cut at white space, which no secret has. Reading is
`rank_reader`'s.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from pydantic import BaseModel, ConfigDict

from holdfast.components.runtime.secrets import redact
from holdfast.components.spec.errors import HoldfastError
from holdfast.components.store import Store, layout

PIECE_BYTES = 256 * 2**10
FIRST_PIECES, KEPT_PIECES = 4, 64  # of a stream: 1 MiB of its beginning, 16 MiB in all
KEPT_STREAMS = 20  # of a rank
MAX_WAITING = 4 * 2**20  # bytes of a stream that wait for a store that is away
DESCRIPTION = "stream.json"
_SPACE = re.compile(rb"\s(?=\S*\Z)")

log = logging.getLogger("holdfast.logs")


class RankStream(BaseModel):
    """One process of a rank, and where what it printed is."""

    model_config = ConfigDict(frozen=True)

    name: str  # of its folder; the names of a rank's streams are in the order of launches and of time
    rank: int
    launch: int
    attempt: int | None = None  # of the gang that it formed; None before it did
    node: str = ""
    pid: int = 0
    began: float = 0.0  # unix seconds
    ended: float | None = None  # unix seconds; None while it runs, and where its whole node was lost
    code: int | None = None  # it ended with; None where nobody saw it


def new_stream(rank: int, launch: int, node: str, pid: int) -> RankStream:
    """The description of a process that begins now."""
    name = f"{launch:06d}-{time.time_ns() // 1_000_000:013d}-{uuid.uuid4().hex[:8]}"
    return RankStream(name=name, rank=rank, launch=launch, node=node, pid=pid, began=time.time())


class RankLog:
    """Writes one stream. `add` is for whoever reads what the rank prints, everything else for one other thread."""

    def __init__(self, opened: Callable[[], Store], run_id: str, stream: RankStream) -> None:
        """`opened` gives the store, and is called by that other thread only."""
        self.stream = stream
        self._opened, self._run_id = opened, run_id
        self._waiting, self._taken, self._lost = bytearray(), 0, 0  # bytes at its head that are being written
        self._piece, self._number = b"", 0  # what the open piece holds, and which one it is
        self._described: RankStream | None = None
        self._away = False
        self._lock = threading.Lock()

    def add(self, data: bytes) -> None:
        """Take what was printed. Never waits for the store."""
        with self._lock:
            self._waiting += data
            excess = len(self._waiting) - MAX_WAITING
            if excess > 0:  # the store is away: the oldest whole lines go
                line = self._waiting.find(b"\n", self._taken + excess)
                end = len(self._waiting) if line < 0 else line + 1
                self._lost += end - self._taken
                del self._waiting[self._taken : end]

    def describe(self, stream: RankStream) -> None:
        """What is known of the process now; written with the next flush."""
        self.stream = stream

    def flush(self, *, last: bool = False) -> bool:
        """Write what waits, all of it if it is the `last` time; whether that was done."""
        try:
            if self._described is None and (self._waiting or last):
                self._make_room()
                self._describe()  # first: whoever sees a line can ask whose it is
            while batch := self._take(last):
                self._put(batch)
            if self._described not in (None, self.stream):
                self._describe()
        except (HoldfastError, OSError) as error:
            if not self._away:
                log.warning(
                    "the log of rank %d waits in memory, %d bytes at most: %s", self.stream.rank, MAX_WAITING, error
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
        """Remove the oldest streams of the rank that are too many."""
        with suppress(HoldfastError, OSError):  # the next stream tries again
            folder = layout.rank_log(self._run_id, self.stream.rank)
            keys = [info.key for info in self._opened().list(folder)]
            names = sorted({key[len(folder) :].partition("/")[0] for key in keys} - {self.stream.name})
            surplus = tuple(f"{folder}{name}/" for name in names[: max(0, len(names) - KEPT_STREAMS + 1)])
            self._opened().delete_many([key for key in keys if key.startswith(surplus)] if surplus else [])

    def _key(self, name: str) -> str:
        return layout.rank_log(self._run_id, self.stream.rank, self.stream.name, name)
