"""What happens in a run, as typed events: the one channel for progress, launches, attempts, saves and endings.

Promises that `emit` neither waits nor raises: an event goes at once to the pipe that HOLDFAST_EVENTS names (an
append-only file, or a FIFO that somebody reads), and behind the caller's back to the store when a recording is open
(`event_log`). An event is one JSON line below 4 KiB without secrets. Readers skip
kinds they do not know and lines that are none. Logs are for people, and nothing reads them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from holdfast.components.runtime.argv import report_progress
from holdfast.components.runtime.secrets import redact
from holdfast.components.spec.errors import ExitCode

PIPE = "HOLDFAST_EVENTS"  # files, as in PATH, that every process on this machine appends its events to
VERSION = 1  # of the lines; a reader skips those of a later one
MAX_TEXT = 1000  # bytes of a text as JSON
MAX_NAME = 200
MAX_LINE = 4096  # bytes: what a FIFO takes in one piece

log = logging.getLogger("holdfast.events")


def _fitting(most: int) -> AfterValidator:
    def fit(text: str) -> str:
        text = redact(text).encode("utf-8", "replace").decode()
        while (excess := len(json.dumps(text, ensure_ascii=False).encode()) - 2 - most) > 0:
            text = text[: min(most, len(text) - max(2, excess // 6))].rstrip("…") + "…"
        return text

    return AfterValidator(fit)


Text = Annotated[str, _fitting(MAX_TEXT)]
Name = Annotated[str, _fitting(MAX_NAME)]


class _Event(BaseModel):
    """What all events have. `emit` fills these in."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    notable: ClassVar[bool] = True  # False: one of a stream, of which only the newest matters
    v: int = VERSION
    time: float = 0.0  # unix seconds; more than that of the event before it from the same writer
    writer: Name = ""  # the process
    number: int = 0  # of the event among the writer's, from 1: with the writer it names the event
    source: Name = ""  # who speaks: "launcher", "rank 0", "evaluate"
    launch: int | None = None
    attempt: int | None = None

    @property
    def text(self) -> str:
        """The event for a person, in one line."""
        raise NotImplementedError

    @property
    def is_news(self) -> bool:
        """Whether it interrupts a person who watches the run."""
        return False


class LaunchBegan(_Event):
    """A launcher starts a gang, or takes one over."""

    kind: Literal["launch_began"] = "launch_began"
    job: Name
    nodes: int
    processes: int  # on each node
    adopted: bool = False

    @property
    def text(self) -> str:
        """See _Event."""
        verb = "takes over" if self.adopted else "starts"
        return f"launch {self.launch}: {verb} {self.nodes} x {self.processes} processes as {self.job}"


class LaunchEnded(_Event):
    """The gang of a launch has ended."""

    kind: Literal["launch_ended"] = "launch_ended"
    code: int
    detail: Text = ""
    restart_in: float | None = None  # seconds until the next launch; None: there is none

    @property
    def text(self) -> str:
        """See _Event."""
        after = "" if self.restart_in is None else f"; starting the next in {self.restart_in:.0f} s"
        return _joined(f"launch {self.launch} ended ({in_words(self.code)}){after}", self.detail)

    @property
    def is_news(self) -> bool:
        """See _Event."""
        return self.restart_in is not None


class AttemptBegan(_Event):
    """The ranks have met, loaded the state and train from here."""

    kind: Literal["attempt_began"] = "attempt_began"
    world: int  # ranks
    step: int  # done before
    steps: int
    host: Name = ""  # of rank 0
    device: Name = ""

    @property
    def text(self) -> str:
        """See _Event."""
        verb = "resuming" if self.step else "starting"
        return f"attempt {self.attempt}: {verb} from step {self.step} of {self.steps} on {self.device} x {self.world}"

    @property
    def is_news(self) -> bool:
        """See _Event."""
        return self.step > 0


class Progress(_Event):
    """Training goes on."""

    kind: Literal["progress"] = "progress"
    notable: ClassVar[bool] = False
    step: int
    steps: int
    loss: float | None = None  # nats a token
    grad_norm: float | None = None
    tokens_per_second: float
    seconds_left: float

    @property
    def text(self) -> str:
        """See _Event."""
        left = int(self.seconds_left)
        return (
            f"step {self.step:,}/{self.steps:,} ({_percent(self.step, self.steps)} %)  loss {_number(self.loss, 4)}  "
            f"grad_norm {_number(self.grad_norm, 3)}  {self.tokens_per_second:,.0f} tokens/s  "
            f"{left // 3600:02d}:{left // 60 % 60:02d}:{left % 60:02d} left"
        )


class PhaseProgress(_Event):
    """A phase of a step goes on: tokenise, pack, score, export."""

    kind: Literal["phase"] = "phase"
    notable: ClassVar[bool] = False
    phase: Name
    done: int  # of
    total: int  # in whatever the phase counts

    @property
    def text(self) -> str:
        """See _Event."""
        return f"{self.phase} {_percent(self.done, self.total)} %"


class SaveCommitted(_Event):
    """A checkpoint is in the store."""

    kind: Literal["save_committed"] = "save_committed"
    step: int
    seconds: float  # from the copy to the commit
    stall_seconds: float = 0.0  # of them, those that training waited
    bytes: int | None = None  # that were written for it

    @property
    def text(self) -> str:
        """See _Event."""
        written = "" if self.bytes is None else f", {self.bytes:,} bytes"
        return f"saved step {self.step} in {self.seconds:.1f} s{written}; training waited {self.stall_seconds:.2f} s"


class SaveFailed(_Event):
    """A checkpoint could not be written; training goes on."""

    kind: Literal["save_failed"] = "save_failed"
    step: int
    reason: Text
    lag: int  # steps since the newest checkpoint

    @property
    def text(self) -> str:
        """See _Event."""
        return f"step {self.step} is not saved, {self.lag} steps hang on the checkpoint before it: {self.reason}"

    @property
    def is_news(self) -> bool:
        """See _Event."""
        return True


class CheckpointSetAside(_Event):
    """A checkpoint does not verify; an older one is used."""

    kind: Literal["checkpoint_set_aside"] = "checkpoint_set_aside"
    step: int
    reason: Text

    @property
    def text(self) -> str:
        """See _Event."""
        return f"checkpoint of step {self.step} is set aside: {self.reason}"

    @property
    def is_news(self) -> bool:
        """See _Event."""
        return True


class RankEnded(_Event):
    """A rank leaves with a code of the table. One that is killed leaves without."""

    kind: Literal["rank_ended"] = "rank_ended"
    rank: int
    code: int
    host: Name = ""
    reason: Text = ""

    @property
    def text(self) -> str:
        """See _Event."""
        return _joined(f"rank {self.rank} on {self.host} ended ({in_words(self.code)})", self.reason)


class StepBegan(_Event):
    """A step of the DAG begins."""

    kind: Literal["step_began"] = "step_began"
    name: Name

    @property
    def text(self) -> str:
        """See _Event."""
        return f"{self.name} begins"


class StepEnded(_Event):
    """A step of the DAG has ended."""

    kind: Literal["step_ended"] = "step_ended"
    name: Name
    code: int
    seconds: float
    reason: Text = ""  # of a failure
    result: Name = ""  # the dataset id, the verdict's word, the version

    @property
    def text(self) -> str:
        """See _Event."""
        how = f": {self.result}" if self.code == ExitCode.OK and self.result else f" ({in_words(self.code)})"
        return _joined(f"{self.name} ended after {self.seconds:.1f} s{how}", self.reason)


class RunEnded(_Event):
    """The pipeline has ended, as its exit handler sees it."""

    kind: Literal["run_ended"] = "run_ended"
    status: Name  # succeeded, failed or cancelled
    reason: Text = ""

    @property
    def text(self) -> str:
        """See _Event."""
        return _joined(f"the run {self.status}", self.reason)


class Warned(_Event):
    """Something that a person should know."""

    kind: Literal["warned"] = "warned"
    message: Text

    @property
    def text(self) -> str:
        """See _Event."""
        return self.message

    @property
    def is_news(self) -> bool:
        """See _Event."""
        return True


Event = (
    LaunchBegan | LaunchEnded | AttemptBegan | Progress | PhaseProgress | SaveCommitted | SaveFailed
    | CheckpointSetAside | RankEnded | StepBegan | StepEnded | RunEnded | Warned
)  # fmt: skip
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def line_of(event: Event) -> bytes:
    """The event as a line of JSON. Raises ValueError if it is too long."""
    line = event.model_dump_json(exclude_none=True).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise ValueError(f"{len(line)} bytes are more than {MAX_LINE}: give it fewer texts")
    return line


def events_in(lines: Iterable[bytes]) -> Iterable[Event]:
    """The events in lines of JSON; whatever else stands there is skipped."""
    for line in lines:
        with suppress(ValidationError):
            event = _ADAPTER.validate_json(line)
            if event.v <= VERSION and event.writer:
                yield event


def emit(event: Event) -> None:
    """Tell an event to everybody who wants to know. Never waits for anybody, and never raises."""
    try:
        _here.tell(event)
    except Exception as error:  # noqa: BLE001 - what is told of a training must not end it
        log.debug("event %s is lost: %s", event.kind, error)


def set_source(source: str, *, launch: int | None = None, attempt: int | None = None, not_before: float = 0.0) -> None:
    """Say who this process is in the events that follow. `not_before`: the time of an event (unix seconds) that came
    before all of them, so that the order is right where this machine's clock is behind."""
    _here.source, _here.launch, _here.attempt = source, launch, attempt
    _here.last = max(_here.last, not_before)


def show_in_argo(event: Event) -> None:
    """Write how far the step is to ARGO_PROGRESS_FILE, if there is one and the event says it."""
    if isinstance(event, Progress):
        report_progress(event.step, event.steps)
    elif isinstance(event, PhaseProgress):
        report_progress(event.done, event.total)


def add_listener(listener: Callable[[Event, bytes], None]) -> Callable[[], None]:
    """Call `listener` with every event of this process and its line from now on; what ends that. It must not wait."""
    process = _here
    process.listeners = [*process.listeners, listener]  # another list: one may be read at this moment

    def forget() -> None:
        process.listeners = [other for other in process.listeners if other != listener]

    return forget


def in_words(code: int) -> str:
    """An exit code for a person."""
    try:
        return ExitCode(code).name.lower().replace("_", " ")
    except ValueError:
        return f"signal {code - 128}" if code > 128 else f"exit code {code}"


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
            given = {
                "source": event.source or self.source,
                "launch": self.launch if event.launch is None else event.launch,
                "attempt": self.attempt if event.attempt is None else event.attempt,
            }
            event = event.model_copy(
                update={"time": self.last, "writer": self._writer, "number": self._number, **given}
            )
            line = line_of(event)
            self._append(line)
            for listener in self.listeners:
                listener(event, line)

    def _append(self, line: bytes) -> None:
        for path in filter(None, os.environ.get(PIPE, "").split(os.pathsep)):
            try:
                if path not in self._pipes:
                    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
                    flags |= 0 if Path(path).is_fifo() else os.O_CREAT
                    self._pipes[path] = os.open(path, flags, 0o644)
                os.write(self._pipes[path], line)  # in one piece: the lines of several processes do not mix
            except OSError as error:  # nobody reads it, or its disk is full; the store has the event all the same
                log.debug("%s: an event is not told: %s", path, error)


_here = _Process()


def _forget() -> None:
    global _here  # noqa: PLW0603 - a forked process is another writer
    _here = _Process()


os.register_at_fork(after_in_child=_forget)


def _joined(what: str, detail: str) -> str:
    return f"{what}: {' '.join(detail.split())}" if detail else what


def _percent(done: int, total: int) -> int:
    return 100 * done // max(1, total)


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"
