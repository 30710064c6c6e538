"""A collector of OpenTelemetry traces on this machine: it keeps what clients post by OTLP over HTTP."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.http_server import QuietHandler, running


class Collector:
    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[ExportTraceServiceRequest] = []

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def services(self) -> set[str]:
        return {
            attribute.value.string_value
            for request in self.requests
            for resource in request.resource_spans
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
        }


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens while in the context."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = self.body()
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces", self.path
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.answer(200, answer, Content_Type="application/x-protobuf")

    with running(Handler) as url:
        collector = Collector(url)
        yield collector
