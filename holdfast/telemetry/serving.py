"""Setup of metrics and traces of a process, by the spec, the environment and the installed packages."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from holdfast.spec.operations import Telemetry
from holdfast.telemetry.channel import add_listener

if TYPE_CHECKING:
    from holdfast.telemetry.metrics import Metrics
    from holdfast.telemetry.traces import Traces

COLLECTORS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

log = logging.getLogger("holdfast.telemetry")


@contextmanager
def showing_metrics(settings: Telemetry, run_id: str, *, whole: bool = False) -> Iterator[Metrics | None]:
    """Serve the metrics of a run during the context, if the spec enables it. They cover this process's events or, with
    `whole`, those that the caller passes, at the next higher port. Yields None if nothing is served."""
    if settings.metrics_port is None:
        yield None
        return
    try:
        from holdfast.telemetry import metrics
    except ImportError as error:
        log.warning("telemetry.metrics_port: %s; install holdfast[metrics]", error)
        yield None
        return
    shown = metrics.Metrics(run_id, whole=whole)
    with ExitStack() as ends:
        if not whole:
            ends.callback(add_listener(shown.take))
        ends.enter_context(closing(metrics.Server(shown, settings.metrics_host, settings.metrics_port + whole)))
        yield shown


def show_traces(run_id: str) -> Traces | None:
    """The trace of a run, if OpenTelemetry's own variables name a collector. None otherwise, without an import."""
    environment = os.environ
    if (
        not run_id
        or not any(map(environment.get, COLLECTORS))
        or environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    ):
        return None
    if "otlp" not in environment.get("OTEL_TRACES_EXPORTER", "otlp"):
        return None
    if (protocol := next(filter(None, map(environment.get, PROTOCOLS)), "http/protobuf")) != "http/protobuf":
        log.warning("no traces are sent by the protocol %s; set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf", protocol)
        return None
    try:
        from holdfast.telemetry.traces import Traces
    except ImportError as error:
        log.warning("no traces are sent: %s; install holdfast[otel]", error)
        return None
    try:
        return Traces(run_id)
    except Exception as error:  # noqa: BLE001 - what OpenTelemetry refuses costs no run
        log.warning("no traces are sent: %s", error)
        return None
