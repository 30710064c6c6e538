"""Sending the spans of a run to an OpenTelemetry collector, by OpenTelemetry's own SDK over OTLP/HTTP.

The standard variables configure it; OTEL_EXPORTER_OTLP_ENDPOINT enables it. An unreachable collector does not affect
training: a thread sends, and spans that it cannot send in time are dropped, with a log message.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from holdfast.telemetry.events import Event
from holdfast.telemetry.spans import Span, Spans, span_id, trace_id

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
        within = None
        if span.parent:
            parent = SpanContext(
                trace_id(self._run_id), span_id(self._run_id, span.parent), is_remote=True,
                trace_flags=TraceFlags(TraceFlags.SAMPLED),
            )  # fmt: skip
            within = set_span_in_context(NonRecordingSpan(parent))
        made = self._tracer.start_span(
            span.name, within, attributes=span.attributes, start_time=_nanoseconds(span.begin)
        )
        for when, name, text in span.notes:
            made.add_event(name, {"message": text}, _nanoseconds(when))
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(_nanoseconds(span.end))


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
