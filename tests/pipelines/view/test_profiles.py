"""Waiting for a profile ends: with its trace, with the run, or after a silence."""

import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.pipelines.view.profiles import (
    ON_ACCELERATOR,
    ON_PROCESSOR,
    Operation,
    operations,
    print_operations,
    wait_for_trace,
)
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, open_store
from holdfast.telemetry import emit, recording
from holdfast.telemetry.events import LaunchBegan, LaunchEnded, ProfileSaved

RUN = "0123456789abcdef"
BEGAN = LaunchBegan(launch=1, job="j", nodes=1, processes=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path / 'store'}")


def store_events(store: Store, *events: LaunchBegan | LaunchEnded | ProfileSaved) -> None:
    with recording(store, RUN, "launcher"):
        for event in events:
            emit(event)


@pytest.mark.parametrize("code", [0, 13])
def test_a_run_that_ended_before_the_profile_request_is_not_waited_for(store: Store, code: int) -> None:
    store_events(store, BEGAN, LaunchEnded(launch=1, code=code))
    with pytest.raises(MissingError, match=f"run {RUN} has ended without it"):
        wait_for_trace(store, RUN, time.time() + 3600.0, silent=5.0)


def test_a_restarted_run_is_waited_for_until_its_trace_exists(store: Store) -> None:
    start = time.time()
    store_events(store, BEGAN, LaunchEnded(launch=1, code=13), BEGAN, LaunchEnded(launch=2, code=137, restart_in=0.0))
    later = threading.Thread(target=store_events, args=(store, ProfileSaved(first=1, last=2, key="k")))
    later.start()
    assert wait_for_trace(store, RUN, start) == "k"
    later.join()


def test_waiting_for_a_silent_run_times_out(store: Store) -> None:
    store_events(store, BEGAN)
    with pytest.raises(MissingError, match="has reported nothing for 0 s"):
        wait_for_trace(store, RUN, time.time() + 3600.0, silent=0.0)


def trace_of(*events: tuple[str, str, int, float, float]) -> bytes:
    """A trace of (name, category, thread, start, duration in microseconds)."""
    names = ("name", "cat", "tid", "ts", "dur")
    listed: list[dict[str, Any]] = [{"ph": "X", "pid": 1, **dict(zip(names, event, strict=True))} for event in events]
    other = [
        {"ph": "M", "name": "process_name"},
        {"ph": "s", "cat": "fwdbwd", "name": "mm", "pid": 1, "tid": 1, "ts": 0},
    ]
    return gzip.compress(json.dumps({"traceEvents": [*other, *listed]}).encode())


TRACE = trace_of(
    ("mm", "cpu_op", 1, 10.0, 20.0),
    ("linear", "cpu_op", 1, 0.0, 40.0),
    ("t", "cpu_op", 1, 0.0, 5.0),
    ("mm", "cpu_op", 1, 40.0, 10.0),  # begins as `linear` ends
    ("mm", "cpu_op", 2, 0.0, 1.0),  # in another thread
    ("launch", "cuda_runtime", 1, 12.0, 2.0),
    ("gemm", "kernel", 7, 14.0, 90.0),
    ("Memcpy HtoD", "gpu_memcpy", 7, 2.0, 4.0),
)


def test_time_of_an_operation_is_without_those_that_it_calls() -> None:
    on_accelerator, on_processor = operations(TRACE, ON_ACCELERATOR, ON_PROCESSOR)
    assert on_processor == [
        Operation("mm", 3, 31.0, 31.0),
        Operation("linear", 1, 15.0, 40.0),
        Operation("t", 1, 5.0, 5.0),
    ]
    assert [one.name for one in on_accelerator] == ["gemm", "Memcpy HtoD"]


def test_operations_of_an_accelerator_are_printed_first(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.put("trace", TRACE)
    print_operations(store, "trace")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:3] == ["on", "the", "accelerator"]
    assert lines[1] == ["gemm", "1", "0.09", "ms", "95.7", "%", "0.09", "ms"]
    assert ["linear", "1", "0.01", "ms", "29.4", "%", "0.04", "ms"] in lines


@pytest.mark.parametrize(
    "trace",
    [
        b"",
        b"no gzip",
        gzip.compress(b"{"),
        gzip.compress(b"[]"),
        gzip.compress(b"[" * 10_000),
        gzip.compress(b'{"traceEvents": [1]}'),
        trace_of(("mm", "cpu_op", 1, 10.0, "x")),  # type: ignore[arg-type]
    ],
    ids=range(7),  # gzip writes the time into its header
)
def test_a_damaged_trace_is_named_as_such(trace: bytes) -> None:
    with pytest.raises(DataError, match="trace"):
        operations(trace, ON_PROCESSOR)
