"""Events of many processes are folded into few objects. Every reader sees each event once, also during a fold and
after its death."""

import json

import pytest

from holdfast.store import Store, layout
from holdfast.telemetry import event_folding, read_events
from holdfast.telemetry.event_folding import FOLD, QUIET_SECONDS, fold_events
from holdfast.telemetry.event_log import StoreEvents
from holdfast.telemetry.events import Event
from tests.checkpoint.breaking_store import BreakingStore, Killed
from tests.protocol.bucket import Bucket, MemoryStore

RUN = "0123456789abcdef"


class Clock:
    """The clock of the store, in unix seconds."""

    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    """A store that reports the age of its objects by a test's clock."""
    return MemoryStore(Bucket(clock))


def write(store: Store, writer: int, numbers: range, segment: int = 0) -> None:
    """Write a segment of a writer, with the events of these numbers."""
    lines = [
        json.dumps({"v": 1, "writer": f"w{writer}", "number": number, "time": 1000.0 * writer + number,
                    "kind": "warning_issued", "message": f"{writer}.{number}"})
        for number in numbers
    ]  # fmt: skip
    store.put(layout.events(RUN, f"{writer:013d}-aaaaaaaa", segment), ("\n".join(lines) + "\n").encode())


def launches(store: Store, first: int, last: int) -> None:
    """The processes of launches: each leaves two segments."""
    for writer in range(first, last):
        write(store, writer, range(1, 3))
        write(store, writer, range(3, 5), segment=1)


def names(store: Store) -> list[str]:
    return [info.key for info in store.list(layout.run(RUN, "events/"))]


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events]


def test_events_of_many_launches_are_few_objects_and_read_as_before(store: Store, clock: Clock) -> None:
    launches(store, 0, FOLD)
    clock.now += QUIET_SECONDS
    write(store, 999, range(1, 2))
    before = texts(read_events(store, RUN))
    assert len(before) == 4 * FOLD + 1
    assert fold_events(store, RUN) == 2 * FOLD
    assert len(names(store)) == 2, "one that holds what has ended, and the one that its writer may put again"
    assert texts(read_events(store, RUN)) == before
    assert fold_events(store, RUN) == 0
    launches(store, 1000, 1000 + FOLD)
    clock.now += QUIET_SECONDS
    write(store, 9999, range(1, 2))
    before = texts(read_events(store, RUN))
    fold_events(store, RUN)
    assert len(names(store)) == 2
    assert texts(read_events(store, RUN)) == before


def test_full_segments_of_a_long_run_become_few_objects(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_folding, "FULL_BYTES", 3400)
    for segment in range(20):
        write(store, 1, range(10 * segment + 1, 10 * segment + 11), segment)
    before = texts(read_events(store, RUN))
    assert fold_events(store, RUN) >= 16
    assert len(names(store)) < 10
    assert texts(read_events(store, RUN)) == before


def test_the_open_segment_of_a_writer_is_not_folded(store: Store) -> None:
    launches(store, 0, FOLD)
    assert fold_events(store, RUN) == FOLD, "only those that are closed"
    before = texts(read_events(store, RUN))
    write(store, 3, range(3, 9), segment=1)
    assert sorted({*texts(read_events(store, RUN))} - {*before}) == [f"3.{number}" for number in range(5, 9)]


def test_a_writer_that_speaks_again_after_its_segment_was_folded_loses_nothing(store: Store, clock: Clock) -> None:
    launches(store, 0, FOLD)
    clock.now += QUIET_SECONDS
    write(store, 999, range(1, 2))
    follower = StoreEvents(store, RUN)
    previous = texts(follower.new())
    fold_events(store, RUN)
    assert follower.new() == []
    write(store, 3, range(3, 9), segment=1)
    assert texts(follower.new()) == [f"3.{number}" for number in range(5, 9)]
    assert sorted(texts(read_events(store, RUN))) == sorted([*previous, *(f"3.{number}" for number in range(5, 9))])


@pytest.mark.slow
@pytest.mark.parametrize("kill", [True, False])
def test_a_fold_that_dies_anywhere_loses_no_event(store: Store, clock: Clock, kill: bool) -> None:
    launches(store, 0, FOLD)
    clock.now += QUIET_SECONDS
    write(store, 999, range(1, 2))
    before, position = texts(read_events(store, RUN)), 0
    while True:
        breaking = BreakingStore(store, position, kill=kill)
        try:
            fold_events(breaking, RUN)
        except (Killed, Exception):  # noqa: BLE001 - any error of the store
            assert texts(read_events(store, RUN)) == before
            position += FOLD // 2 if 1 < position < FOLD else 1
            continue
        break
    assert texts(read_events(store, RUN)) == before


def test_a_concurrent_reader_and_writer_lose_no_event_during_a_fold(store: Store, clock: Clock) -> None:
    for point in ("get", "put", "list", "delete_many"):
        for key in names(store):
            store.delete(key)
        launches(store, 0, FOLD)
        clock.now += QUIET_SECONDS
        write(store, 999, range(1, 2))
        expected, folds = {*texts(read_events(store, RUN))}, list[int]()

        def fold(operation: str, _key: str, when: str = point, done: list[int] = folds) -> None:
            if operation == when and not done:
                done.append(1)
                fold_events(store, RUN)

        reading = BreakingStore(store, kill=False, before=fold)
        assert {*texts(read_events(reading, RUN))} == expected, point

        for key in names(store):
            store.delete(key)
        launches(store, 0, FOLD)
        clock.now += QUIET_SECONDS
        write(store, 999, range(1, 2))
        grown: list[int] = []

        def grow(operation: str, _key: str, when: str = point, grown: list[int] = grown) -> None:
            if operation == when and not grown:
                grown.append(1)
                write(store, 5, range(3, 7), segment=1)

        folding = BreakingStore(store, kill=False, before=grow)
        fold_events(folding, RUN)
        present = {*texts(read_events(store, RUN))}
        lost = {*expected, "5.5", "5.6"} - present if grown else expected - present
        assert not lost or point == "delete_many", (point, lost)  # their writer still has them, and writes them again
