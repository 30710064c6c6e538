"""Waiting for a profile ends: with its trace, with the run, or after a silence."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from holdfast.pipelines.view.profiles import wait_for_trace
from holdfast.spec.errors import MissingError
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
