"""Heartbeat page of a process, in shared memory: step, phase, whether it waits for other ranks.

A mark is a few stores into a page of a file that reader and writer have mapped. It takes about a microsecond, without a
system call or a thread. So the page is also correct for a process that is stopped, stuck in C or waiting for a
collective. Each slot is whole (8 aligned bytes). Slots may be of different moments, so the reader reads repeatedly.
Phases are numbers here: `telemetry/phases` names them and marks the page, `launch/node/watchdog` reads it.
"""

import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

SUFFIX = ".place"
REMEMBERED = 32  # durations of steps
_PAGE = 4096
_MAGIC = 0x686F6C6466617374
_NUMBER, _RANK, _WORLD, _STEP, _PHASE, _WAITING, _REQUESTS, _BEATS, _STEPS, _ALLOWED = range(10)  # 8-byte slots
_DURATIONS, _OWN, _WAITED = 16, 64, 128  # offsets of the tables: of steps, and two by phase


@dataclass(frozen=True)
class Seen:
    """A page at one moment."""

    rank: int
    world: int
    step: int  # optimizer steps done
    phase: int
    waiting: bool  # for other ranks
    requests: int  # to the store or a server of answers, without a response yet
    beats: int  # marks so far
    steps: tuple[float, ...]  # seconds of the newest steps, REMEMBERED at most
    allowed: float = 0.0  # seconds that an open request may take in addition to the usual limit

    @property
    def usual(self) -> float | None:
        """The median of the newest steps in seconds; None before there are three."""
        return median(self.steps) if len(self.steps) >= 3 else None


class HeartbeatPage:
    """The page of this process. One thread at a time enters phases."""

    def __init__(
        self, page: mmap.mmap | bytearray, begins: int = 0, outside: Sequence[int] = (), rank: int = 0, world: int = 1
    ) -> None:
        """A step begins with the phase `begins`. Time in the phases `outside` belongs to no step."""
        self._q, self._d = memoryview(page).cast("Q"), memoryview(page).cast("d")
        self._begins, self._outside = begins, [table + phase for table in (_OWN, _WAITED) for phase in outside]
        self._thread, self._lock = threading.get_ident(), threading.Lock()
        self._since = time.monotonic()
        self._begun: tuple[int, float, float] | None = None  # newest step: number, start, time in `outside` phases
        self._first = True
        self._q[_RANK], self._q[_WORLD] = rank, world
        self._q[_NUMBER] = _MAGIC  # last: the page is complete

    def enter(self, phase: int, step: int, now: float) -> None:
        """Begin a phase after `step` optimizer steps; `now` is from `time.monotonic`."""
        self._mark(now)
        self._q[_PHASE], self._q[_STEP], self._q[_WAITING] = phase, step, 0
        if phase == self._begins and (self._begun is None or self._begun[0] != step):
            self._begin_step(step, now)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark that this rank waits for others within the context. Only the thread that made this object counts."""
        if threading.get_ident() != self._thread or self._q[_WAITING]:
            yield
            return
        self._mark(time.monotonic())
        self._q[_WAITING] = 1
        try:
            yield
        finally:
            self._mark(time.monotonic())
            self._q[_WAITING] = 0

    @contextmanager
    def requesting(self, allowed: float = 0.0) -> Iterator[None]:
        """Mark that a request is in progress within the context, to the store or to a server of answers. It may take
        `allowed` seconds in addition to the usual limit of a request. From any thread."""
        with self._lock:
            self._q[_REQUESTS] += 1
            self._d[_ALLOWED] = max(self._d[_ALLOWED], allowed)
        try:
            yield
        finally:
            with self._lock:
                self._q[_REQUESTS] -= 1
                if not self._q[_REQUESTS]:
                    self._d[_ALLOWED] = 0.0

    def own(self, phase: int) -> float:
        """Seconds in a phase up to the newest mark, without time spent waiting for other ranks."""
        return float(self._d[_OWN + phase])

    def _mark(self, now: float) -> None:
        table = _WAITED if self._q[_WAITING] else _OWN
        self._d[table + self._q[_PHASE]] += now - self._since
        self._since = now
        self._q[_BEATS] += 1

    def _begin_step(self, step: int, now: float) -> None:
        outside = sum(self._d[slot] for slot in self._outside)
        if self._begun is not None:
            if not self._first:  # the first step may compile
                count = self._q[_STEPS]
                self._d[_DURATIONS + count % REMEMBERED] = now - self._begun[1] - (outside - self._begun[2])
                self._q[_STEPS] = count + 1
            self._first = False
        self._begun = (step, now, outside)


class HeartbeatReader:
    """Reader of another process's page."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it does not exist, and ValueError if it is incomplete."""
        with path.open("rb") as file:
            page = mmap.mmap(file.fileno(), _PAGE, prot=mmap.PROT_READ)
        self._q, self._d = memoryview(page).cast("Q"), memoryview(page).cast("d")
        if self._q[_NUMBER] != _MAGIC:
            raise ValueError(f"{path} has no place in it yet")

    def read(self) -> Seen:
        """The current content of the page."""
        q, count = self._q, min(self._q[_STEPS], REMEMBERED)
        return Seen(
            q[_RANK],
            q[_WORLD],
            q[_STEP],
            q[_PHASE],
            bool(q[_WAITING]),
            q[_REQUESTS],
            q[_BEATS],
            tuple(self._d[_DURATIONS : _DURATIONS + count]),
            self._d[_ALLOWED],
        )


here = HeartbeatPage(bytearray(_PAGE))


def publish(folder: Path | None, begins: int, outside: Sequence[int]) -> HeartbeatPage:
    """Move the page of this process to a file in `folder`, named after its process id. It is in no file without a
    folder, or where none can be made. Call it in the thread that trains. See HeartbeatPage for the other arguments."""
    global here  # noqa: PLW0603 - a process is one rank
    page: mmap.mmap | bytearray = bytearray(_PAGE)
    if folder is not None:
        with suppress(OSError), (folder / f"{os.getpid()}{SUFFIX}").open("w+b") as file:
            file.truncate(_PAGE)
            page = mmap.mmap(file.fileno(), _PAGE)
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    here = HeartbeatPage(page, begins, outside, rank, world)
    return here


def _forget() -> None:
    """Start a new page in a forked process, which must not write to the page of its parent."""
    global here  # noqa: PLW0603 - a process has one
    here = HeartbeatPage(bytearray(_PAGE))


os.register_at_fork(after_in_child=_forget)
