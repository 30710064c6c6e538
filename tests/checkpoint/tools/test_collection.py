"""A manual collection removes what retention does not keep, and nothing that any attempt may need."""

import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from holdfast.checkpoint import Retention, claim_attempt, open_checkpoint, pin
from holdfast.checkpoint.gc import Lease
from holdfast.checkpoint.retention import checkpoint_times
from holdfast.checkpoint.tools import collect_now, verify
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout
from holdfast.store.interface import ObjectInfo
from tests.checkpoint.saving import RUN, blank, checkpointer, load, names, save, state, whole


@pytest.fixture
def five(folder_store: Store) -> Store:
    """A store with five checkpoints of one attempt. The second is pinned."""
    writer = checkpointer(folder_store, claim_attempt(folder_store, RUN).number)
    for step in range(1, 6):
        save(writer, step)
    pin(folder_store, RUN, 2)
    return folder_store


def everything(store: Store) -> dict[str, str]:
    return {info.key: info.version for info in store.list("")}


def test_a_dry_run_lists_exactly_the_objects_that_a_collection_deletes(five: Store) -> None:
    before = everything(five)
    rehearsal = collect_now(five, RUN, Retention(2), dry_run=True)
    assert everything(five) == before
    collection = collect_now(five, RUN, Retention(2))
    assert (rehearsal.keys, rehearsal.bytes, rehearsal.steps) == (collection.keys, collection.bytes, (1, 3))
    assert collection.objects == len(collection.keys) > 2
    assert collection.bytes > 0
    assert set(collection.keys) == before.keys() - everything(five).keys()
    assert list(checkpoint_times(five, RUN)) == [2, 4, 5]
    assert all(verify(five, RUN, step).intact for step in (2, 4, 5))
    assert collect_now(five, RUN, Retention(2)).objects == 0


def test_objects_of_a_save_in_flight_are_kept(five: Store) -> None:
    flying = [
        f"runs/{RUN}/packs/000001-000000006-{'0' * 32}.pack",
        f"{layout.indexes(RUN, 1, 6)}00000.idx",
        f"runs/{RUN}/packs/000002-000000003-{'0' * 32}.pack",
    ]
    for key in flying:
        five.put(key, b"x")
    collect_now(five, RUN, Retention(1))
    assert all(five.stat(key) is not None for key in flying)


def test_no_checkpoint_is_deleted_before_the_first_commit_of_a_later_attempt(five: Store) -> None:
    claim_attempt(five, RUN)
    orphan = f"runs/{RUN}/packs/000001-000000001-{'0' * 32}.pack"
    five.put(orphan, b"x")
    collection = collect_now(five, RUN, Retention(1))
    assert "attempt 2 has claimed the run" in collection.held_back
    assert (collection.steps, collection.keys) == ((), (orphan,))
    assert len(names(five, "checkpoints")) >= 5


class Claiming:
    """A store in which another attempt claims the run at the first list or read of `key`."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key, self.claimed = store, key, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        infos = list(self._store.list(prefix, after))
        if not self.claimed and prefix == self._key:
            self.claimed = True
            claim_attempt(self._store, RUN)
        return iter(infos)


@pytest.mark.parametrize("folder", [layout.pins(RUN), layout.readers(RUN), layout.indexes(RUN), layout.packs(RUN)])
def test_an_attempt_that_claims_during_a_collection_finds_a_complete_checkpoint(
    folder_store: Store, folder: str
) -> None:
    writer = checkpointer(folder_store, claim_attempt(folder_store, RUN).number)
    for step in (1, 2):
        save(writer, step)
    folder_store.put(f"runs/{RUN}/packs/000001-000000001-{'0' * 32}.pack", b"of a save that failed")
    store = cast(Store, Claiming(folder_store, folder))
    before = everything(folder_store)
    collection = collect_now(store, RUN, Retention(1))
    assert "attempt 2 has claimed the run meanwhile" in collection.held_back
    assert set(collection.keys) == before.keys() - everything(folder_store).keys()
    if folder == layout.pins(RUN):  # no root was deleted yet: the new attempt may find the newest one damaged
        assert not collection.steps
        folder_store.delete(layout.checkpoint(RUN, 2))
        loaded, _ = load(folder_store)
        assert loaded is not None and loaded.step == 1
    resumed = checkpointer(folder_store, 2)
    step = resumed.restore(blank(whole(state(0))), lambda _: None)
    save(resumed, step + 1, whole(state(step + 1)))
    assert verify(folder_store, RUN, step + 1).intact


def test_a_concurrent_collection_is_held_back_with_the_reason(five: Store) -> None:
    other = Lease(five, layout.collector(RUN), 1, time)
    assert other.take()
    collection = collect_now(five, RUN, Retention(1))
    assert (collection.objects, "another collector is at work" in collection.held_back) == (0, True)
    other.release()
    assert collect_now(five, RUN, Retention(1)).steps == (1, 3, 4)


def test_a_torn_manifest_stops_a_collection_and_is_reported(five: Store) -> None:
    five.put(layout.checkpoint(RUN, 3), b"{")
    before = everything(five)
    with pytest.raises(DataError, match=r"step-000000003\.json.*nothing is collected"):
        collect_now(five, RUN, Retention(1))
    assert everything(five) == before
    with pytest.raises(MissingError, match="no checkpoint"):
        collect_now(five, "other", Retention(1))
    assert open_checkpoint(five, RUN, 5).step == 5
