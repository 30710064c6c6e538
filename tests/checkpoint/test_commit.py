"""The index tree and the agreement through the store: a checkpoint exists only with all of its parts intact."""

import pytest
import torch

from holdfast.checkpoint import Attempt, Checkpoint, TensorBox, claim_attempt, open_checkpoint
from holdfast.checkpoint import commit as commit_module
from holdfast.checkpoint import tree as tree_module
from holdfast.checkpoint.commit import Committer, levels_of
from holdfast.checkpoint.damage_reports import DamageError
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.spec.errors import DataError, DivergedError, FencedError, StoreUnreachableError
from holdfast.store import Store, layout
from tests.checkpoint.breaking_store import BreakingStore
from tests.checkpoint.saving import DESCRIBE, RUN, blank, names, same, shards, state, whole


class Hurry:
    """A clock whose sleeps take no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return 1e9 + self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def committer(store: Store, writers: int, attempt: int = 1) -> Committer:
    return Committer(store, Attempt(RUN, attempt), writers, patience=60, clock=Hurry())


def write(store: Store, step: int, writers: int, attempt: int = 1) -> None:
    """Write the shares of all writers and the nodes above them."""
    for writer in range(writers):
        ShardWriter(store, Attempt(RUN, attempt), writer).write(step, shards(state(step), writer, writers))
    for writer in reversed(range(writers)):  # the leader of a leader comes later
        committer(store, writers, attempt).lead(step, writer)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit a node to two children."""
    monkeypatch.setattr(commit_module, "FANOUT", 2)
    monkeypatch.setattr(tree_module, "FANOUT", 2)


@pytest.mark.parametrize("writers", [1, 2, 3, 4, 5, 7, 9])
@pytest.mark.usefixtures("narrow")
def test_any_number_of_writers_makes_one_checkpoint_that_any_number_of_readers_loads(
    folder_store: Store, writers: int
) -> None:
    write(folder_store, 3, writers)
    manifest = committer(folder_store, writers).commit(3, DESCRIBE, {"optimizer.step": 3})
    assert len(manifest.indexes) <= 2
    assert manifest.writers == writers
    checkpoint = open_checkpoint(folder_store, RUN, 3)
    assert sorted(checkpoint.indexes()) == [info.key for info in folder_store.list(layout.indexes(RUN))]
    assert {layout.pack(RUN, str(pack)) for pack in checkpoint.packs()} == {
        info.key for info in folder_store.list(layout.packs(RUN))
    }
    for readers in (1, 2, 3):
        for rank in range(readers):
            expected = shards(state(3), rank, readers)
            boxes = blank(expected)
            checkpoint.fill(boxes)
            assert same(boxes, expected)


def test_the_tree_is_as_deep_as_the_logarithm_of_the_writers() -> None:
    assert [levels_of(writers) for writers in (1, 32, 33, 1024, 1025, 32768)] == [0, 0, 1, 1, 2, 2]


def test_a_reader_fetches_only_the_indexes_that_may_hold_something_of_its_boxes(folder_store: Store) -> None:
    tensors = {"a": torch.arange(8000.0).view(400, 20), "b": torch.arange(120.0).view(40, 3)}
    for writer in range(40):
        boxes = [box for box in shards(tensors, writer, 40) if box.name == "a" or writer < 20]
        if writer < 20:
            boxes[1] = TensorBox("b", (40, 3), (2 * writer, 0), tensors["b"][2 * writer : 2 * writer + 2])
        ShardWriter(folder_store, Attempt(RUN, 1), writer).write(3, boxes)
    for writer in (0, 32):
        committer(folder_store, 40).lead(3, writer)
    manifest = committer(folder_store, 40).commit(3, DESCRIBE, {})
    read: list[str] = []

    def before(operation: str, key: str) -> None:
        if operation == "get":
            read.append(key.rpartition("/")[2])

    counting = BreakingStore(folder_store, kill=False, before=before)
    part = torch.empty(15, 20)
    Checkpoint(counting, manifest).fill([TensorBox("a", (400, 20), (345, 0), part)])
    assert torch.equal(part, tensors["a"][345:360])
    assert read == ["node-1-00001.idx", "00034.idx", "00035.idx"]
    read.clear()
    part = torch.empty(1, 2)
    Checkpoint(counting, manifest).fill([TensorBox("b", (40, 3), (39, 1), part)])
    assert torch.equal(part, tensors["b"][39:, 1:])
    assert read == ["node-1-00000.idx", "00019.idx"]


@pytest.mark.usefixtures("narrow")
def test_a_part_that_failed_ends_every_wait_above_it_with_its_reason(folder_store: Store) -> None:
    attempt = Attempt(RUN, 1)
    for writer in (0, 1, 2, 4):
        ShardWriter(folder_store, attempt, writer).write(3, shards(state(3), writer, 5))
    ShardWriter(folder_store, attempt, 3).fail(3, DivergedError("step 3: half is no longer finite"))
    patient = Committer(folder_store, attempt, 5, patience=60)  # a real clock; the wait must not be needed
    with pytest.raises(DivergedError, match="half is no longer finite"):
        patient.lead(3, 2)
    assert names(folder_store, "indexes")[-1] == "000001-000000003/node-1-00001.failed"
    for waiting in (lambda: patient.lead(3, 0), lambda: patient.commit(3, DESCRIBE, {})):
        with pytest.raises(DivergedError, match="half is no longer finite"):
            waiting()
    assert checkpoint_steps(folder_store, RUN) == []


@pytest.mark.parametrize("torn", [b"", b"{", b"[]", b'{"error": "os.system", "message": "x"}'])
def test_a_reason_that_cannot_be_read_still_ends_the_wait(folder_store: Store, torn: bytes) -> None:
    folder_store.put(f"{layout.indexes(RUN, 1, 3)}00000.failed", torn)
    with pytest.raises(Exception, match=r"^x$|its reason cannot be read") as error:
        committer(folder_store, 1).commit(3, DESCRIBE, {})
    assert type(error.value).__module__.endswith("spec.errors")


def test_a_commit_timeout_fails_the_save_and_names_the_missing_ranks(folder_store: Store) -> None:
    for writer in (0, 2):
        ShardWriter(folder_store, Attempt(RUN, 1), writer).write(3, shards(state(3), writer, 4))
    with pytest.raises(StoreUnreachableError, match=r"step 3: 00001, 00003 of 4 wrote no index within 60 s"):
        committer(folder_store, 4).commit(3, DESCRIBE, {})
    assert checkpoint_steps(folder_store, RUN) == []


def test_a_committer_of_a_fenced_attempt_raises_fenced_error(folder_store: Store) -> None:
    for _ in range(2):
        claim_attempt(folder_store, RUN)
    with pytest.raises(FencedError):
        committer(folder_store, 2).commit(3, DESCRIBE, {})


@pytest.mark.parametrize("length", [0, 10, -1])
def test_a_damaged_index_is_not_committed(folder_store: Store, length: int) -> None:
    write(folder_store, 3, 2)
    key = f"{layout.indexes(RUN, 1, 3)}00001.idx"
    folder_store.put(key, folder_store.get(key)[:length])
    with pytest.raises(DataError, match=r"00001\.idx"):
        committer(folder_store, 2).commit(3, DESCRIBE, {})
    assert checkpoint_steps(folder_store, RUN) == []


@pytest.mark.parametrize("other", ["000001-000000003/00000", "000001-000000006/00001", "000002-000000003/00001"])
def test_an_index_under_another_name_is_not_committed(folder_store: Store, other: str) -> None:
    write(folder_store, 3, 2)
    write(folder_store, 6, 2)
    write(folder_store, 3, 2, attempt=2)
    key = f"{layout.indexes(RUN, 1, 3)}00001.idx"
    folder_store.put(key, folder_store.get(layout.index(RUN, f"{other}.idx")))
    with pytest.raises(DataError, match="its header has"):
        committer(folder_store, 2).commit(3, DESCRIBE, {})


def test_a_restarted_writer_reuses_the_index_that_it_wrote(folder_store: Store) -> None:
    first = ShardWriter(folder_store, Attempt(RUN, 1), 0)
    first.write(3, whole(state(3)))
    index = first.write(6, whole(state(6)))
    rewritten = ShardWriter(folder_store, Attempt(RUN, 1), 0).write(6, whole(state(6)))  # no memory of packs
    assert rewritten.to_bytes() == index.to_bytes()
    with pytest.raises(DataError, match="saved other bits for the same step"):
        ShardWriter(folder_store, Attempt(RUN, 1), 0).write(6, whole(state(7)))


def test_a_writer_without_memory_refers_to_its_last_index_and_to_nothing_older(folder_store: Store) -> None:
    first = ShardWriter(folder_store, Attempt(RUN, 1), 0)
    for step in (3, 6):
        first.write(step, whole(state(step)))
        committer(folder_store, 1).commit(step, DESCRIBE, {})
    restarted = ShardWriter(folder_store, Attempt(RUN, 1), 0)
    restarted.recall(3, whole(state(0)))
    assert restarted.write(9, whole(state(3))).header.totals.fresh > 40  # only constants are reused
    restarted = ShardWriter(folder_store, Attempt(RUN, 1), 0)
    restarted.recall(3, whole(state(0)))
    assert restarted.write(12, whole(state(3))).header.totals.fresh == 0
    next_attempt = ShardWriter(folder_store, Attempt(RUN, 2), 0)
    next_attempt.recall(6, whole(state(0)))
    assert next_attempt.write(15, whole(state(6))).header.totals.fresh == 0
    unrecalled = ShardWriter(folder_store, Attempt(RUN, 3), 0)
    unrecalled.recall(99, whole(state(0)))  # collected
    assert unrecalled.write(18, whole(state(6))).header.totals.fresh > 0


def test_writers_that_disagree_about_a_tensor_commit_nothing(folder_store: Store) -> None:
    for writer, dtype in enumerate((torch.float32, torch.float64)):
        box = TensorBox("t", (4,), (2 * writer,), torch.ones(2, dtype=dtype))
        ShardWriter(folder_store, Attempt(RUN, 1), writer).write(3, [box])
    with pytest.raises(DataError, match="one writer holds t as float64"):
        committer(folder_store, 2).commit(3, DESCRIBE, {})


@pytest.mark.parametrize("child", ["node-1-00001", "00004"])
def test_a_damaged_index_is_detected_only_by_ranks_that_need_it(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch, child: str
) -> None:
    monkeypatch.setattr(commit_module, "FANOUT", 4)
    monkeypatch.setattr(tree_module, "FANOUT", 4)
    write(folder_store, 3, 5)
    checkpoint = Checkpoint(folder_store, committer(folder_store, 5).commit(3, DESCRIBE, {}))
    key = f"{layout.indexes(RUN, 1, 3)}{child}.idx"
    damaged = bytearray(folder_store.get(key))
    damaged[len(damaged) // 2] ^= 1
    folder_store.put(key, damaged)
    undamaged = [TensorBox("frozen", (10,), (0,), torch.empty(4))]
    checkpoint.fill(undamaged)
    assert torch.equal(undamaged[0].data, state(3)["frozen"][:4])
    with pytest.raises(DamageError) as error:
        Checkpoint(folder_store, checkpoint.manifest).fill(blank(whole(state(3))))
    assert error.value.suspect.key == key
