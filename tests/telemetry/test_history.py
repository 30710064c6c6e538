"""The history is that of the newest checkpoint, whatever segments attempts have left."""

from __future__ import annotations

from holdfast.components.store import Store, layout
from holdfast.components.store.sequence import record_key
from holdfast.components.telemetry import read_history
from tests.telemetry.histories import commit, write_segment

RUN = "0123456789abcdef"


def rows(first: int, last: int, attempt: int) -> list[dict[str, float]]:
    return [{"step": step, "loss": float(attempt)} for step in range(first, last + 1)]


def read(store: Store, after: int = 0) -> list[tuple[int, int]]:
    """The step of each row, and the attempt that measured it."""
    return [(row["step"], int(row["loss"])) for row in read_history(store, RUN, after)]


def write(store: Store, first: int, last: int, attempt: int) -> None:
    write_segment(store, RUN, first - 1, rows(first, last, attempt), attempt)


def test_each_step_is_that_of_the_attempt_whose_arithmetic_is_in_the_weights(store: Store) -> None:
    write(store, 1, 3, 1)
    write(store, 4, 6, 1)  # its checkpoint was lost, or never came
    write(store, 4, 5, 2)
    write(store, 6, 8, 3)
    commit(store, RUN, 8, [(0, 1), (3, 2), (5, 3)])
    assert read(store) == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (7, 3), (8, 3)]
    assert read(store, after=4) == [(5, 2), (6, 3), (7, 3), (8, 3)]
    assert read(store, after=8) == []


def test_what_is_measured_and_not_committed_is_not_yet_history(store: Store) -> None:
    write(store, 1, 3, 1)
    assert read(store) == []
    commit(store, RUN, 3)
    write(store, 4, 6, 1)
    assert read(store) == [(1, 1), (2, 1), (3, 1)]


def test_a_segment_that_was_written_again_after_a_save_that_failed_gives_every_step_once(store: Store) -> None:
    write(store, 1, 3, 1)  # applied, and the answer was lost
    write(store, 1, 6, 1)
    commit(store, RUN, 6)
    assert read(store) == [(step, 1) for step in range(1, 7)]


def test_a_checkpoint_that_cannot_be_read_leaves_the_history_of_the_one_before(store: Store) -> None:
    write(store, 1, 3, 1)
    commit(store, RUN, 3)
    write(store, 4, 6, 1)
    store.put(layout.checkpoint(RUN, 6), b"torn")
    assert read(store) == [(1, 1), (2, 1), (3, 1)]


def test_a_root_that_a_replaced_attempt_writes_late_has_no_history(store: Store) -> None:
    """The run goes on from the checkpoint of the newest attempt: its metrics are those that are told."""
    for number in (1, 2):
        store.put(record_key(layout.attempts(RUN), number), b"{}")
    write(store, 1, 8, 1)
    commit(store, RUN, 3)
    write(store, 4, 6, 2)
    commit(store, RUN, 6, [(0, 1), (3, 2)])
    commit(store, RUN, 8)  # by attempt 1, which stood still meanwhile
    expected = [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    assert read(store) == expected
    assert read(store, after=6) == []
    store.put(record_key(layout.attempts(RUN), 3), b"{}")  # which has committed nothing yet
    assert read(store) == expected


def test_no_rows_write_nothing(store: Store) -> None:
    write_segment(store, RUN, 7, [], 1)
    assert list(store.list(layout.run(RUN))) == []
