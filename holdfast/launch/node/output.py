"""Output of this node's ranks: passed on without secrets, and kept in the store as it grows.

Every rank prints into a pipe that a thread of the supervising process always empties, line by line. It writes first to
this process's standard output, then to memory. Another thread writes to the store, so a slow or unavailable store never
blocks a rank. What a rank printed before it died is still taken. `holdfast.telemetry.rank_logs` stores it.

The node's own events go the same way, through `holdfast.telemetry.event_log`. The store is not opened before the first
event, and a store that cannot be opened ends no process.
"""

from __future__ import annotations

import argparse
import codecs
import logging
import os
import selectors
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from holdfast.launch.exits import RankExit
from holdfast.runtime.exits import join_within
from holdfast.runtime.node import NAMESPACE_VARIABLE, POD_VARIABLE, node_name
from holdfast.runtime.secrets import StreamRedactor
from holdfast.spec.errors import HoldfastError
from holdfast.store import open_store
from holdfast.store.log_stream import CLOSE_SECONDS, DEADLINE
from holdfast.telemetry import emit
from holdfast.telemetry.channel import set_source
from holdfast.telemetry.event_log import EventWriter
from holdfast.telemetry.events import Event
from holdfast.telemetry.rank_logs import RankLog, new_stream

FLUSH_SECONDS = 5.0  # from a line to the start of its put to the store
TAKE_SECONDS = 1.0  # for the last lines of the ranks
LINE_SECONDS = 0.5  # wait for the rest of a started line
_CHUNK = 1 << 16

log = logging.getLogger("holdfast.launch")


@dataclass(frozen=True)
class Place:
    """Where the output of a launch's ranks is kept."""

    store: str
    run_id: str
    launch: int

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Place | None:
        """The place that the ranks' arguments name; None if they name no run."""
        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        parser.add_argument("--run-id")
        parser.add_argument("--launch", type=int)
        parser.add_argument("--store")
        try:
            options = parser.parse_known_args(list(arguments))[0]
        except (argparse.ArgumentError, SystemExit):
            return None
        return cls(options.store, options.run_id, options.launch) if all(vars(options).values()) else None


@dataclass(eq=False)
class _Pipe:
    """The output of one process, until its lines are complete."""

    rank: _Rank | None  # None if nothing is kept in the store
    redactor: StreamRedactor = field(default_factory=StreamRedactor)
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def take(self, data: bytes) -> bytes:
        """Add what was read, b"" at the end. Returns the output that may be passed on by now."""
        ready = self.redactor.add(self.decoder.decode(data, final=not data))
        return (ready if data else ready + self.redactor.rest()).encode()


@dataclass
class _Rank:
    log: RankLog
    record: Path  # its own record, see `RankRecord`
    at_end: bool = False  # no more output comes
    kept: bool = False  # all output is stored
    done: bool = False  # and how it ended


class RankOutput:
    """The output of this node's ranks. Threads start with the first rank."""

    def __init__(self, place: Place | None, records: Path, flush_seconds: float = FLUSH_SECONDS) -> None:
        """`records` is the folder of the ranks' own records. Without a place, output is only passed on."""
        self._place, self._records, self._pause = place, records, flush_seconds
        self._opened = cache(lambda: open_store(place.store if place else "", deadline=DEADLINE))
        self._ranks: list[_Rank] = []
        self._codes: Mapping[int, int] = {}
        self._open = 0  # pipes that may still deliver output
        self._changed = threading.Condition()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._threads: list[threading.Thread] = []

    def pipe(self) -> tuple[int, int]:
        """A pipe for a rank that is about to start: (read end, write end). The rank gets the write end as its standard
        streams, and the caller closes it after the start."""
        return os.pipe2(os.O_CLOEXEC)

    def follow(self, reader: int, rank: int, pid: int) -> None:
        """Take the output of that process from now on."""
        followed: _Rank | None = None
        if self._place is not None:
            stream = new_stream(rank, self._place.launch, pid, **_own_place())
            followed = _Rank(RankLog(self._opened, self._place.run_id, stream), self._records / f"{pid}.json")
        with self._changed:
            if followed is not None:
                self._ranks.append(followed)
            self._open += 1
            self._selector.register(reader, selectors.EVENT_READ, _Pipe(followed))
            if not self._threads:
                self._threads = [
                    threading.Thread(target=work, name=f"output {name}", daemon=True)
                    for name, work in (("pass", self._pass_on), ("keep", self._keep))
                ]
                for thread in self._threads:
                    thread.start()
        os.write(self._wake, b"!")

    def add(self, pid: int, text: bytes) -> None:
        """Add a text of another process to the log of that process."""
        _print(text)
        with self._changed:
            logs = [rank for rank in self._ranks if rank.log.stream.pid == pid]
        for rank in logs[-1:]:
            rank.log.add(text)

    def take_rest(self, seconds: float = TAKE_SECONDS) -> None:
        """Pass on what is left in the pipes after the ranks have ended. Waits at most `seconds`: a process that a rank
        left running may keep its pipe open forever."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, seconds)

    def close(self, codes: Mapping[int, int], seconds: float = CLOSE_SECONDS) -> None:
        """Store what was taken, within `seconds`. `codes`: process id → exit code that torchrun saw."""
        with self._changed:
            self._codes = codes
            for rank in self._ranks:
                rank.at_end = True
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads[1:]:
            join_within(thread, seconds)
            if thread.is_alive() or any(not rank.done for rank in self._ranks):
                log.warning("the last lines of the ranks did not reach the store in %g s", seconds)

    def _pass_on(self) -> None:
        unfinished: set[_Pipe] = set()  # pipes with an incomplete line
        while True:
            ready = self._selector.select(LINE_SECONDS if unfinished else None)
            for pipe in () if ready else unfinished:
                _pass(pipe, pipe.redactor.rest().encode())
            if not ready:
                unfinished.clear()
            for key, _ in ready:
                if key.fd == self._woken:
                    with suppress(BlockingIOError):
                        os.read(self._woken, _CHUNK)
                    continue
                pipe, data = key.data, _read(key.fd)
                _pass(pipe, pipe.take(data))
                unfinished.discard(pipe)
                if data:
                    unfinished |= {pipe} if pipe.redactor.waiting else set()
                    continue
                self._selector.unregister(key.fd)
                os.close(key.fd)
                with self._changed:
                    self._open -= 1
                    if pipe.rank is not None:
                        pipe.rank.at_end = True
                    self._changed.notify_all()

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or any(r.at_end and not r.kept for r in self._ranks), self._pause
                )
                closing = self._closing
                ranks = [rank for rank in self._ranks if not rank.done]
            unwritten = False
            for rank in ranks:
                last = rank.at_end
                self._look_at(rank, last)
                is_written = rank.log.flush(last=last)
                rank.kept = last and is_written
                rank.done = rank.kept and (closing or rank.log.stream.code is not None)
                unwritten |= not is_written
            if closing and not unwritten:
                return
            if unwritten:  # the rest of a closed rank is retried like everything else
                time.sleep(min(1.0, self._pause))

    def _look_at(self, one: _Rank, last: bool) -> None:
        """Read from the rank's own record which attempt it is, and how it ended."""
        stream, record = one.log.stream, None
        with suppress(OSError, ValidationError):
            record = RankExit.model_validate_json(one.record.read_bytes())
        fields: dict[str, object] = {"attempt": record.attempt if record and record.attempt else stream.attempt}
        if last:
            code = record.code if record and record.code is not None else self._codes.get(stream.pid)
            fields |= {"ended": time.time() if stream.ended is None else stream.ended, "code": code}
        one.log.describe(stream.model_copy(update=fields))


def _own_place() -> dict[str, str]:
    """Where this node is, for a person who wants to reach it: by its scheduler's names."""
    variables = {"pod": POD_VARIABLE, "namespace": NAMESPACE_VARIABLE, "job": "SLURM_JOB_ID"}
    return {"node": node_name()} | {name: os.environ.get(variable, "") for name, variable in variables.items()}


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, _CHUNK)
    except OSError:
        return b""


def _pass(pipe: _Pipe, text: bytes) -> None:
    if text:
        _print(text)
        if pipe.rank is not None:
            pipe.rank.log.add(text)


def _print(data: bytes) -> None:
    view = memoryview(data)
    with suppress(OSError):  # the reader is gone
        while view:
            view = view[os.write(1, view) :]


class NodeEvents:
    """`with NodeEvents(place) as events`: events that are emitted in the block are written by its end."""

    def __init__(self, place: Place | None = None) -> None:
        """`place` is the run that the events belong to. Without it, they go only to the pipe."""
        self._place, self._lock = place, threading.Lock()
        self._writer: EventWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def tell(self, event: Event) -> None:
        """Emit an event, from any thread. The first one opens the store, within 20 seconds. Raises nothing."""
        with self._lock, suppress(HoldfastError, OSError):
            if self._place is not None and self._writer is None:
                set_source("node", launch=self._place.launch)
                self._writer = EventWriter(open_store(self._place.store, deadline=DEADLINE), self._place.run_id)
        emit(event)
