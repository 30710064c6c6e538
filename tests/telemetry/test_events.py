"""Events as every reader sees them, whichever process wrote them and whichever died meanwhile."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from holdfast.spec.errors import ExitCode, StoreUnreachableError
from holdfast.store import Store, layout, open_store
from holdfast.telemetry import ConsoleProgress, channel, event_log, events
from holdfast.telemetry.accelerators import Figures
from holdfast.telemetry.channel import emit, events_in, line_of, show_in_argo
from holdfast.telemetry.event_log import (
    WRONG_CLOCK,
    PipeEvents,
    StoreEvents,
    read_events,
    recorded_step,
    recording,
)
from holdfast.telemetry.events import (
    AttemptBegan,
    Event,
    LaunchEnded,
    Progress,
    RankEnded,
    SaveCommitted,
    StepBegan,
    StepEnded,
    WarningIssued,
)

RUN = "0123456789abcdef"


@pytest.fixture
def store(store_url: str) -> Store:
    """An empty store, over a folder and over S3."""
    return open_store(store_url, deadline=120)


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that HOLDFAST_EVENTS names."""
    path = tmp_path / "pipe"
    monkeypatch.setenv(channel.PIPE, str(path))
    return path


def at(step: int) -> Progress:
    return Progress(step=step, steps=100, loss=2.5, grad_norm=0.5, tokens_per_second=1e4, seconds_left=61)


def texts_of(found: list[Event]) -> list[str]:
    return [event.text for event in found]


def test_emitted_events_are_read_in_order_from_the_store_and_the_pipe(store: Store, pipe: Path) -> None:
    with recording(store, RUN, "rank 0", launch=1, attempt=2):
        emit(AttemptBegan(world=2, step=50, steps=100, host="a", device="cpu"))
        for step in (60, 70):
            emit(at(step))
        emit(SaveCommitted(step=70, seconds=1.5, stall_seconds=0.1, bytes=10**6))
    events = read_events(store, RUN)
    assert events == PipeEvents(pipe).new()
    assert [(event.kind, event.source, event.launch, event.attempt) for event in events] == [
        ("attempt_began", "rank 0", 1, 2),
        ("progress", "rank 0", 1, 2),
        ("progress", "rank 0", 1, 2),
        ("save_committed", "rank 0", 1, 2),
    ]
    assert texts_of(events) == [
        "attempt 2: resuming from step 50 of 100 on cpu x 2",
        "step 60/100 (60 %)  loss 2.5000  grad_norm 0.500  10,000 tokens/s  00:01:01 left",
        "step 70/100 (70 %)  loss 2.5000  grad_norm 0.500  10,000 tokens/s  00:01:01 left",
        "saved step 70 in 1.5 s, 1,000,000 bytes; training waited 0.10 s",
    ]
    assert read_events(store, RUN, after=events[1].time) == [event for event in events if event.time > events[1].time]


def test_recent_events_are_read_without_old_objects(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(store, RUN, "rank 0", launch=1, attempt=2):
        emit(at(60))
    (event,), original_list = read_events(store, RUN), store.list
    for age, expected in ((WRONG_CLOCK / 2, [event]), (2 * WRONG_CLOCK, [])):
        modified = event.time - age
        monkeypatch.setattr(store, "list", lambda of: [replace(info, modified=modified) for info in original_list(of)])  # noqa: B023
        assert read_events(store, RUN, after=event.time - 1) == expected
        assert read_events(store, RUN) == [event]


def test_each_event_kind_round_trips_and_has_a_text() -> None:
    values: dict[str, object] = {"str": "x", "int": 3, "float": 1.5, "bool": True}
    for kind in get_args(Event):
        fields = {
            name: values[str(field.annotation).split("'")[1] if "'" in str(field.annotation) else "float"]
            for name, field in kind.model_fields.items()
            if field.is_required()
        }
        event = kind(**fields, writer="w", number=1)
        assert list(events_in([line_of(event)])) == [event]
        assert event.text


def test_an_event_read_twice_is_one(store: Store, pipe: Path) -> None:
    with recording(store, RUN, "rank 0"):
        emit(at(1))
        emit(at(2))
    (info,) = store.list(layout.run(RUN, "events/"))
    store.put(layout.events(RUN, "copy", 0), store.get(info.key) * 2)
    pipe.write_bytes(pipe.read_bytes() * 2)
    assert texts_of(read_events(store, RUN)) == texts_of(PipeEvents(pipe).new()) == [at(1).text, at(2).text]


def test_events_of_later_versions_and_invalid_lines_are_skipped(store: Store) -> None:
    known = at(1).model_copy(update={"writer": "w", "number": 5, "time": 1.0})
    entry = json.loads(line_of(known))
    lines = [
        b"",
        b"progress step=3/10 loss=2.1",
        b'{"kind": "progress"}',
        b"\xff\x00[]",
        b'{"time": 1, "level": "INFO", "logger": "holdfast.train", "message": "progress step=3/10 loss=2"}',
        json.dumps({**entry, "kind": "sweep_began", "number": 1}).encode(),
        json.dumps({**entry, "v": 2, "number": 2}).encode(),
        json.dumps({**entry, "number": 3, "step": "many"}).encode(),
        json.dumps({**entry, "new": [1]}).encode(),
    ]
    store.put(layout.events(RUN, "w", 0), b"\n".join(lines))
    assert read_events(store, RUN) == [known]


def test_texts_are_cut_and_carry_no_secrets(store: Store, pipe: Path) -> None:
    secret = "s3cret-pass"
    with recording(store, RUN, "launcher"):
        emit(WarningIssued(message=f"https://me:{secret}@host/x?token={secret} " + "\x01ü\udc80" * 5000))
        emit(RankEnded(rank=0, code=137, host="h" * 9000, reason="r" * 9000))
    for data in (pipe.read_bytes(), *(store.get(info.key) for info in store.list(layout.run(RUN, "events/")))):
        assert secret.encode() not in data
        assert [len(line) < channel.MAX_LINE for line in data.splitlines()] == [True, True]
    assert all(event.text.rstrip().endswith("…") for event in read_events(store, RUN))


def test_the_longest_beginning_of_an_attempt_fits_into_its_line() -> None:
    long, most = "\x01ü" * 5000, 2**63
    text_fields = {name for name, field in AttemptBegan.model_fields.items() if field.annotation is str}
    begin = AttemptBegan(
        **{**dict.fromkeys(text_fields, long), "kind": "attempt_began"},
        world=most, step=most, steps=most, number=most, launch=most, attempt=most, time=1.7976931348623157e308,
        peak_flops=1.7976931348623157e308, missing_metrics=dict.fromkeys(Figures.model_fields, long),
    )  # fmt: skip
    assert {"mfu_unavailable", "energy_unavailable", "host", "device", "accelerator", "writer", "source"} <= text_fields
    assert len(line_of(begin)) <= channel.MAX_LINE
    assert list(events_in([line_of(begin)])) == [begin]


def test_emitting_an_event_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARGO_PROGRESS_FILE", str(tmp_path / "nowhere" / "progress"))
    show_in_argo(at(1))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path / "nowhere" / "pipe", tmp_path, fifo, Path("/dev/full")):  # the FIFO has no reader
        monkeypatch.setenv(channel.PIPE, str(path))
        emit(at(1))


def test_several_followers_read_the_same_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(channel.PIPE, f"{tmp_path / 'one'}:{tmp_path / 'nowhere' / 'x'}:{tmp_path / 'two'}")
    emit(at(1))
    assert texts_of(PipeEvents(tmp_path / "one").new()) == texts_of(PipeEvents(tmp_path / "two").new()) == [at(1).text]


def test_a_fifo_passes_events_to_its_reader_and_never_blocks_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv(channel.PIPE, str(fifo))
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    emit(at(1))
    assert [event.text for event in events_in(os.read(reader, 10**5).splitlines())] == [at(1).text]
    for step in range(2000):  # more than the FIFO holds: the writer does not wait
        emit(at(step))
    os.close(reader)
    emit(at(1))


def test_progress_is_written_for_argo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARGO_PROGRESS_FILE", str(tmp_path / "progress"))
    with ConsoleProgress() as progress:
        progress("tokenise", 2, 8)
    assert (tmp_path / "progress").read_text() == "2/8\n"
    show_in_argo(at(3))
    show_in_argo(WarningIssued(message="no progress"))
    with ConsoleProgress(whole_step=False) as progress:
        progress("export", 7, 8)
    assert (tmp_path / "progress").read_text() == "3/100\n"


def test_a_phase_emits_its_first_last_and_some_intermediate_progress(pipe: Path) -> None:
    now = [0.0]
    with ConsoleProgress(clock=lambda: now[0]) as progress:
        for phase in ("tokenise", "pack"):
            for count in range(101):
                now[0] += 0.01
                progress(phase, count, 100)
    assert texts_of(PipeEvents(pipe).new()) == [
        f"{phase} {percent} %" for phase in ("tokenise", "pack") for percent in (0, 50, 100)
    ]


class Away:
    """A store that is away while `away` is set, and counts its requests."""

    def __init__(self, store: Store) -> None:
        self._store, self.away, self.attempted = store, True, threading.Semaphore(0)
        self.answered = threading.Semaphore(0)

    def put(self, key: str, data: bytes) -> None:
        self.attempted.release()
        if self.away:
            raise StoreUnreachableError(f"put {key}: no server")
        self._store.put(key, data)
        self.answered.release()


@pytest.fixture
def away(store: Store) -> Iterator[Away]:
    yield Away(store)


def test_an_unreachable_store_loses_no_events_and_does_not_block(
    store: Store, away: Away, caplog: pytest.LogCaptureFixture
) -> None:
    writer = event_log.EventWriter(away, RUN, flush_seconds=0.01)  # type: ignore[arg-type]
    emit(WarningIssued(message="first"))
    for _ in range(3):
        assert away.attempted.acquire(timeout=120)
    emit(WarningIssued(message="second"))
    assert read_events(store, RUN) == []
    away.away = False
    writer.close()
    assert texts_of(read_events(store, RUN)) == ["first", "second"]
    assert len([record for record in caplog.records if "wait in memory" in record.message]) == 1


def test_events_over_the_memory_limit_drop_the_oldest_progress_and_report_it(
    store: Store, away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_WAITING", 20_000)
    monkeypatch.setattr(event_log, "SEGMENT_BYTES", 2_000)
    writer = event_log.EventWriter(away, RUN, flush_seconds=0.01)  # type: ignore[arg-type]
    emit(WarningIssued(message="a person wants to know"))
    for step in range(200):
        emit(at(step))
    assert away.attempted.acquire(timeout=120)
    away.away = False
    while not any("were lost" in text for text in texts_of(read_events(store, RUN))):
        assert away.answered.acquire(timeout=120)
    writer.close()
    events = read_events(store, RUN)
    steps = [event.step for event in events if isinstance(event, Progress)]
    lost_count = int(next(event.text for event in events if "were lost" in event.text).split()[0])
    assert events[0].text == "a person wants to know"
    assert steps == sorted(steps)
    assert steps[-1] == 199
    assert lost_count == 200 - len(steps) > 0


@pytest.mark.parametrize("notable_every", [1, 2, 5, 1000])
def test_an_unreachable_store_drops_the_oldest_least_important_lines_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notable_every: int
) -> None:
    store = open_store(f"file://{tmp_path}")
    monkeypatch.setattr(event_log, "MAX_WAITING", 1000)
    writing, resume = threading.Event(), threading.Event()

    class Slow:
        def put(self, key: str, data: bytes) -> None:
            writing.set()
            assert resume.wait(180)
            store.put(key, data)

    writer = event_log.EventWriter(Slow(), RUN, 0.01)  # type: ignore[arg-type]
    matters = 1 % notable_every
    lines = [f"{number:099d}\n".encode() for number in range(40)]
    waiting: list[int] = []
    for number, line in enumerate(lines):
        notable = number % notable_every == matters
        writer._take(SimpleNamespace(notable=notable), line)  # type: ignore[arg-type]
        waiting.append(number)
        if number == 0:
            assert writing.wait(180)  # the first line is being written from now on
        if len(waiting) > 10:
            waiting.remove(next((index for index in waiting[1:] if index % notable_every != matters), waiting[1]))
    assert writer._lost == 30
    monkeypatch.undo()  # now there is room for the warning about that
    resume.set()
    writer.close(180)
    content = b"".join(store.get(info.key) for info in store.list(layout.run(RUN, "events/")))
    kept_lines = [line for line in content.splitlines(keepends=True) if line in lines]
    assert kept_lines == [lines[number] for number in waiting]


def test_segments_are_closed_when_they_are_large_and_a_follower_sees_all_of_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "SEGMENT_BYTES", 1_000)
    follower, events = StoreEvents(store, RUN), []
    with recording(store, RUN, "rank 0"):
        for step in range(40):
            emit(at(step))
            emit(WarningIssued(message=str(step)))  # which is written to the store immediately
            events += follower.new()
    events += follower.new()
    assert texts_of(events) == [text for step in range(40) for text in (at(step).text, str(step))]
    assert len(list(store.list(layout.run(RUN, "events/")))) > 5


def test_events_read_before_a_store_outage_are_returned_after_it(store: Store) -> None:
    for step in (1, 2):  # two processes
        with recording(store, RUN, f"rank {step}"):
            emit(at(step))

    class Failing:
        fails = True

        def __getattr__(self, name: str) -> Callable[..., object]:
            return getattr(store, name)

        def get(self, key: str, start: int = 0) -> bytes:
            if self.fails and key == sorted(info.key for info in store.list(layout.run(RUN, "events/")))[-1]:
                raise StoreUnreachableError("away")
            return store.get(key, start)

    failing = Failing()
    follower = StoreEvents(failing, RUN)  # type: ignore[arg-type]
    with pytest.raises(StoreUnreachableError):
        follower.new()
    failing.fails = False
    assert texts_of(follower.new()) == [at(1).text, at(2).text]


WRITER = """
import os, sys, time
from holdfast.store import open_store
from holdfast.telemetry import recording
from holdfast.telemetry.channel import emit
from holdfast.telemetry.events import *
from holdfast.telemetry import event_log
event_log.FLUSH_SECONDS = 1000.0
with recording(open_store(sys.argv[1]), sys.argv[2], "rank 0", attempt=int(sys.argv[3])):
    emit(Progress(step=1, steps=9, tokens_per_second=1, seconds_left=1))
    emit(SaveCommitted(step=1, seconds=1))
    sys.stdin.readline()
    emit(Progress(step=2, steps=9, tokens_per_second=1, seconds_left=1))
    print("emitted", flush=True)
    time.sleep(1000)
"""


def killed_writer(store: Store, attempt: int, until: Callable[[], object]) -> None:
    """Run a process that is killed after two events that are in the store and one that waits."""
    command = [sys.executable, "-c", WRITER, store.url, RUN, str(attempt)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        while not until():
            assert process.poll() is None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "emitted\n"
        process.send_signal(signal.SIGKILL)


def test_a_killed_process_loses_the_unflushed_tail_of_the_store_and_nothing_of_the_pipe(
    store: Store, pipe: Path
) -> None:
    for attempt in (1, 2):
        killed_writer(store, attempt, lambda: len(read_events(store, RUN)) == 2 * attempt)  # noqa: B023
    kinds = ["progress", "save_committed"]
    assert [(event.attempt, event.kind) for event in read_events(store, RUN)] == [
        (attempt, kind) for attempt in (1, 2) for kind in kinds
    ]
    assert [(event.attempt, event.kind) for event in PipeEvents(pipe).new()] == [
        (attempt, kind) for attempt in (1, 2) for kind in [*kinds, "progress"]
    ]


def test_half_a_line_of_the_pipe_waits_for_its_end(pipe: Path) -> None:
    line = line_of(at(1).model_copy(update={"writer": "w", "number": 1}))
    reader = PipeEvents(pipe)
    assert reader.new() == []
    pipe.write_bytes(line[:30])
    assert reader.new() == []
    pipe.write_bytes(line)
    assert texts_of(reader.new()) == [at(1).text]
    assert reader.new() == []


def test_the_order_is_right_when_the_clock_of_the_next_attempt_is_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(channel.time, "time", lambda: now[0])
    channel._forget()
    with recording(store, RUN, "rank 0", attempt=1):
        emit(at(1))
        now[0] -= 5
        emit(at(2))
    now[0] -= 500
    last = read_events(store, RUN)[-1].time
    channel._forget()
    with recording(store, RUN, "rank 0", attempt=2, not_before=last):
        emit(at(2))
        emit(at(3))
    assert [(event.attempt, event.step) for event in read_events(store, RUN) if isinstance(event, Progress)] == [
        (1, 1),
        (1, 2),
        (2, 2),
        (2, 3),
    ]


def test_a_step_records_how_it_ended(store: Store) -> None:
    with recorded_step(store, RUN, "evaluate") as conclude:
        conclude("blessed")
    with pytest.raises(StoreUnreachableError), recorded_step(store, RUN, "register"):
        raise StoreUnreachableError("no server")
    begin, well, second_begin, badly = read_events(store, RUN)
    assert isinstance(begin, StepBegan) and isinstance(second_begin, StepBegan)
    assert isinstance(well, StepEnded) and isinstance(badly, StepEnded)
    assert (well.name, well.code, well.result) == ("evaluate", 0, "blessed")
    assert (badly.code, badly.reason) == (ExitCode.STORE_UNREACHABLE, "no server")
    assert badly.text.endswith("(store unreachable): no server")
    with recorded_step(store, "", "preprocess"):
        pass
    assert {info.key.split("/")[1] for info in store.list("")} == {RUN}


def test_a_forked_process_is_another_writer(tmp_path: Path, pipe: Path) -> None:
    emit(at(1))
    child = os.fork()
    if child == 0:
        emit(at(2))
        os._exit(0)
    os.waitpid(child, 0)
    emit(at(3))
    events = PipeEvents(pipe).new()
    assert [event.step for event in events if isinstance(event, Progress)] == [1, 2, 3]
    assert len({event.writer for event in events}) == 2


def test_progress_of_a_script_leaves_out_what_it_does_not_report() -> None:
    assert Progress(step=1, steps=4, loss=2.5, seconds_left=1).text == "step 1/4 (25 %)  loss 2.5000  00:00:01 left"


def test_the_text_of_an_exit_names_the_code() -> None:
    assert LaunchEnded(code=137, restart_in=2.0, launch=4, detail="rank 1\non b").text == (
        "launch 4 ended (killed); starting the next in 2 s: rank 1 on b"
    )
    assert events.in_words(128 + 64) == "signal 64"
