"""The one channel of events: emitting them from any process, and parsing their lines.

`emit` neither waits nor raises. An event goes immediately to the pipe that HOLDFAST_EVENTS names (an append-only file,
or a FIFO with a reader). If a recording is open (`event_log`), it also goes to the store in the background. An event is
one JSON line below 4 KiB. Readers skip unknown kinds and invalid lines. Logs are for people; no program reads them.
"""

import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from holdfast.steps.command_line import report_progress
from holdfast.telemetry.event_base import VERSION
from holdfast.telemetry.events import Event, PhaseProgress, Progress

PIPE = "HOLDFAST_EVENTS"  # files, as in PATH, that every process on this machine appends its events to
MAX_LINE = 4096  # bytes: what a FIFO takes in one piece

log = logging.getLogger("holdfast.events")

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def line_of(event: Event) -> bytes:
    """The event as a line of JSON. Raises ValueError if it is too long."""
    line = event.model_dump_json(exclude_none=True).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise ValueError(f"{len(line)} bytes are more than {MAX_LINE}: give it fewer texts")
    return line


def events_in(lines: Iterable[bytes]) -> Iterable[Event]:
    """The events in lines of JSON; other lines are skipped."""
    for line in lines:
        with suppress(ValidationError):
            event = _ADAPTER.validate_json(line)
            if event.v <= VERSION and event.writer and _is_finite(event):
                yield event


def _is_finite(event: Event) -> bool:
    """Whether all numbers of an event are finite: a line of another process may hold 1e999."""
    for value in vars(event).values():
        if type(value) is float and not math.isfinite(value):
            return False
        if type(value) is dict and not all(type(item) is not float or math.isfinite(item) for item in value.values()):
            return False
    return True


def emit(event: Event) -> None:
    """Send an event to all listeners and pipes. Never waits, and never raises."""
    try:
        _here.tell(event)
    except Exception as error:  # noqa: BLE001 - reporting on a training must not end it
        log.debug("event %s is lost: %s", event.kind, error)


def append_line(line: bytes) -> None:
    """Append the line of an event to this process's pipes. The event is of a process on another machine."""
    _here.append(line)


def set_source(source: str, *, launch: int | None = None, attempt: int | None = None, not_before: float = 0.0) -> None:
    """Set the source of this process's later events. `not_before`: the time (Unix seconds) of an event that precedes
    all of them, so that the order is right where this machine's clock is behind."""
    _here.source, _here.launch, _here.attempt = source, launch, attempt
    _here.last = max(_here.last, not_before)


def show_in_argo(event: Event) -> None:
    """Write the step's progress to ARGO_PROGRESS_FILE, if that is set and the event has it."""
    if isinstance(event, Progress):
        report_progress(event.step, event.steps)
    elif isinstance(event, PhaseProgress):
        report_progress(event.done, event.total)


def add_listener(listener: Callable[[Event, bytes], None]) -> Callable[[], None]:
    """Call `listener` with every later event of this process and its line. Returns a function that ends this. The
    listener must not wait."""
    process = _here
    process.listeners = [*process.listeners, listener]  # another list: the old one may be in use at this moment

    def forget() -> None:
        process.listeners = [other for other in process.listeners if other != listener]

    return forget


class _Process:
    """This process as a writer of events."""

    def __init__(self) -> None:
        self.source, self.launch, self.attempt = "", None, None  # type: str, int | None, int | None
        self.listeners: list[Callable[[Event, bytes], None]] = []
        self.last = 0.0
        self._writer = uuid.uuid4().hex[:12]
        self._number = 0
        self._lock = threading.Lock()
        self._pipes: dict[str, int] = {}

    def tell(self, event: Event) -> None:
        with self._lock:  # so that every reader sees them in the order of their numbers
            self._number, self.last = self._number + 1, max(self.last + 1e-6, time.time())
            labels = {
                "source": event.source or self.source,
                "launch": self.launch if event.launch is None else event.launch,
                "attempt": self.attempt if event.attempt is None else event.attempt,
            }
            event = event.model_copy(
                update={"time": self.last, "writer": self._writer, "number": self._number, **labels}
            )
            line = line_of(event)
            self._append(line)
            for listener in self.listeners:
                listener(event, line)

    def append(self, line: bytes) -> None:
        with self._lock:
            self._append(line)

    def _append(self, line: bytes) -> None:
        for path in filter(None, os.environ.get(PIPE, "").split(os.pathsep)):
            try:
                if path not in self._pipes:
                    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
                    flags |= 0 if Path(path).is_fifo() else os.O_CREAT
                    self._pipes[path] = os.open(path, flags, 0o666)
                os.write(self._pipes[path], line)  # in one piece: the lines of several processes do not mix
            except OSError as error:  # no reader, or a full disk; the store still has the event
                log.debug("%s: an event is not reported: %s", path, error)


_here = _Process()


def _forget() -> None:
    global _here  # noqa: PLW0603 - a forked process is another writer
    _here = _Process()


os.register_at_fork(after_in_child=_forget)
