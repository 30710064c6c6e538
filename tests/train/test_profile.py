"""A profile of some steps is taken on request, reported once, and changes no bit."""

import gzip
import json
import math
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import Attempt
from holdfast.engines.interface import StepOutput
from holdfast.pipelines.view.profiles import ON_PROCESSOR, operations
from holdfast.rank.measure import profile
from holdfast.rank.measure.phase_timer import NVTX_VARIABLE, requested_ranges
from holdfast.rank.measure.profile import Profiler
from holdfast.rank.observers import FinishedStep
from holdfast.spec.errors import PreemptedError, SpecError
from holdfast.store import Store, layout, open_store
from holdfast.telemetry import phases, read_events, recording
from holdfast.telemetry.events import Event, ProfileSaved, WarningIssued
from holdfast.telemetry.profiles import Window, ask, pending_request
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, _train_all, identity_of, trained
from tests.train.tiny_run import new_store, tiny_spec

RUN = "0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path / 'store'}")


def train_with(profiler: Profiler, steps: range, known: bool = True) -> None:
    """Steps of one matrix product each. After the first one, the ranks check for requests."""
    for step in steps:
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.on_step(FinishedStep(step, 0.1, StepOutput(torch.tensor(1.0), torch.tensor(1.0)), 0.0))
        deadline = time.monotonic() + 180
        while known and step == steps.start and profiler._found is None:
            assert time.monotonic() < deadline, "what is overrides_of for is not found"
            time.sleep(0.005)


def reported(store: Store) -> list[Event]:
    return [event for event in read_events(store, RUN) if isinstance(event, ProfileSaved | WarningIssued)]


@pytest.mark.parametrize(("text", "steps"), [("3-4", (3, 4)), ("2", (3, 4))])
def test_the_requested_steps_are_in_the_trace_and_the_request_is_removed(
    store: Store, text: str, steps: tuple[int, int]
) -> None:
    ask(store, RUN, Window.of(text))
    profiler = Profiler(store, Attempt(RUN, 7), active=True)
    with recording(store, RUN, "rank 0"):
        train_with(profiler, range(1, 7))
        profiler.close()
    (event,) = reported(store)
    assert isinstance(event, ProfileSaved)
    assert (event.first, event.last) == steps
    trace = json.loads(gzip.decompress(store.get(event.key)))
    assert sum(event.get("name") == "aten::mm" for event in trace["traceEvents"]) == 2
    (found,) = operations(store.get(event.key), ON_PROCESSOR)
    (products,) = (one for one in found if one.name == "aten::mm")
    assert products.calls == 2
    assert 0 < products.own < products.total  # it calls others
    assert pending_request(store, RUN) is None


def test_a_profile_request_for_past_steps_is_rejected_with_a_warning(store: Store) -> None:
    ask(store, RUN, Window.of("3-4"))
    with recording(store, RUN, "rank 0"):
        profiler = Profiler(store, Attempt(RUN, 7), active=True)
        train_with(profiler, range(5, 7))
        profiler.close()
    (event,) = reported(store)
    assert "steps 3 to 4 are not profiled: step 7 is the next one" in event.text
    assert pending_request(store, RUN) is None


def test_a_failing_or_preempted_rank_does_not_wait_for_its_trace(store: Store) -> None:
    ask(store, RUN, Window.of("3-9"))
    profiler = Profiler(store, Attempt(RUN, 7), active=True)
    with recording(store, RUN, "rank 0"), pytest.raises(PreemptedError), profiler:
        train_with(profiler, range(1, 7))
        raise PreemptedError("reported to leave")
    assert profiler._writing is None
    (event,) = reported(store)
    assert "the profile of steps 3 to 9 is lost: the run was left" in event.text


@pytest.mark.parametrize("reported_in_time", [True, False])
def test_a_trace_that_is_being_written_when_a_rank_is_preempted_is_reported_saved_or_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch, reported_in_time: bool
) -> None:
    monkeypatch.setattr(profile, "HURRY_SECONDS", 60.0 if reported_in_time else 0.0)
    written = threading.Event()
    upload = store.upload

    def slow(*arguments: Any) -> Any:
        assert written.wait(60)
        return upload(*arguments)

    monkeypatch.setattr(store, "upload", slow)
    ask(store, RUN, Window.of("3-4"))
    profiler = Profiler(store, Attempt(RUN, 7), active=True)
    with recording(store, RUN, "rank 0"), pytest.raises(PreemptedError), profiler:
        train_with(profiler, range(1, 7))
        threading.Timer(0.1 if reported_in_time else 0.0, written.set if reported_in_time else int).start()
        raise PreemptedError("reported to leave")
    (event,) = reported(store)
    if reported_in_time:
        assert isinstance(event, ProfileSaved)
    else:
        assert "a profile is lost: the rank ended before its trace was written" in event.text
    written.set()


def test_a_profiler_that_fails_to_start_does_not_stop_training(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("no tracer")

    monkeypatch.setattr("torch.profiler.profile.start", refuses)
    ask(store, RUN, Window.of("3-4"))
    with recording(store, RUN, "rank 0"), Profiler(store, Attempt(RUN, 7), active=True) as profiler:
        train_with(profiler, range(1, 7))
    (event,) = reported(store)
    assert "is lost: no tracer" in event.text
    assert pending_request(store, RUN) is None


def test_other_ranks_and_unreadable_profile_requests_are_ignored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "LOOK_SECONDS", 0.0)
    ask(store, RUN, Window.of("3-4"))
    other = Profiler(store, Attempt(RUN, 7), active=False)
    train_with(other, range(1, 6), known=False)
    assert other._looked == -math.inf
    assert pending_request(store, RUN) == Window(3, 4)
    store.put(layout.run(RUN, "profiles/request.json"), b'{"first": "x"}')
    assert pending_request(store, RUN) is None


@pytest.mark.parametrize("text", ["", "x", "0", "5-4", "0-3", "-3", "1-101", "101", "1-2-3"])
def test_a_window_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SpecError, match="--steps 100-110"):
        Window.of(text)


def _train_looking_first(*arguments: Any) -> list[str]:
    """Ranks that check for requests before their first step."""
    begin, look = Profiler.__init__, Profiler._look

    def __init__(self: Profiler, *given: Any, **named: Any) -> None:  # noqa: N807
        begin(self, *given, **named)
        look(self)

    Profiler.__init__ = __init__  # type: ignore[method-assign]
    return _train_all(*arguments)


@pytest.mark.slow
def test_a_profile_changes_no_bit(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec()
    ask(store, identity_of(spec, "profiled"), Window.of("5"))
    runs: Runs = [((), "", None), ((), "profiled", None)]
    (endings,) = in_ranks(1, _train_looking_first, store.url, tmp_path, runs, False, signal.SIGTERM, None, seconds=400)
    assert endings == ["", ""]
    assert trained(store, spec, "profiled") == trained(store, spec)
    traces = [info.key for info in store.list(layout.run(identity_of(spec, "profiled"), "profiles/"))]
    name = "000000002-000000006.000001"
    assert [key.rsplit("/", 1)[1] for key in traces] == [f"{name}.trace.json.gz"]


def test_no_range_begins_without_a_profile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a finished profile leaves none behind."""
    entered: list[str] = []

    class Range(torch.profiler.record_function):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            entered.append(name)

    monkeypatch.setattr("torch.profiler.record_function", Range)
    ask(store, RUN, Window.of("3-4"))
    counts = []
    with recording(store, RUN, "rank 0"), Profiler(store, Attempt(RUN, 7), active=True) as profiler:
        for steps, known in ((range(1, 3), True), (range(3, 5), False), (range(5, 7), False)):
            phases.enter("data")
            phases.enter("forward")
            train_with(profiler, steps, known)
            counts.append(len(entered))
    assert counts[0] == 1  # the profile has begun, in the current phase
    assert entered == ["holdfast.forward", "holdfast.data", "holdfast.forward"]
    assert counts[2] == counts[1]
    (saved,) = (event for event in reported(store) if isinstance(event, ProfileSaved))
    events = json.loads(gzip.decompress(store.get(saved.key)))["traceEvents"]
    ranges = Counter(event["name"] for event in events if str(event.get("name")).startswith("holdfast."))
    assert ranges == Counter(entered)


def test_nvtx_ranges_cover_the_phases_of_a_rank_when_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wiring, against a recorder in place of the driver's library."""
    opened: list[str] = []
    ended: list[int] = []

    def start(name: str) -> int:
        opened.append(name)
        return len(opened)

    monkeypatch.setattr("torch.cuda.nvtx.range_start", start)
    monkeypatch.setattr("torch.cuda.nvtx.range_end", ended.append)
    monkeypatch.setattr("torch.version.cuda", "12.8")
    assert requested_ranges(torch.device("cuda")) is None
    monkeypatch.setenv(NVTX_VARIABLE, "1")
    assert requested_ranges(torch.device("cpu")) is None
    clock = phases.PhaseClock()
    clock.mark_ranges(requested_ranges(torch.device("cuda")))
    clock.enter("forward")
    clock.lap()
    backward = threading.Thread(target=clock.enter, args=("backward",))
    backward.start()
    backward.join()
    clock.mark_ranges(None)
    clock.enter("optimizer")
    assert (opened, ended) == (["holdfast.start", "holdfast.forward", "holdfast.backward"], [1, 2, 3])
