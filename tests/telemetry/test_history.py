"""The history reads back every step once, whatever segments attempts have left."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.components.store import Store, layout, open_store
from holdfast.components.telemetry import read_history, write_segment

RUN = "0123456789abcdef"


def rows(first: int, last: int, time: float) -> list[dict[str, float]]:
    return [{"step": step, "time": time, "loss": 1.0 / step} for step in range(first, last + 1)]


def test_segments_of_two_attempts_that_overlap_give_every_step_once(store: Store):
    write_segment(store, RUN, 0, rows(1, 5, time=1.0))
    write_segment(store, RUN, 3, rows(4, 9, time=2.0))
    history = read_history(store, RUN)
    assert [row["step"] for row in history] == list(range(1, 10))
    assert [row["step"] for row in read_history(store, RUN, after=6)] == [7, 8, 9]


def test_a_row_that_was_read_never_changes_when_a_later_attempt_writes_the_step_again(tmp_path: Path):
    store = open_store(f"file://{tmp_path}")
    write_segment(store, RUN, 0, rows(1, 50, time=1.0))
    for info in store.list(layout.run(RUN, "metrics/")):
        os.utime(tmp_path / info.key, (1, 1))
    write_segment(store, RUN, 0, rows(1, 25, time=2.0))  # another `every_steps`: its key sorts first
    assert {row["time"] for row in read_history(store, RUN)} == {1.0}


def test_no_rows_write_nothing(store: Store):
    write_segment(store, RUN, 7, [])
    assert read_history(store, RUN) == []
