"""Only the newest attempt commits. A replaced attempt notices it and does no harm."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.checkpoint import Attempt, claim_attempt, list_attempts, load_newest
from holdfast.checkpoint.attempts import read_attempt
from holdfast.checkpoint.gc import Collector
from holdfast.checkpoint.lineage import newest_step
from holdfast.checkpoint.retention import Retention, checkpoint_steps
from holdfast.collectives import Gang
from holdfast.launch.launches import claim_launch
from holdfast.spec import ExitCode, HoldfastError
from holdfast.spec.errors import (
    AccessDeniedError,
    DataError,
    FencedError,
    LostPeerError,
    StoreUnreachableError,
)
from holdfast.store import Store, layout
from holdfast.store.sequence import take_next
from tests.checkpoint.breaking_store import BreakingStore
from tests.checkpoint.ranks import in_ranks, process_group
from tests.checkpoint.saving import RUN, checkpointer, load, names, opened, same, save, shards, state, whole


@pytest.mark.slow
def test_no_two_claims_get_the_same_number(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda each: claim_attempt(store, RUN, world_size=each), range(8)))
    assert sorted(claim.number for claim in claims) == list(range(1, 9))
    assert [number for number, _ in list_attempts(store, RUN)] == list(range(1, 9))
    assert {read_attempt(store, RUN, claim.number)["world_size"] for claim in claims} == set(range(8))


def test_a_fenced_attempt_cannot_commit_and_gets_an_error(store: Store) -> None:
    old = checkpointer(store, claim_attempt(store, RUN).number)
    save(old, 3)
    claim_attempt(store, RUN)
    old.save(6, whole(state(6)), {})
    with pytest.raises(FencedError, match="attempt 1 was replaced by attempt 2"):
        old.wait()
    with pytest.raises(FencedError):  # the error repeats
        old.save(9, whole(state(9)), {})
    assert checkpoint_steps(store, RUN) == [3]


def _replaced_at_the_manifest(store: Store, deed: object) -> BreakingStore:
    """The store of an attempt that pauses just before it writes the manifest of step 9, until `deed` is done."""

    def before(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.endswith("checkpoints/step-000000009.json"):
            deed()  # type: ignore[operator]

    return BreakingStore(store, kill=False, before=before)


def _newer_attempt(store: Store, *steps: int) -> None:
    newer = checkpointer(store, claim_attempt(store, RUN).number, keep_last=1)
    manifest, _ = load(store)
    assert manifest is not None
    newer.adopt(manifest)
    for step in steps:
        save(newer, step)


def test_one_that_wakes_up_after_its_successor_committed_the_step_is_fenced(folder_store: Store) -> None:
    frozen = _replaced_at_the_manifest(folder_store, lambda: _newer_attempt(folder_store, 9))
    old = checkpointer(frozen, claim_attempt(folder_store, RUN).number)
    save(old, 6)
    with pytest.raises(FencedError, match="newer attempt 2"):
        save(old, 9)
    assert same(load(folder_store)[1], whole(state(9)))


def test_the_next_attempt_repairs_a_manifest_of_a_fenced_attempt_whose_packs_are_deleted(folder_store: Store) -> None:
    frozen = _replaced_at_the_manifest(folder_store, lambda: _newer_attempt(folder_store, 7))
    old = checkpointer(frozen, claim_attempt(folder_store, RUN).number)
    save(old, 6)
    with pytest.raises(FencedError):
        save(old, 9)  # the manifest appears after the collection of step 7 removed its packs
    assert checkpoint_steps(folder_store, RUN) == [7, 9]
    save(checkpointer(folder_store, 2, keep_last=1), 9)
    assert names(folder_store, "checkpoints") == ["step-000000009.json"]
    assert same(load(folder_store)[1], whole(state(9)))


def test_the_newest_attempts_own_checkpoint_outlives_later_steps_of_a_replaced_one_which_do_not_count(
    folder_store: Store,
) -> None:
    save(checkpointer(folder_store, claim_attempt(folder_store, RUN).number), 9)
    assert claim_attempt(folder_store, RUN).number == 2
    newer = checkpointer(folder_store, 2, keep_last=1)
    save(newer, 6)
    assert checkpoint_steps(folder_store, RUN) == [6, 9]
    save(newer, 7, whole(state(6)))  # refers to what step 6 wrote
    assert checkpoint_steps(folder_store, RUN) == [7, 9]
    assert newest_step(folder_store, RUN) == 7
    loaded, boxes = load(folder_store)
    assert loaded is not None
    assert loaded.step == 7
    assert same(boxes, whole(state(6)))
    assert names(folder_store, "checkpoints/damaged") == []  # it was skipped, not read


def test_the_sweep_of_an_older_attempt_leaves_the_packs_of_a_newer_one(folder_store: Store) -> None:
    old = claim_attempt(folder_store, RUN)
    save(checkpointer(folder_store, old.number), 3)
    in_flight = f"runs/{RUN}/packs/000002-{'0' * 32}.pack"  # durable, but not committed yet
    folder_store.put(in_flight, b"x")
    Collector(folder_store, old, Retention(1)).collect(3)
    assert folder_store.stat(in_flight) is not None
    claim_attempt(folder_store, RUN)
    with pytest.raises(FencedError):
        Collector(folder_store, old, Retention(1)).collect(3)


def test_packs_deleted_before_the_commit_prevent_it(folder_store: Store) -> None:
    writer = checkpointer(folder_store, max_lag_steps=9)
    save(writer, 3)
    folder_store.delete(f"runs/{RUN}/packs/{names(folder_store, 'packs')[0]}")
    with pytest.raises(StoreUnreachableError, match=r"packs/000001-000000003-.* is gone .*not saving"):
        save(writer, 6, whole(state(3)))
    assert checkpoint_steps(folder_store, RUN) == [3]
    save(writer, 9, whole(state(3)))  # writes missing packs again
    assert same(load(folder_store)[1], whole(state(3)))


def test_retention_keeps_exactly_these_steps(folder_store: Store) -> None:
    writer = checkpointer(folder_store, keep_last=2, keep_every=5)
    kept_steps = []
    for step in range(1, 13):
        save(writer, step)
        kept_steps.append(checkpoint_steps(folder_store, RUN))
    assert kept_steps == [
        [1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [5, 6, 7], [5, 7, 8], [5, 8, 9], [5, 9, 10], [5, 10, 11],
        [5, 10, 11, 12],
    ]  # fmt: skip
    assert len(names(folder_store, "packs")) == 5  # one per checkpoint, and the first, which holds `frozen`


@pytest.mark.slow
def test_a_store_failure_of_one_rank_reaches_rank_0_and_nothing_is_committed(tmp_path: Path) -> None:
    messages = in_ranks(3, _one_fails, f"file://{tmp_path / 'store'}", tmp_path)
    assert messages == ["StoreUnreachableError: put: rank 1 cannot write"] * 2 + [""]
    assert checkpoint_steps(opened(f"file://{tmp_path / 'store'}"), RUN) == [3]


def _one_fails(rank: int, size: int, url: str, meetings: Path) -> str:
    store, failing, all_ranks_failed = opened(url), False, threading.Event()

    def before(operation: str, key: str) -> None:
        if failing and operation == "put" and "/packs/" in key:
            raise StoreUnreachableError(f"put: rank {rank} cannot write")
        if failing and key.endswith(".failed"):
            assert all_ranks_failed.wait(180)  # the other ranks fail later,
            time.sleep(0.5)  # after a rank without this wait would have exited

    with process_group(meetings / "meeting", rank, size):
        writer = checkpointer(BreakingStore(store, kill=False, before=before))
        save(writer, 3, shards(state(3), rank, size))
        failing = rank == 1
        with closing(writer):  # a rank ends only after all ranks know of the failure, as in training
            writer.save(6, shards(state(6), rank, size), {})
            try:
                writer.wait()
            except StoreUnreachableError as error:
                all_ranks_failed.set()
                return f"{type(error).__name__}: {error}"
        return ""


def test_a_rank_that_dies_during_a_load_does_not_block_its_peers(tmp_path: Path) -> None:
    errors = in_ranks(2, _one_dies, f"file://{tmp_path / 'store'}", tmp_path)
    assert errors == ["LostPeerError", None]


def _one_dies(rank: int, size: int, url: str, meetings: Path) -> str:
    store = opened(url)
    with process_group(meetings / "meeting", rank, size, seconds=600):
        gang, writer = Gang(), checkpointer(store)
        save(writer, 3, shards(state(3), rank, size))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            load_newest(store, RUN, shards(state(3), rank, size), gang)
        except LostPeerError as error:
            return type(error).__name__
        return "continued alone"


def test_an_attempt_fenced_before_it_checks_its_packs_raises_fenced_error(
    folder_store: Store,
) -> None:
    def replaced(operation: str, key: str) -> None:
        if operation == "stat" and "/packs/" in key and len(list_attempts(folder_store, RUN)) == 1:
            for name in names(folder_store, "packs"):
                folder_store.delete(f"runs/{RUN}/packs/{name}")
            claim_attempt(folder_store, RUN)

    claim_attempt(folder_store, RUN)
    old = checkpointer(BreakingStore(folder_store, kill=False, before=replaced))
    save(old, 3)
    with pytest.raises(FencedError):
        save(old, 6, whole(state(3)))


def test_a_late_gang_of_an_older_launch_does_not_fence_the_current_attempt(store: Store) -> None:
    for _ in range(2):
        claim_launch(store, RUN, {})
    current = claim_attempt(store, RUN, launch=2)
    with pytest.raises(FencedError, match="launch 1 was replaced by launch 2"):
        claim_attempt(store, RUN, launch=1)
    # It read the launches just before launch 2.
    late = Attempt(RUN, take_next(store, layout.attempts(RUN), {"launch": 1}), 1)
    current.check(store)
    with pytest.raises(FencedError, match="launch 1 was replaced by launch 2"):
        late.check(store)
    claim_attempt(store, RUN, launch=2)  # another gang of the same launch, for example after a requeue
    with pytest.raises(FencedError, match="attempt 1 was replaced by attempt 3"):
        current.check(store)


def test_training_continues_within_the_lag_while_the_store_refuses_checkpoints(
    folder_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    away = False

    def before(operation: str, _key: str) -> None:
        if away and operation.startswith("put"):
            raise StoreUnreachableError("put: away")

    writer = checkpointer(BreakingStore(folder_store, kill=False, before=before), max_lag_steps=6)

    def refused(step: int) -> None:
        writer.save(step, whole(state(step)), {})
        with pytest.raises(StoreUnreachableError):
            writer.wait()

    save(writer, 3)
    away = True
    refused(6)
    away = False
    save(writer, 9)
    assert "step 9 is tried now; the newest checkpoint is that of step 3: put: away" in caplog.text
    assert same(load(folder_store)[1], whole(state(9)))
    away = True
    refused(12)
    refused(15)
    assert writer.failed_saves == 2
    with pytest.raises(StoreUnreachableError):  # seven steps beyond step 9
        writer.save(16, whole(state(16)), {})
    assert checkpoint_steps(folder_store, RUN) == [3, 9]


def test_a_failed_garbage_collection_is_logged_and_the_commit_stands(
    folder_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def before(operation: str, key: str) -> None:
        if operation == "delete_many":
            raise AccessDeniedError(f"delete {key}: denied")

    writer = checkpointer(BreakingStore(folder_store, kill=False, before=before), keep_last=1)
    for step in (3, 6, 9):
        save(writer, step)
    assert "left for the next sweep: delete ['runs/run/checkpoints/step-000000003.json']: denied" in caplog.text
    save(checkpointer(folder_store, keep_last=1), 12)
    assert checkpoint_steps(folder_store, RUN) == [12]


def test_an_unexpected_exception_in_a_save_is_reported_with_its_traceback(folder_store: Store) -> None:
    def before(operation: str, key: str) -> None:
        if operation == "put_if_absent" and RUN in key:
            raise ZeroDivisionError

    writer = checkpointer(BreakingStore(folder_store, kill=False, before=before), max_lag_steps=100)
    with pytest.raises(HoldfastError, match=r"(?s)step 3: .*Traceback.*ZeroDivisionError") as error:
        save(writer, 3)
    assert error.value.exit_code == ExitCode.UNEXPECTED


def test_no_pack_is_deleted_while_a_manifest_is_unreadable(folder_store: Store) -> None:
    writer = checkpointer(folder_store, keep_last=2)
    for step in (3, 6):
        save(writer, step)
    intact, packs = folder_store.get(layout.checkpoint(RUN, 6)), names(folder_store, "packs")
    folder_store.put(layout.checkpoint(RUN, 6), intact[:-5])  # damaged for this reader only
    save(writer, 9)
    assert set(packs) <= set(names(folder_store, "packs"))
    folder_store.put(layout.checkpoint(RUN, 6), intact)
    save(writer, 12)
    assert set(packs) > set(packs) & set(names(folder_store, "packs"))


def test_attempts_that_differ_are_no_error_where_no_bits_are_promised(folder_store: Store) -> None:
    save(checkpointer(folder_store, 1), 3)
    newer = checkpointer(folder_store, 2, same_bits=False)
    save(newer, 3, whole(state(4)))
    assert same(load(folder_store)[1], whole(state(4)))
    with pytest.raises(DataError, match="not deterministic"):
        save(checkpointer(folder_store, 3), 3)
