"""The trace of a run: what a collector gets by OTLP from several processes, and nothing without a configured
endpoint."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from holdfast.spec.errors import ExitCode
from holdfast.telemetry import traces
from holdfast.telemetry.events import Event, RunEnded, SaveCommitted, WarningIssued
from holdfast.telemetry.serving import COLLECTORS, PROTOCOLS, show_traces
from holdfast.telemetry.traces import RUN, TIMEOUTS, span_id, spans, trace_id
from tests.ports import free_port
from tests.telemetry.collector import Collector, collecting
from tests.telemetry.test_ledger import at, killed_once

RUN_ID = "00000000000000aa"
OTEL = ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", *COLLECTORS, *PROTOCOLS, *TIMEOUTS)


@pytest.fixture(autouse=True)
def _no_endpoint_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OTEL:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120")
        yield receiver


def story() -> list[Event]:
    """The events of a run with a rank that is killed at second 28, and with an end."""
    events = [event.model_copy(update={"launch": getattr(event, "launch", None)}) for event in killed_once()]
    return [
        *events[:-1],
        at(25, WarningIssued(message="the store is slow"), 1),
        events[-1],
        at(61, RunEnded(status="succeeded")),
    ]


def ordered(events: Sequence[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.time)


def send(events: Sequence[Event]) -> None:
    exporter = show_traces(RUN_ID)
    assert exporter is not None
    for event in ordered(events):
        exporter.take(event)
    exporter.close()


def of(spans: Sequence[Span], name: str) -> Span:
    (match,) = [span for span in spans if span.name == name]
    return match


def test_a_collector_gets_steps_launches_attempts_and_saves_each_within_the_other(collector: Collector) -> None:
    send(story())
    spans = collector.spans
    assert collector.services == {"holdfast"}
    assert sorted(span.name for span in spans) == [
        "attempt 1", "attempt 2", "launch 1", "launch 2", "run", "save", "train",
    ]  # fmt: skip
    assert {span.trace_id for span in spans} == {trace_id(RUN_ID).to_bytes(16)}
    parents = {
        "train": "run", "launch 1": "train", "launch 2": "train", "attempt 1": "launch 1", "attempt 2": "launch 2",
        "save": "attempt 1",
    }  # fmt: skip
    for name, parent in parents.items():
        assert of(spans, name).parent_span_id == of(spans, parent).span_id, name
    assert of(spans, "run").parent_span_id == b""
    first = of(spans, "launch 1")
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (1 * 10**9, 30 * 10**9)
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert "lost peer" in first.status.message
    assert of(spans, "launch 2").status.code == Status.STATUS_CODE_UNSET
    save = of(spans, "save")
    assert (save.start_time_unix_nano, save.end_time_unix_nano) == (17 * 10**9, 19 * 10**9)
    events = [(event.name, event.time_unix_nano) for event in of(spans, "attempt 1").events]
    assert events == [("warning_issued", 25 * 10**9)]


def test_the_last_spans_are_sent_within_the_opentelemetry_timeout(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "CLOSE_SECONDS", 0.0)
    send(story())
    assert collector.spans


def test_spans_of_an_earlier_process_are_not_resent_and_its_launch_continues(collector: Collector) -> None:
    events = ordered(story())
    cut = next(index for index, event in enumerate(events) if event.time > 40)
    exporter = show_traces(RUN_ID)
    assert exporter is not None
    exporter.remember(events[:cut])
    for event in events[cut:]:
        exporter.take(event, steps=False)
    exporter.close()
    assert sorted(span.name for span in collector.spans) == ["attempt 2", "launch 2", "run"]
    assert of(collector.spans, "launch 2").start_time_unix_nano == 33 * 10**9
    assert of(collector.spans, "attempt 2").parent_span_id == of(collector.spans, "launch 2").span_id


STEP = """
import sys
from holdfast.store import open_store
from holdfast.telemetry import recorded_step
from holdfast.spec.errors import DataError
with recorded_step(open_store(sys.argv[1]), sys.argv[2], sys.argv[3]) as ended:
    if sys.argv[3] == "register":
        raise DataError("no model")
    ended("blessed")
print("opentelemetry" in {name.partition(".")[0] for name in sys.modules})
"""


def step(tmp_path: Path, name: str, **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key not in OTEL}
    command = [sys.executable, "-c", STEP, f"file://{tmp_path}/store", RUN_ID, name]
    return subprocess.run(
        command, env=inherited | environment, check=False, capture_output=True, text=True, timeout=240
    ).stdout.strip()


def test_the_steps_of_several_processes_are_one_trace(tmp_path: Path) -> None:
    with collecting() as collector:
        variables = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "120",
        }
        for name in ("evaluate", "register"):
            step(tmp_path, name, **variables)
    evaluated, registered = of(collector.spans, "evaluate"), of(collector.spans, "register")
    assert evaluated.trace_id == registered.trace_id == trace_id(RUN_ID).to_bytes(16)
    assert evaluated.parent_span_id == registered.parent_span_id == span_id(RUN_ID, RUN).to_bytes(8)
    assert evaluated.span_id != registered.span_id
    assert {attribute.key: attribute.value.string_value for attribute in evaluated.attributes}[
        "holdfast.result"
    ] == "blessed"
    assert "no model" in registered.status.message


def test_a_process_without_traces_does_not_import_opentelemetry(tmp_path: Path) -> None:
    assert step(tmp_path, "evaluate") == "False"


def test_an_unreachable_trace_collector_fails_no_step(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert step(tmp_path, "evaluate", OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_TIMEOUT="1") == "True"


@pytest.mark.parametrize(
    "off",
    [
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    ],
)
def test_the_standard_variables_turn_it_off(off: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"} | off).items():
        monkeypatch.setenv(name, value)
    assert show_traces(RUN_ID) is None


def test_a_missing_opentelemetry_library_is_logged_and_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "holdfast.telemetry.traces", None)
    assert show_traces(RUN_ID) is None
    assert "install holdfast[otel]" in caplog.text


def test_a_gang_that_forms_again_within_a_launch_is_another_attempt_of_it() -> None:
    events = ordered([*story()[:5], at(30, SaveCommitted(step=3, seconds=1), 1)])
    second_begin = [
        event.model_copy(update={"time": 31.0, "attempt": 2}) for event in events if event.kind == "attempt_began"
    ]
    (save, first) = spans([*events, *second_begin])
    assert (save.name, first.name, first.end, first.error) == ("save", "attempt 1", 31.0, "")
    assert int(ExitCode.OK) == 0
