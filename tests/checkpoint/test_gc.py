"""Collection removes exactly what nothing needs, also during crashes, reads and other collections."""

from dataclasses import replace
from typing import cast

import pytest
import torch

from holdfast.checkpoint import Attempt, Retention, claim_attempt, gc, open_checkpoint, pin
from holdfast.checkpoint.gc import LEASE_SECONDS, MARK_SECONDS, Collector
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.spec.errors import FencedError, MissingError
from holdfast.store import Store, layout
from holdfast.store.interface import ObjectInfo
from tests.checkpoint.breaking_store import BreakingStore
from tests.checkpoint.saving import DESCRIBE, RUN, load, names, same, state, whole
from tests.checkpoint.test_commit import Hurry, committer, write


def commit(store: Store, step: int, attempt: int = 1, writers: int = 1) -> None:
    """Commit a checkpoint that refers to nothing earlier, without a collection."""
    write(store, step, writers, attempt)
    committer(store, writers, attempt).commit(step, DESCRIBE, {})


def collector(store: Store, attempt: int = 1, keep_last: int = 1, clock: Hurry | None = None) -> Collector:
    return Collector(store, Attempt(RUN, attempt), Retention(keep_last), clock or Hurry())


def test_nothing_is_left_of_what_is_not_kept_and_all_of_what_is(folder_store: Store) -> None:
    for step in (3, 6, 9):
        commit(folder_store, step)
    folder_store.put(f"{layout.indexes(RUN, 1, 4)}00000.failed", b"{}")
    assert collector(folder_store).collect(9) == 7  # two roots, two indexes, a failure, two packs
    assert checkpoint_steps(folder_store, RUN) == [9]
    assert names(folder_store, "indexes") == ["000001-000000009/00000.idx"]
    assert len(names(folder_store, "packs")) == 1
    assert same(load(folder_store)[1], whole(state(9)))


def test_packs_newer_than_the_newest_commit_are_kept_as_in_flight(folder_store: Store) -> None:
    for step in (3, 6):
        commit(folder_store, step)
    ShardWriter(folder_store, Attempt(RUN, 1), 0).write(9, whole(state(9)))
    ShardWriter(folder_store, Attempt(RUN, 2), 0).write(3, whole(state(3)))
    before = {*names(folder_store, "packs"), *names(folder_store, "indexes")}
    collector(folder_store).collect(6)
    deleted = before - {*names(folder_store, "packs"), *names(folder_store, "indexes")}
    assert {name[:16] for name in deleted} == {"000001-000000003"}
    commit(folder_store, 12, attempt=2)
    collector(folder_store, 2).collect(12)
    assert {name[:16] for name in names(folder_store, "packs")} == {"000002-000000012"}


def test_a_pack_that_a_later_checkpoint_refers_to_outlives_the_one_that_wrote_it(folder_store: Store) -> None:
    share = ShardWriter(folder_store, Attempt(RUN, 1), 0)
    for step in (3, 6, 9):
        share.write(step, whole(state(3) if step < 9 else state(9)))
        committer(folder_store, 1).commit(step, DESCRIBE, {})
        collector(folder_store).collect(step)
        assert same(load(folder_store)[1], whole(state(3 if step < 9 else 9)))
    assert len(names(folder_store, "packs")) == 2  # the first pack holds `frozen`


def test_only_nodes_and_roots_are_read_of_a_large_gang_and_each_once(folder_store: Store) -> None:
    read: list[str] = []

    def before(operation: str, key: str) -> None:
        if (operation == "get" and "/checkpoints/step" in key) or ("/indexes/" in key and operation == "get"):
            read.append(key.rpartition("/")[2])

    garbage_collector = collector(BreakingStore(folder_store, kill=False, before=before), keep_last=2)
    for step in (3, 6):
        commit(folder_store, step, writers=33)
        read.clear()
        garbage_collector.collect(step)
        assert read == [f"step-{step:09d}.json", "node-1-00001.idx", "node-1-00000.idx"]


def test_a_reader_that_has_marked_a_checkpoint_reads_it_to_the_end(folder_store: Store) -> None:
    for step in (3, 6):
        commit(folder_store, step)
    late, early = open_checkpoint(folder_store, RUN, 3), open_checkpoint(folder_store, RUN, 3)
    garbage_collector = collector(folder_store)
    with early.marked():
        garbage_collector.collect(6)
        assert checkpoint_steps(folder_store, RUN) == [6]
        assert all(torch.equal(early.tensor(name), tensor) for name, tensor in state(3).items())
        with pytest.raises(MissingError, match="no such checkpoint"), late.marked():
            pass
    assert names(folder_store, "checkpoints/readers") == []
    garbage_collector.collect(6)
    assert len(names(folder_store, "packs")) == 1


def test_a_reader_of_a_checkpoint_rewritten_by_another_attempt_gets_missing_error(folder_store: Store) -> None:
    commit(folder_store, 3)
    stale = open_checkpoint(folder_store, RUN, 3)
    commit(folder_store, 3, attempt=2)
    with pytest.raises(MissingError, match="has written it anew"), stale.marked():
        pass


def next_to_a_reader(store: Store) -> tuple[Collector, Hurry, str]:
    """A collector, its clock, and the mark of a reader of a checkpoint that retention does not keep."""
    for step in (3, 6):
        commit(store, step)
    clock, mark = Hurry(), layout.reader(RUN, 3, "reader")
    store.put(mark, open_checkpoint(store, RUN, 3).manifest.to_bytes())
    return collector(store, clock=clock), clock, mark


class EntityTags(BreakingStore):
    """A store whose versions depend on the content alone, as a bucket's entity tags do."""

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        infos = self._store.list(prefix, after)
        return [replace(info, version=self._store.get_versioned(info.key)[1]) for info in infos]


def test_a_sign_of_life_counts_where_the_same_bytes_have_the_same_version(folder_store: Store) -> None:
    bucket = cast(Store, EntityTags(folder_store, kill=False))
    garbage_collector, clock, mark = next_to_a_reader(bucket)
    for _ in range(3):
        garbage_collector.collect(6)
        clock.sleep(MARK_SECONDS - 1)
        bucket.put(mark, bucket.get(mark))
    assert bucket.stat(mark) is not None
    assert len(names(folder_store, "packs")) == 2


def test_the_mark_of_a_dead_reader_holds_for_its_time_by_no_clock_but_the_collectors(folder_store: Store) -> None:
    garbage_collector, clock, mark = next_to_a_reader(folder_store)
    for _ in range(3):
        garbage_collector.collect(6)
        assert len(names(folder_store, "packs")) == 2
        clock.sleep(MARK_SECONDS - 1)
        folder_store.put(mark, folder_store.get(mark))  # a heartbeat
    garbage_collector.collect(6)
    clock.sleep(MARK_SECONDS)
    garbage_collector.collect(6)
    assert len(names(folder_store, "packs")) == 1
    assert folder_store.stat(mark) is None


@pytest.mark.parametrize(
    ("key", "keep_last"),
    [("checkpoints/step-000000003.json", 3), ("checkpoints/readers/step-000000003/torn.json", 1)],
)
def test_nothing_is_collected_while_an_unknown_object_may_need_it(
    folder_store: Store, key: str, keep_last: int
) -> None:
    for step in (3, 6, 9):
        commit(folder_store, step)
    packs = names(folder_store, "packs")
    folder_store.put(layout.run(RUN, key), b"torn")
    collector(folder_store, keep_last=keep_last).collect(9)
    assert names(folder_store, "packs") == packs


def test_nothing_is_collected_while_an_index_of_a_kept_checkpoint_is_unreadable(folder_store: Store) -> None:
    for step in (3, 6, 9):
        commit(folder_store, step)
    key = f"{layout.indexes(RUN, 1, 6)}00000.idx"
    intact = folder_store.get(key)
    folder_store.put(key, intact[:-1])
    collector(folder_store, keep_last=2).collect(9)
    assert len(names(folder_store, "packs")) == 3
    folder_store.put(key, intact)
    collector(folder_store, keep_last=2).collect(9)
    assert len(names(folder_store, "packs")) == 2


def test_readable_packs_of_a_damaged_checkpoint_are_kept(folder_store: Store) -> None:
    for step in (3, 6):
        commit(folder_store, step, writers=2)
    folder_store.put(layout.damaged(RUN, 3), folder_store.get(layout.checkpoint(RUN, 3)))
    folder_store.put(f"{layout.indexes(RUN, 1, 3)}00001.idx", b"torn")
    collector(folder_store, keep_last=2).collect(6)  # two newer checkpoints must exist first
    folder_store.delete(layout.checkpoint(RUN, 3))
    collector(folder_store, keep_last=2).collect(6)
    assert names(folder_store, "indexes")[:2] == ["000001-000000003/00000.idx", "000001-000000003/00001.idx"]
    packs = [name for name in names(folder_store, "packs") if "-000000003-" in name]
    assert packs == [f"{pack}.pack" for pack in sorted(map(str, _packs_of_first_writer(folder_store)))]
    commit(folder_store, 9, writers=2)
    collector(folder_store, keep_last=2).collect(9)
    assert not [name for name in names(folder_store, "packs") if "-000000003-" in name]


def _packs_of_first_writer(store: Store) -> list[object]:
    from holdfast.checkpoint.index import Index

    return list(Index.from_bytes(store.get(f"{layout.indexes(RUN, 1, 3)}00000.idx"), "i").pack_names)


def test_a_pin_added_during_the_deletion_of_its_checkpoint_restores_it(folder_store: Store) -> None:
    for step in (3, 6):
        commit(folder_store, step)
    pinned = False

    def before(operation: str, _key: str) -> None:
        nonlocal pinned
        if operation == "delete_many" and not pinned:
            pinned = True
            pin(folder_store, RUN, 3)

    collector(BreakingStore(folder_store, kill=False, before=before)).collect(6)
    assert checkpoint_steps(folder_store, RUN) == [3, 6]
    assert all(
        torch.equal(open_checkpoint(folder_store, RUN, 3).tensor(name), tensor) for name, tensor in state(3).items()
    )


def test_two_collectors_take_turns_and_one_that_is_silent_is_followed_by_another(folder_store: Store) -> None:
    for step in (3, 6):
        commit(folder_store, step)
    killed, clock = BreakingStore(folder_store, kill=False), Hurry()

    def died(operation: str, _key: str) -> None:
        if operation == "delete_many":
            raise ZeroDivisionError

    killed = BreakingStore(folder_store, kill=False, before=died)
    with pytest.raises(ZeroDivisionError):
        collector(killed).collect(6)
    other = collector(folder_store, clock=clock)
    assert other.collect(6) == 0
    clock.sleep(LEASE_SECONDS - 1)
    assert other.collect(6) == 0
    clock.sleep(1)
    assert other.collect(6) == 3
    assert collector(folder_store).collect(6) == 0  # released, and nothing to collect


def test_a_newer_attempt_does_not_wait_for_the_lease_of_an_older_one(folder_store: Store) -> None:
    for step in (3, 6):
        commit(folder_store, step)
    older = collector(folder_store)
    assert older._lease.take()
    assert collector(folder_store, attempt=2).collect(6) == 3


def test_a_collector_that_lost_its_lease_stops(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "BATCH", 1)
    for step in (3, 6, 9):
        commit(folder_store, step)
    batches: list[str] = []

    def before(operation: str, key: str) -> None:
        if operation == "delete_many":
            batches.append(operation)
            assert collector(folder_store, attempt=2)._lease.take()

    frozen = collector(BreakingStore(folder_store, kill=False, before=before))
    assert frozen.collect(9) == 0
    assert len(batches) == 1
    assert len(names(folder_store, "packs")) == 3


def test_a_replaced_attempt_collects_nothing_more(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "BATCH", 1)
    claim_attempt(folder_store, RUN)
    for step in (3, 6, 9):
        commit(folder_store, step)

    def before(operation: str, _key: str) -> None:
        if operation == "delete_many":
            claim_attempt(folder_store, RUN)

    garbage_collector = collector(BreakingStore(folder_store, kill=False, before=before))
    with pytest.raises(FencedError):
        garbage_collector.collect(9)
    assert checkpoint_steps(folder_store, RUN) == [6, 9]
    assert len(names(folder_store, "packs")) == 3


def test_in_flight_packs_are_kept_when_the_newest_checkpoint_is_deleted(folder_store: Store) -> None:
    for step in (3, 6):
        commit(folder_store, step)
    folder_store.delete(layout.checkpoint(RUN, 6))
    collector(folder_store).collect(6)
    assert len(names(folder_store, "packs")) == 2
