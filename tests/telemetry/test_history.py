"""The history is that of the newest checkpoint, also when other attempts have left segments."""

import json
import math
import random

import pytest

from holdfast.spec.errors import DataError
from holdfast.store import Store, layout
from holdfast.store.sequence import record_key
from holdfast.telemetry import read_history, segment
from holdfast.telemetry.history import FOLD, HistoryFollower, MetricSegment, cover, fold_history, segments_of
from tests.checkpoint.breaking_store import BreakingStore, Killed
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


def test_uncommitted_metrics_are_not_in_the_history(store: Store) -> None:
    write(store, 1, 3, 1)
    assert read(store) == []
    commit(store, RUN, 3)
    write(store, 4, 6, 1)
    assert read(store) == [(1, 1), (2, 1), (3, 1)]


def test_a_segment_that_was_written_again_after_a_save_that_failed_gives_every_step_once(store: Store) -> None:
    write(store, 1, 3, 1)  # written, and the answer was lost
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
    """The run resumes from the checkpoint of the newest attempt, so its metrics are the valid ones."""
    for number in (1, 2):
        store.put(record_key(layout.attempts(RUN), number), b"{}")
    write(store, 1, 8, 1)
    commit(store, RUN, 3)
    write(store, 4, 6, 2)
    commit(store, RUN, 6, [(0, 1), (3, 2)])
    commit(store, RUN, 8)  # by attempt 1, which was suspended meanwhile
    expected = [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    assert read(store) == expected
    assert read(store, after=6) == []
    store.put(record_key(layout.attempts(RUN), 3), b"{}")  # which has committed nothing yet
    assert read(store) == expected


def test_no_rows_write_nothing(store: Store) -> None:
    write_segment(store, RUN, 7, [], 1)
    assert list(store.list(layout.run(RUN))) == []


def names(store: Store) -> list[tuple[int, int, int]]:
    return [(segment.after, segment.upto, segment.attempt) for segment in segments_of(store, RUN)]


def many(store: Store, commits: int, attempt: int = 1, after: int = 0) -> None:
    """A segment of two steps for each commit."""
    for number in range(commits):
        write(store, after + 2 * number + 1, after + 2 * number + 2, attempt)


def test_small_segments_become_one_and_the_history_is_the_same(store: Store) -> None:
    many(store, FOLD)
    commit(store, RUN, 2 * FOLD)
    before = read_history(store, RUN)
    assert fold_history(store, RUN, 1) == FOLD
    assert names(store) == [(0, 2 * FOLD, 1)]
    assert read_history(store, RUN) == before
    assert fold_history(store, RUN, 1) == 0
    many(store, 3, after=2 * FOLD)
    assert fold_history(store, RUN, 1) == 0, "not before there are as many again"
    assert fold_history(store, RUN, 2) == 4, "a later attempt folds what is left of the older ones"
    assert names(store) == [(0, 2 * FOLD + 6, 1)]
    assert read_history(store, RUN) == before
    assert read(store, after=2 * FOLD - 1) == [(2 * FOLD, 1)]


def test_segments_of_two_attempts_and_those_with_steps_between_them_stay_apart(store: Store) -> None:
    write(store, 1, 3, 1)
    write(store, 4, 6, 1)
    write(store, 9, 10, 1)
    write(store, 4, 8, 2)
    write(store, 9, 12, 2)
    write(store, 13, 14, 3)
    commit(store, RUN, 14, [(0, 1), (3, 2), (12, 3)])
    before = read(store)
    fold_history(store, RUN, 3)
    assert sorted(names(store)) == [(0, 6, 1), (3, 12, 2), (8, 10, 1), (12, 14, 3)]
    assert read(store) == before == [(step, 1 if step < 4 else 2 if step < 13 else 3) for step in range(1, 15)]


@pytest.mark.parametrize("kill", [True, False])
def test_a_fold_that_dies_anywhere_loses_no_row_and_is_finished_by_the_next(store: Store, kill: bool) -> None:
    many(store, 6)
    commit(store, RUN, 12)
    before, position = read_history(store, RUN), 0
    while True:
        breaking = BreakingStore(store, position, kill=kill)
        try:
            fold_history(breaking, RUN, 2)
        except (Killed, Exception):  # noqa: BLE001 - any error of the store
            assert read_history(store, RUN) == before
            position += 1
            continue
        break
    assert names(store) == [(0, 12, 1)]
    assert read_history(store, RUN) == before
    assert position > 4


def test_concurrent_folds_and_a_reader_see_every_history_row_once(store: Store) -> None:
    """In each round, commits and another fold come before one operation of a fold or of a reader."""
    for position in range(30):
        for info in list(store.list(layout.run(RUN))):
            store.delete(info.key)
        many(store, 5)
        commit(store, RUN, 10)
        before, count = read_history(store, RUN), 0

        def meanwhile(_operation: str, _key: str, at: int = position) -> None:
            nonlocal count
            count += 1
            if count == at + 1:
                many(store, 2, after=10)
                fold_history(store, RUN, 2)

        breaking = BreakingStore(store, kill=False, before=meanwhile)
        if position % 2:
            fold_history(breaking, RUN, 2)
            history = read_history(store, RUN)
        else:
            history = read_history(breaking, RUN)
        assert history == before, position
        fold_history(store, RUN, 2)
        assert read_history(store, RUN) == before


def test_the_history_of_very_many_attempts_needs_one_listing(store: Store) -> None:
    for attempt in range(1, 31):
        write(store, attempt, attempt, attempt)
    commit(store, RUN, 30, [(attempt - 1, attempt) for attempt in range(1, 31)])
    requests: list[str] = []
    watched = BreakingStore(store, kill=False, before=lambda operation, key: requests.append(f"{operation} {key}"))
    rows = read_history(watched, RUN)
    assert [(row["step"], row["loss"]) for row in rows] == [(step, float(step)) for step in range(1, 31)]
    assert sum(request.startswith("list") and "metrics" in request for request in requests) == 1


def test_a_follower_reads_only_what_is_new_and_has_the_rows_of_a_fresh_reading(store: Store) -> None:
    read_keys: list[str] = []
    watched = BreakingStore(store, kill=False, before=lambda operation, key: read_keys.append(f"{operation} {key}"))
    follower = HistoryFollower(watched, RUN)
    assert follower.read() == []
    many(store, FOLD - 1)
    commit(store, RUN, 2 * (FOLD - 1))
    assert follower.read() == read_history(store, RUN) != []
    read_keys.clear()
    write(store, 2 * FOLD - 1, 2 * FOLD, 1)
    commit(store, RUN, 2 * FOLD)
    assert follower.read() == read_history(store, RUN)
    assert sum(key.endswith(".jsonl") for key in read_keys) == 1
    fold_history(store, RUN, 1)
    assert follower.read() == read_history(store, RUN)
    write(store, 101, 110, 2)  # another attempt continued from step 100
    commit(store, RUN, 110, [(0, 1), (100, 2)])
    store.delete_many([layout.checkpoint(RUN, step) for step in (2 * FOLD - 2, 2 * FOLD)])
    assert follower.read() == read_history(store, RUN)
    assert follower.read()[-1] == {"step": 110, "loss": 2.0}


@pytest.mark.parametrize("seed", range(30))
def test_a_cover_of_segments_includes_every_step_without_needless_reads(seed: int) -> None:
    generator = random.Random(seed)
    steps = sorted(generator.sample(range(1, 60), 12))
    parts = [(begin, end) for begin, end in zip([0, *steps], steps, strict=False)]
    parts += [(parts[low][0], parts[generator.randrange(low, len(parts))][1]) for low in generator.sample(range(12), 5)]
    segments = sorted((MetricSegment("", *part, 1, 1) for part in set(parts)), key=lambda one: (one.after, one.upto))
    after, upto = sorted(generator.sample(range(60), 2))
    covering = cover(segments, after, upto)
    expected = {
        step for segment in segments for step in range(segment.after + 1, segment.upto + 1) if after < step <= upto
    }
    assert {step for segment in covering for step in range(segment.after + 1, segment.upto + 1)} >= expected
    assert all(segment.upto > after and segment.after < upto for segment in covering)
    assert len(covering) <= sum(segment.after < upto and segment.upto > after for segment in segments)


def test_figures_of_a_training_that_diverged_are_read(store: Store) -> None:
    ((key, text),) = segment(RUN, 0, rows(1, 2, 1), 1).items()
    store.put(key, f'{text}{{"step": 3, "loss": NaN, "grad_norm": Infinity}}\n'.encode())
    commit(store, RUN, 3)
    row = read_history(store, RUN)[-1]
    assert math.isnan(row["loss"])
    assert row["grad_norm"] == math.inf


@pytest.mark.parametrize("row", ["{", "[]", '{"loss": 1}', '{"step": "1"}', "[" * 9999])
def test_a_damaged_segment_is_reported(store: Store, row: str) -> None:
    ((key, text),) = segment(RUN, 0, rows(1, 2, 1), 1).items()
    store.put(key, f"{text}{row}\n".encode())
    commit(store, RUN, 3)
    with pytest.raises(DataError, match=rf"{key}.* is damaged .* delete it: the history then lacks"):
        read_history(store, RUN)


@pytest.mark.parametrize("root", [b"[" * 99_999, json.dumps({"history": [["a", 1]]}).encode(), b"\xff"])
def test_a_root_that_is_none_has_no_history(store: Store, root: bytes) -> None:
    write(store, 1, 3, 1)
    commit(store, RUN, 3)
    store.put(layout.checkpoint(RUN, 6), root)
    assert read(store) == [(1, 1), (2, 1), (3, 1)]
