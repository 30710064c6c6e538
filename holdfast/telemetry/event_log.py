"""The events of a run in the store: writing and reading.

Every process writes its own objects, `runs/<id>/events/<writer>-<segment>.jsonl`. The last one grows by being put again
every few seconds, and is closed when it is large enough. The writer never blocks the caller. An unreachable store loses
nothing until MAX_WAITING bytes wait; the number of lost events is then reported. A reader sees each event once, in the
order of time and, of one process, in the order in which they were emitted.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.runtime.exits import code_of, join_within
from holdfast.spec.errors import ExitCode, HoldfastError, MissingError
from holdfast.store import ObjectInfo, Store, layout
from holdfast.store.parallel import in_parallel
from holdfast.telemetry.channel import add_listener, emit, events_in, set_source
from holdfast.telemetry.event_folding import MOST, condense, is_fold
from holdfast.telemetry.events import Event, Progress, StepBegan, StepEnded, WarningIssued
from holdfast.telemetry.serving import show_traces

FLUSH_SECONDS = 5.0  # delay from an event of a stream to the store; a notable one is written immediately
CLOSE_SECONDS = 5.0  # limit for the last events
SEGMENT_BYTES = 256 * 2**10
MAX_WAITING = 2**20  # bytes of events that wait for an unreachable store
BATCH_BYTES = 4 * 2**20  # limit of objects that are read together
TRIES = 5  # limit for a reader whose objects are folded while it reads
WRONG_CLOCK = 3600.0  # seconds that a store's clock may be behind: S3 refuses requests at a quarter of it

log = logging.getLogger("holdfast.events")


class EventWriter:
    """Writes the events of this process into the store, in its own thread, until it is closed."""

    def __init__(self, store: Store, run_id: str, flush_seconds: float = FLUSH_SECONDS) -> None:
        self._store, self._run_id, self._pause = store, run_id, flush_seconds
        self._name = f"{time.time_ns() // 1_000_000:013d}-{uuid.uuid4().hex[:8]}"
        self._segment, self._number = b"", 0  # the content and the number of the open object
        self._waiting: list[tuple[bytes, bool]] = []  # lines, and whether they are notable
        self._bytes = self._flying = self._lost = 0  # _bytes: in `_waiting`; _flying: lines at its head being written
        self._urgent = self._closing = self._away = False
        self._changed = threading.Condition()
        self._forget = add_listener(self._take)
        self._thread = threading.Thread(target=self._write_all, name="events", daemon=True)
        self._thread.start()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write the rest, waiting for at most `seconds`."""
        self._forget()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        join_within(self._thread, seconds)
        if self._thread.is_alive() or self._waiting:
            log.warning("the last %d events of run %s did not reach the store", len(self._waiting), self._run_id)

    def _take(self, event: Event, line: bytes) -> None:
        with self._changed:
            self._waiting.append((line, event.notable))
            self._bytes += len(line)
            while self._bytes > MAX_WAITING:  # the store is unreachable
                kept = range(self._flying, len(self._waiting))
                oldest = next((index for index in kept if not self._waiting[index][1]), self._flying)
                self._bytes -= len(self._waiting.pop(oldest)[0])
                self._lost += 1
            if event.notable and not self._away:
                self._urgent = True
                self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._closing, self._pause)
                self._urgent, last = False, self._closing
                batch = self._batch()
                self._flying = len(batch)
            is_written = not batch or self._put(batch)
            if last and (not is_written or not self._waiting):
                return

    def _batch(self) -> list[bytes]:
        """The waiting lines that the open segment takes. The caller holds `_changed`."""
        size, batch = len(self._segment), []
        for line, _ in self._waiting:
            size += len(line)
            batch.append(line)
            if size >= SEGMENT_BYTES:
                break
        return batch

    def _put(self, batch: list[bytes]) -> bool:
        """Write the lines. Return whether that succeeded."""
        data = self._segment + b"".join(batch)
        try:
            self._store.put(layout.events(self._run_id, self._name, self._number), data)
        except (HoldfastError, OSError) as error:
            if not self._away:
                log.warning("events of run %s wait in memory, %d bytes at most: %s", self._run_id, MAX_WAITING, error)
            self._away = True
            return False
        with self._changed:
            self._segment = data
            if len(data) >= SEGMENT_BYTES:
                self._segment, self._number = b"", self._number + 1
            del self._waiting[: len(batch)]
            self._bytes -= sum(map(len, batch))
            self._urgent |= any(notable for _, notable in self._waiting) or self._bytes >= SEGMENT_BYTES
            self._flying, self._away, lost, self._lost = 0, False, self._lost, 0
        if lost:
            emit(WarningIssued(message=f"{lost} events were lost while the store was away"))
        return True


@contextmanager
def recording(
    store: Store,
    run_id: str,
    source: str,
    *,
    launch: int | None = None,
    attempt: int | None = None,
    not_before: float = 0.0,
) -> Iterator[None]:
    """Write the events of this process into the store, under these names, while in the context. An empty `run_id`
    writes nothing to the store."""
    set_source(source, launch=launch, attempt=attempt, not_before=not_before)
    writer = EventWriter(store, run_id) if run_id else None
    try:
        yield
    finally:
        if writer is not None:
            writer.close()


@contextmanager
def recorded_step(store: Store, run_id: str, name: str, not_before: float = 0.0) -> Iterator[Callable[[str], None]]:
    """A step of the DAG that works on a run. Its beginning and its end are events. An empty `run_id` means unknown, and
    nothing goes to the store. Call the yielded function with the result."""
    with recording(store, run_id, name, not_before=not_before), _traced(run_id):
        began, results = time.monotonic(), [""]
        emit(StepBegan(name=name))
        code, reason = ExitCode.OK, ""
        try:
            yield results.append
        except BaseException as error:
            code, reason = code_of(error), str(error) or type(error).__name__
            raise
        finally:
            seconds = time.monotonic() - began
            emit(StepEnded(name=name, code=code, seconds=seconds, reason=reason, result=results[-1]))


@contextmanager
def _traced(run_id: str) -> Iterator[None]:
    """Send the span of the step that this process is, if traces are enabled."""
    if (traces := show_traces(run_id)) is None:
        yield
        return

    def take(event: Event, _line: bytes) -> None:
        if isinstance(event, StepBegan | StepEnded):
            traces.take(event)

    forget = add_listener(take)
    try:
        yield
    finally:
        forget()
        traces.close()


def read_events(
    store: Store, run_id: str, after: float = 0.0, kinds: Collection[type[Event]] | None = None
) -> list[Event]:
    """The events of a run that are later than `after` (Unix seconds), in order, each once; only those of `kinds`, if
    given. Objects whose last write, by the store's clock, was long before are not read. Of a long run, continuous kinds
    are condensed (`event_folding.condense`), so that it fits into memory."""
    events = StoreEvents(store, run_id, after - WRONG_CLOCK, kinds).new()
    return [event for event in events if event.time > after]


class _Once:
    """Lets each event pass once."""

    def __init__(self, seen: Mapping[str, int] | None = None) -> None:
        self.seen = dict(seen or {})

    def of(self, events: Iterable[Event]) -> list[Event]:
        """Those that have not passed yet, in order."""
        fresh = []
        for event in sorted(events, key=_order):
            if event.number > self.seen.get(event.writer, 0):
                self.seen[event.writer] = event.number
                fresh.append(event)
        return fresh


def _order(event: Event) -> tuple[float, str, int]:
    return event.time, event.writer, event.number


def _fewer(events: Iterable[Event]) -> list[Event]:
    """The events in order, condensed to MOST where that is possible."""
    ordered = sorted(events, key=_order)
    while len(ordered) > MOST and len(condensed := condense(ordered)) < len(ordered):
        ordered = condensed
    return ordered


class StoreEvents:
    """Follows the events of a run in the store."""

    def __init__(
        self, store: Store, run_id: str, since: float = 0.0, kinds: Collection[type[Event]] | None = None
    ) -> None:
        """Objects that were last written before `since` (Unix seconds, by the store's clock) are left out. `kinds`: the
        only kinds to return."""
        self._store, self._run_id, self._since = store, run_id, since
        self._marks = None if kinds is None else [_mark_of(kind) for kind in kinds]
        self._read: dict[str, int] = {}  # bytes of each object
        self._once = _Once()

    def new(self) -> list[Event]:
        """The events since the last call that returned, in order, each once; condensed if more than MOST. Raises what
        the store raises."""
        for attempt in range(TRIES):
            try:
                return self._new()
            except MissingError:  # it was folded into a larger one since it was listed
                if attempt == TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _new(self) -> list[Event]:
        events: list[Event] = []
        fresh: list[Event] = []
        read, once = dict(self._read), _Once(self._once.seen)  # copies: after a store error, the next call reads again
        all_infos = list(self._store.list(layout.run(self._run_id, "events/")))
        for infos in self._batches(all_infos, read):
            starts = [(info.key, read.get(info.key, 0)) for info in infos]
            for (key, start), data in zip(starts, in_parallel(lambda one: self._store.get(*one), starts), strict=True):
                read[key] = start + len(data)
                fresh += events_in(self._wanted(data.splitlines()))
            if len(events) + len(fresh) > MOST:
                events, fresh = _fewer([*events, *once.of(fresh)]), []
        fresh = once.of(fresh)
        self._read, self._once = {info.key: read[info.key] for info in all_infos if info.key in read}, once
        return sorted([*events, *fresh], key=_order) if events else fresh

    def _batches(self, listed: Iterable[ObjectInfo], read: Mapping[str, int]) -> Iterator[list[ObjectInfo]]:
        """The objects with new data, BATCH_BYTES at a time or a little more."""
        batch: list[ObjectInfo] = []
        size = 0
        for info in listed:
            if info.size > (before := read.get(info.key, 0)) and info.modified >= self._since:
                batch.append(info)
                size += info.size - before
                if size >= BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def _wanted(self, lines: Iterable[bytes]) -> Iterable[bytes]:
        """The lines of the requested kinds; other lines are not even parsed."""
        if self._marks is None:
            return lines
        marks = self._marks
        return (line for line in lines if any(mark in line for mark in marks))


def _mark_of(kind: type[Event]) -> bytes:
    """The text that every line of a kind contains."""
    return f'"kind":"{kind.model_fields["kind"].default}"'.encode()


def newest_objects(store: Store, run_id: str) -> Iterator[list[Event]]:
    """The events of each object of a run, the object that changed last first. Folds, whose processes have ended, come
    last."""
    infos = store.list(layout.run(run_id, "events/"))
    for info in sorted(infos, key=lambda info: (not is_fold(info.key), info.modified, info.key), reverse=True):
        with suppress(MissingError):  # it was folded since it was listed
            yield list(events_in(store.get(info.key).splitlines()))


class PipeEvents:
    """Follows the file that HOLDFAST_EVENTS names for the processes of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._once = _Once()

    def new(self) -> list[Event]:
        """The events since the last call, in order, each once; condensed if more than MOST. Reads BATCH_BYTES at a
        time."""
        events: list[Event] = []
        fresh: list[Event] = []
        with suppress(FileNotFoundError), self._path.open("rb") as pipe:
            pipe.seek(self._position)
            while data := pipe.read(BATCH_BYTES):
                complete = data[: data.rfind(b"\n") + 1]  # the end of the last line may still be missing
                if not complete and len(data) == BATCH_BYTES:
                    complete = data  # this is no event
                elif not complete:
                    break
                self._position += len(complete)
                pipe.seek(self._position)
                fresh += events_in(complete.splitlines())
                if len(events) + len(fresh) > MOST:
                    events, fresh = _fewer([*events, *self._once.of(fresh)]), []
        return sorted([*events, *self._once.of(fresh)], key=_order)


@dataclass(frozen=True)
class Reached:
    """The newest progress that the ranks reported."""

    step: int
    steps: int
    loss: float | None  # nats per token
    tokens_per_second: float | None  # None for a script
    seconds_left: float
    time: float  # of the report, in unix seconds
    text: str


def reached(store: Store, run_id: str) -> Reached | None:
    """The newest reported step of a run; None before the first. Reads only the newest events."""
    for events in newest_objects(store, run_id):
        if reports := [event for event in events if isinstance(event, Progress)]:
            newest = max(reports, key=lambda event: (event.time, event.step))
            return Reached(
                newest.step,
                newest.steps,
                newest.loss,
                newest.tokens_per_second,
                newest.seconds_left,
                newest.time,
                newest.text,
            )
    return None
