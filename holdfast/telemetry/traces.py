"""Sending the spans of a run to an OpenTelemetry collector, by OpenTelemetry's own SDK over OTLP/HTTP.

The standard variables configure it; OTEL_EXPORTER_OTLP_ENDPOINT enables it. An unreachable collector does not affect
training: a thread sends, and spans that it cannot send in time are dropped, with a log message.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from blake3 import blake3
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

from holdfast.spec.errors import ExitCode
from holdfast.telemetry.event_base import in_words
from holdfast.telemetry.events import (
    AttemptBegan,
    CheckpointQuarantined,
    Event,
    HangDetected,
    LaunchBegan,
    LaunchEnded,
    RankEnded,
    RunEnded,
    SaveCommitted,
    SaveFailed,
    StepBegan,
    StepEnded,
    StragglerDetected,
    TimeSpent,
    WarningIssued,
)

# A run as nested spans, from its events: steps of the DAG, launches, attempts and saves.
#
# The same thing is the same span for every observer. Ids follow from the run's id and from the subject of the span. So
# the spans of several processes, and of several tries, are one trace. `traces` sends them.

Value = str | int | float
RUN = "run"  # the key of the outermost span
NOTED = (HangDetected, StragglerDetected, SaveFailed, CheckpointQuarantined, WarningIssued, RankEnded)


@dataclass
class Span:
    """An interval of work; times in Unix seconds."""

    name: str
    key: str  # its subject: the same for the same thing in the same run
    parent: str  # the key of the enclosing span; empty for the outermost
    begin: float
    end: float = 0.0
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""  # how it failed; empty if it did not
    notes: list[tuple[float, str, str]] = field(default_factory=list)  # time, kind of event, text


def trace_id(run_id: str) -> int:
    """The trace id of a run: 128 bits."""
    return int.from_bytes(blake3(f"trace {run_id}".encode()).digest(16))


def span_id(run_id: str, key: str) -> int:
    """The id of a span of a run: 64 bits."""
    return int.from_bytes(blake3(f"span {run_id} {key}".encode()).digest(8))


class Spans:
    """Makes spans of events in their order."""

    def __init__(self) -> None:
        self._open: dict[str, Span] = {}
        self._step = RUN  # the key of the train step that encloses launches
        self._began: float | None = None
        self._launch = self._attempt = ""  # the keys of the newest ones

    def take(self, event: Event) -> list[Span]:
        """The spans that have ended with `event`."""
        self._began = event.time if self._began is None else self._began
        return list(self._take(event))

    def _take(self, event: Event) -> Iterator[Span]:
        if isinstance(event, StepBegan):
            key = f"step {event.name} {event.writer}"
            self._open[key] = Span(event.name, key, RUN, event.time)
            if event.name == "train":
                self._step = key
        elif isinstance(event, StepEnded):
            key = f"step {event.name} {event.writer}"
            attributes: dict[str, Value] = {"holdfast.result": event.result} if event.result else {}
            yield from self._close(
                key, event.time, _failure(event.code, event.reason), {**attributes, **_code(event.code)}
            )
        elif isinstance(event, LaunchBegan):
            self._launch = f"launch {event.launch}"
            if self._launch not in self._open:  # a launcher that takes one over continues its span
                about: dict[str, Value] = {
                    "holdfast.job": event.job,
                    "holdfast.nodes": event.nodes,
                    "holdfast.ranks": event.nodes * event.processes,
                }
                self._open[self._launch] = Span(self._launch, self._launch, self._step, event.time, attributes=about)
        elif isinstance(event, LaunchEnded):
            yield from self._close(self._attempt, event.time)
            key = f"launch {event.launch}"
            yield from self._close(key, event.time, _failure(event.code, event.detail), _code(event.code))
        elif isinstance(event, AttemptBegan):
            yield from self._close(self._attempt, event.time)
            self._attempt = f"attempt {event.attempt}"
            attributes = {"holdfast.world": event.world, "holdfast.step": event.step, "holdfast.device": event.device}
            self._open[self._attempt] = Span(
                self._attempt, self._attempt, self._launch or RUN, event.time, attributes=attributes
            )
        elif isinstance(event, SaveCommitted):
            save_attributes = {
                "holdfast.step": event.step,
                "holdfast.bytes": event.bytes or 0,
                "holdfast.stall_seconds": event.stall_seconds,
            }
            parent = f"attempt {event.attempt}"
            yield Span(
                "save",
                f"save {event.attempt} {event.step}",
                parent,
                event.time - event.seconds,
                event.time,
                {**save_attributes},
            )
        elif isinstance(event, TimeSpent):
            if event.last and event.rank == 0:
                yield from self._close(f"attempt {event.attempt}", event.time, "failed" if event.failed else "")
        elif isinstance(event, RunEnded):
            error = "" if event.status == "succeeded" else f"{event.status}: {event.reason}"
            began = event.time if self._began is None else self._began
            yield Span("run", RUN, "", began, event.time, {"holdfast.status": event.status}, error)
        if isinstance(event, NOTED) and (span := self._open.get(self._attempt) or self._open.get(self._launch)):
            span.notes.append((event.time, event.kind, event.text))

    def _close(
        self, key: str, when: float, error: str = "", attributes: dict[str, Value] | None = None
    ) -> Iterator[Span]:
        if (span := self._open.pop(key, None)) is not None:
            span.end, span.error = when, error
            span.attributes |= attributes or {}
            yield span


def spans(events: Iterable[Event]) -> list[Span]:
    """All spans of a run that have ended."""
    open_spans = Spans()
    return [span for event in events for span in open_spans.take(event)]


def _failure(code: int, reason: str) -> str:
    return "" if code in (ExitCode.OK, ExitCode.PREEMPTED) else f"{in_words(code)}: {reason}".rstrip(": ")


def _code(code: int) -> dict[str, Value]:
    return {"holdfast.exit_code": code}


CLOSE_SECONDS = 5.0  # limit for the last spans, if no variable bounds a request
TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
NANOSECONDS = 1e9


class Traces:
    """The trace of one run, as far as this process sees it. Pass events to it from any one thread."""

    def __init__(self, run_id: str) -> None:
        self._run_id, self._spans = run_id, Spans()
        self._ids = _Ids(trace_id(run_id))
        resource = Resource.create({"service.name": "holdfast", "holdfast.run_id": run_id})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("holdfast")

    def remember(self, events: Iterable[Event]) -> None:
        """Take earlier events, whose spans were sent by the processes of that time."""
        for event in events:
            self._spans.take(event)

    def take(self, event: Event, _line: bytes = b"", *, steps: bool = True) -> None:
        """Take an event of the run; `steps`: whether this process sends the spans of the DAG's steps."""
        for span in self._spans.take(event):
            if steps or not span.key.startswith("step "):
                self._send(span)

    def close(self) -> None:
        """Send the rest, for at most the time that OpenTelemetry's variables allow for one request."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        thread.start()
        thread.join(_patience())

    def _send(self, span: Span) -> None:
        self._ids.next = span_id(self._run_id, span.key)
        context = None
        if span.parent:
            parent = SpanContext(
                trace_id(self._run_id),
                span_id(self._run_id, span.parent),
                is_remote=True,
                trace_flags=TraceFlags(TraceFlags.SAMPLED),
            )
            context = set_span_in_context(NonRecordingSpan(parent))
        span_sent = self._tracer.start_span(
            span.name, context, attributes=span.attributes, start_time=_nanoseconds(span.begin)
        )
        for moment, name, text in span.notes:
            span_sent.add_event(name, {"message": text}, _nanoseconds(moment))
        if span.error:
            span_sent.set_status(Status(StatusCode.ERROR, span.error))
        span_sent.end(_nanoseconds(span.end))


def _patience() -> float:
    """In seconds, as the Python SDK reads these variables."""
    with suppress(StopIteration, ValueError):
        return float(next(filter(None, map(os.environ.get, TIMEOUTS))))
    return CLOSE_SECONDS


class _Ids(IdGenerator):
    """Gives each span the id that was put into `next`."""

    def __init__(self, trace: int) -> None:
        self._trace, self.next = trace, 0

    def generate_trace_id(self) -> int:
        return self._trace

    def generate_span_id(self) -> int:
        return self.next


def _nanoseconds(seconds: float) -> int:
    return int(seconds * NANOSECONDS)
