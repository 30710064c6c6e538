"""A pin protects a root: pinned or borrowed checkpoints stay whole while a newer attempt commits and collects."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from holdfast.checkpoint import Manifest, Retention, claim_attempt, list_pins, open_checkpoint, pin, unpin
from holdfast.checkpoint.fork import fork_checkpoint
from holdfast.checkpoint.gc import Collector
from holdfast.checkpoint.lineage import counted_steps, newest_step
from holdfast.checkpoint.load import load_step
from holdfast.checkpoint.reader import Checkpoint
from holdfast.checkpoint.retention import PinRecord, checkpoint_steps
from holdfast.checkpoint.tools import collect_now, list_checkpoints
from holdfast.collectives import Gang
from holdfast.spec.errors import DataError, MissingError, StoreUnreachableError
from holdfast.store import Store, layout, open_store
from tests.checkpoint.breaking_store import BreakingStore
from tests.checkpoint.saving import RUN, blank, same, state, whole
from tests.checkpoint.test_gc import collector, commit


def begun(store: Store) -> None:
    """Attempt 1 has committed steps 3 and 6. Attempt 2 started from step 3, as if the root of 6 appeared late."""
    claim_attempt(store, RUN)
    commit(store, 3)
    commit(store, 6)
    claim_attempt(store, RUN)


def commit_and_collect(store: Store, step: int = 6) -> None:
    """Attempt 2 commits the step with new packs and collects what nothing needs."""
    commit(store, step, attempt=2)
    collector(store, 2).collect(step)


def reads(checkpoint: Checkpoint) -> bool:
    """Whether the whole checkpoint is readable, bit for bit."""
    boxes = blank(whole(state(checkpoint.step)))
    checkpoint.fill(boxes)
    return same(boxes, whole(state(checkpoint.step)))


def pinned(store: Store, name: str, step: int = 6) -> list[Checkpoint]:
    """The checkpoints under a pin."""
    key = layout.pin(RUN, step, name)
    roots = PinRecord.from_bytes(store.get(key), key).roots
    return [Checkpoint(store, Manifest.from_bytes(root.encode(), key)) for root in roots]


def test_a_borrowed_checkpoint_outlives_the_commit_that_replaces_its_root(folder_store: Store) -> None:
    begun(folder_store)
    digest = fork_checkpoint(folder_store, RUN, 6, "child")
    assert reads(open_checkpoint(folder_store, "child", 6))
    commit_and_collect(folder_store)
    assert open_checkpoint(folder_store, RUN, 6).manifest.attempt == 2
    assert reads(open_checkpoint(folder_store, "child", 6))
    assert fork_checkpoint(folder_store, RUN, 6, "child") == digest, "once more changes nothing"
    collector(folder_store, 2).collect(6)
    assert reads(open_checkpoint(folder_store, "child", 6))
    unpin(folder_store, RUN, 6, "forked-child")
    collector(folder_store, 2).collect(6)
    with pytest.raises(DataError):
        reads(open_checkpoint(folder_store, "child", 6))


def test_a_pin_that_is_set_again_protects_both_roots(folder_store: Store) -> None:
    begun(folder_store)
    pin(folder_store, RUN, 6, "paper", "before")
    commit(folder_store, 6, attempt=2)
    pin(folder_store, RUN, 6, "paper", "after")
    pin(folder_store, RUN, 6, "paper", "once more")
    commit_and_collect(folder_store, 9)
    assert [(checkpoint.manifest.attempt, reads(checkpoint)) for checkpoint in pinned(folder_store, "paper")] == [
        (1, True),
        (2, True),
    ]
    assert [pin.reason for pin in list_pins(folder_store, RUN)] == ["once more"]


@pytest.mark.parametrize("act", [pin, partial(fork_checkpoint, borrower="child")], ids=["pin", "fork_checkpoint"])
@pytest.mark.parametrize("newer", [3, 9], ids=["above the newest", "below the newest"])
def test_a_step_of_an_attempt_that_was_replaced_is_refused(
    folder_store: Store, act: Callable[..., object], newer: int
) -> None:
    begun(folder_store)
    write_late = open_checkpoint(folder_store, RUN, 6).manifest
    if newer == 9:
        late = write_late.model_copy(update={"step": 9, "history": ((0, 1), (3, 2)), "attempt": 2})
        folder_store.put(layout.checkpoint(RUN, 9), late.to_bytes())
    else:
        commit(folder_store, 4, attempt=2)
    before = sorted(info.key for info in folder_store.list(""))
    with pytest.raises(MissingError, match="step 6 is of attempt 1, which was replaced"):
        act(folder_store, RUN, 6)
    assert sorted(info.key for info in folder_store.list("")) == before


def test_a_pin_of_other_bits_than_those_that_are_meant_is_refused(folder_store: Store) -> None:
    commit(folder_store, 3)
    with pytest.raises(DataError, match="and none is meant"):
        pin(folder_store, RUN, 3, "model-1", state_digest="none")
    assert list_pins(folder_store, RUN) == []
    pin(folder_store, RUN, 3, state_digest=open_checkpoint(folder_store, RUN, 3).manifest.state_digest)


def test_a_pin_with_a_damaged_record_protects_its_checkpoint(folder_store: Store) -> None:
    for step in (3, 6, 9):
        commit(folder_store, step)
    folder_store.put(layout.pin(RUN, 6, "paper"), b"[" * 100_000)
    (pin,) = list_pins(folder_store, RUN)
    assert pin.reason == "its record is damaged, and it holds all the same"
    collector(folder_store).collect(9)
    assert checkpoint_steps(folder_store, RUN) == [6, 9]
    assert len(list(folder_store.list(layout.packs(RUN)))) == 3
    unpin(folder_store, RUN, 6, "paper")
    collector(folder_store).collect(9)
    assert len(list(folder_store.list(layout.packs(RUN)))) == 1


@pytest.mark.slow
def test_a_fork_stays_loadable_with_a_collection_before_any_of_its_operations(tmp_path: Path) -> None:
    """The other attempt commits and immediately collects. The test repeats this before each operation."""
    outcomes = set()
    for at in range(100):
        store = open_store(f"file://{tmp_path / str(at)}")
        begun(store)
        count = 0

        def before(_operation: str, _key: str, store: Store = store, at: int = at) -> None:
            nonlocal count
            count += 1
            if count == at + 1:
                commit_and_collect(store)

        with suppress(MissingError):
            fork_checkpoint(BreakingStore(store, kill=False, before=before), RUN, 6, "child")
        if newest_step(store, "child") is not None:
            checkpoint = open_checkpoint(store, "child", 6)
            assert reads(checkpoint), f"before operation {at}"
            outcomes.add(checkpoint.manifest.indexes[0].name[:6])
        if count <= at:
            break
    assert outcomes == {"000001", "000002"}, "it borrows the old root or the new one"


@pytest.mark.slow
def test_a_fork_stays_loadable_if_it_runs_before_any_operation_of_a_collection(tmp_path: Path) -> None:
    """The borrower runs before each operation of the other attempt."""
    for at in range(200):
        store = open_store(f"file://{tmp_path / str(at)}")
        begun(store)
        count = 0

        def before(_operation: str, _key: str, store: Store = store, at: int = at) -> None:
            nonlocal count
            count += 1
            if count == at + 1:
                with suppress(MissingError):
                    fork_checkpoint(store, RUN, 6, "child")

        commit_and_collect(BreakingStore(store, kill=False, before=before))
        if newest_step(store, "child") is not None:
            assert reads(open_checkpoint(store, "child", 6)), f"before operation {at}"
        if count <= at:
            break


def test_roots_that_do_not_count_are_left_out_wherever_a_step_is_chosen(folder_store: Store) -> None:
    begun(folder_store)
    commit(folder_store, 4, attempt=2)
    assert counted_steps(folder_store, RUN) == [3, 4]
    assert [row.damaged for row in list_checkpoints(folder_store, RUN, Retention(1))] == [
        "",
        "",
        "does not count: attempt 1 was replaced",
    ]
    with pytest.raises(StoreUnreachableError, match="step 6, to which training goes back, could not be saved"):
        load_step(folder_store, RUN, 6, blank(whole(state(0))), Gang())
    with pytest.raises(MissingError, match="which was replaced"), open_checkpoint(folder_store, RUN, 6).marked():
        pass


def test_a_rehearsed_collection_keeps_what_is_in_pins(folder_store: Store) -> None:
    begun(folder_store)
    pin(folder_store, RUN, 6, "paper")
    commit(folder_store, 6, attempt=2)
    commit(folder_store, 9, attempt=2)
    keys = collect_now(folder_store, RUN, Retention(1), dry_run=True).keys
    assert not [key for key in keys if "000001-000000006" in key]
    Collector(folder_store, claim_attempt(folder_store, RUN), Retention(1))
    collect_now(folder_store, RUN, Retention(1))
    assert all(map(reads, pinned(folder_store, "paper")))
