"""A long run keeps a bounded number of events, and its ledger and its cost have the same sums."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.store import Store, layout, open_store
from holdfast.telemetry import event_log, read_events
from holdfast.telemetry.event_folding import condense
from holdfast.telemetry.event_log import PipeEvents, StoreEvents
from holdfast.telemetry.events import Progress, SaveCommitted, StragglerDetected, TimeSpent
from holdfast.telemetry.ledger import ledger

RUN, STEPS, RANKS = "run", 160, 3


def lines() -> Iterator[tuple[str, dict[str, object]]]:
    """(writer, event) pairs of a run in two attempts whose ranks report every step."""
    clock = 1000.0
    numbers: dict[str, int] = {}

    def record(writer: str, kind: str, **more: object) -> tuple[str, dict[str, object]]:
        numbers[writer] = numbers.get(writer, 0) + 1
        return writer, {"v": 1, "writer": writer, "number": numbers[writer], "kind": kind, "time": clock, **more}

    yield record("launcher", "step_began", name="train")
    step = 0
    for attempt in (1, 2):
        yield record("launcher", "launch_began", job="j", nodes=1, processes=RANKS, launch=attempt)
        clock += 3
        for rank in range(RANKS):
            yield record(f"{attempt}-{rank}", "attempt_began", world=RANKS, step=step, attempt=attempt, host="h", pid=1)
        for _ in range(STEPS):
            clock, step = clock + 1.0, step + 1
            for rank in range(RANKS):
                spent = {"forward": 0.7, "data": 0.2, "check": 0.1}
                yield record(
                    f"{attempt}-{rank}", "time_spent", rank=rank, step=step, seconds=spent, attempt=attempt,
                    joules=5.0 if rank else None, utilisation=0.5 if step % 2 else 1.0, peak_memory=step,
                )  # fmt: skip
            if step % 10 == 0:
                yield record(f"{attempt}-0", "save_committed", step=step, seconds=0.1, bytes=1, attempt=attempt)
            if step == 7:
                yield record(
                    f"{attempt}-0",
                    "straggler_detected",
                    rank=1,
                    host="slow",
                    phase="data",
                    ratio=2.0,
                    seconds=1,
                    step=7,
                )
        yield record("launcher", "launch_ended", code=0 if attempt == 2 else 137, reason="", launch=attempt,
                   restart_in=None if attempt == 2 else 1.0)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    event_store = open_store(f"file://{tmp_path}")
    texts: dict[str, list[str]] = {}
    for writer, event in lines():
        texts.setdefault(writer, []).append(json.dumps(event, separators=(",", ":")) + "\n")
    for writer, event_lines in texts.items():
        for segment, first in enumerate(range(0, len(event_lines), 100)):
            event_store.put(layout.events(RUN, writer, segment), "".join(event_lines[first : first + 100]).encode())
    return event_store


def test_frequent_events_are_merged_and_their_sums_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_events(store, RUN)
    assert len([event for event in whole if isinstance(event, TimeSpent)]) == 2 * STEPS * RANKS
    monkeypatch.setattr(event_log, "MOST", 120)
    merged = read_events(store, RUN)
    assert len(merged) <= 2 * 120
    assert [event.time for event in merged] == sorted(event.time for event in merged)
    rest = [[event for event in events if not isinstance(event, TimeSpent)] for events in (whole, merged)]
    assert rest[0] == rest[1]
    full, other = ledger(whole), ledger(merged)
    assert other.wall == full.wall
    assert {name: pytest.approx(seconds) for name, seconds in full.seconds.items()} == other.seconds
    joules = [sum(event.joules or 0 for event in events if isinstance(event, TimeSpent)) for events in (whole, merged)]
    assert joules[0] == pytest.approx(joules[1])
    peaks = [max(event.peak_memory for event in events if isinstance(event, TimeSpent)) for events in (whole, merged)]
    assert peaks[0] == peaks[1] == 2 * STEPS
    newest = {(event.attempt, event.rank): event.step for event in merged if isinstance(event, TimeSpent)}
    assert set(newest.values()) == {STEPS, 2 * STEPS}


def test_a_follower_that_meets_a_long_run_gets_the_rest_event_by_event(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MOST", 120)
    follower = StoreEvents(store, RUN)
    assert len(follower.new()) <= 2 * 120
    assert follower.new() == []
    entry = {"v": 1, "writer": "2-0", "number": 10_000, "kind": "time_spent", "time": 9e9, "rank": 0, "step": 801}
    store.put(layout.events(RUN, "2-0", 99), json.dumps(entry).encode() + b"\n")
    assert [event.number for event in follower.new()] == [10_000]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [4000, 2**20])
def test_the_file_of_a_machine_is_read_in_batches_and_condensed_too(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    whole = read_events(store, RUN)
    pipe = tmp_path / "pipe"
    pipe.write_text("".join(json.dumps(event) + "\n" for _, event in lines()) + "x" * 9000 + "\nincomplete")
    monkeypatch.setattr(event_log, "MOST", 120)
    monkeypatch.setattr(event_log, "BATCH_BYTES", batch)
    follower = PipeEvents(pipe)
    merged = follower.new()
    assert len(merged) <= 2 * 120
    assert ledger(merged).wall == ledger(whole).wall
    assert {n: pytest.approx(seconds) for n, seconds in ledger(whole).seconds.items()} == ledger(merged).seconds
    assert follower.new() == []
    entry = {"v": 1, "writer": "2-0", "number": 10_000, "kind": "time_spent", "time": 9e9, "rank": 0, "step": 801}
    with pipe.open("a") as file:
        file.write("\n" + json.dumps(entry) + "\n")
    assert [event.number for event in follower.new()] == [10_000]


def test_events_are_read_by_kind(store: Store) -> None:
    (straggler,) = read_events(store, RUN, kinds=[StragglerDetected])
    assert isinstance(straggler, StragglerDetected)
    assert (straggler.host, straggler.step) == ("slow", 7)
    assert {type(event) for event in read_events(store, RUN, kinds=[SaveCommitted])} == {SaveCommitted}


def test_last_events_of_a_process_are_not_merged_with_later_ones() -> None:
    fields = {"writer": "w", "rank": 0, "attempt": 1, "seconds": {"forward": 1.0}}
    events = [
        TimeSpent.model_validate({**fields, "step": step, "time": float(step), "number": step, "last": step == 2})
        for step in (1, 2, 3)
    ]
    condensed: list[Any] = [*condense(events)]
    assert [event.step for event in condensed] == [2, 3]
    assert sum(sum(event.seconds.values()) for event in condensed) == 3.0


@pytest.mark.parametrize("field", ["time", "seconds_left", "loss"])
def test_an_event_with_a_number_that_is_too_large_is_left_out(tmp_path: Path, field: str) -> None:
    fields = {"v": 1, "writer": "w", "number": 1, "kind": "progress", "time": 1.0, "step": 1, "steps": 2, "loss": 1.0,
            "grad_norm": 1.0, "tokens_per_second": 1.0, "seconds_left": 1.0}  # fmt: skip
    event_store = open_store(f"file://{tmp_path}")
    line = json.dumps(fields).encode()
    event_store.put(layout.events(RUN, "w", 0), line + b"\n" + line.replace(b'"number": 1', b'"number": 2'))
    assert [type(event) for event in read_events(event_store, RUN)] == [Progress, Progress]
    changed = json.dumps({**fields, field: 0.0, "number": 3}).replace(f'"{field}": 0.0', f'"{field}": 1e999')
    event_store.put(layout.events(RUN, "w", 1), changed.encode() + b"\n" + b"[" * 100_000 + b"\n\xff\n")
    assert len(read_events(event_store, RUN)) == 2
