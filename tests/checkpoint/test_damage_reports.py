"""One bad reader destroys no checkpoint: setting one aside takes two readers that agree."""

import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from holdfast.checkpoint import claim_attempt, load_newest
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.collectives import Gang
from holdfast.spec.errors import BadReaderError, FencedError
from holdfast.store import Store, layout
from holdfast.store.interface import Read
from tests.checkpoint.ranks import in_ranks, process_group
from tests.checkpoint.saving import (
    RUN,
    blank,
    checkpointer,
    load,
    names,
    opened,
    pack_of,
    same,
    save,
    shards,
    state,
    whole,
)


class BadReader:
    """A store as a node with bad memory reads it. `times` reads of packs have a flipped bit."""

    def __init__(self, store: Store, times: int = 10**9) -> None:
        self._store, self._times = store, times

    def __getattr__(self, name: str) -> Callable[..., object]:
        return getattr(self._store, name)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        self._store.read_into(key, start, target)
        if self._times:
            self._times -= 1
            target[0] ^= 1

    def read_many(self, reads: Iterable[Read]) -> None:
        for read in reads:
            self.read_into(read.key, read.start, read.target)
            read.use()


def damage(store: Store, step: int) -> str:
    """Overwrite a pack of a checkpoint. Returns its key."""
    key, _ = pack_of(store, step)
    store.put(key, b"?" * 4096)
    return key


def test_a_checkpoint_that_is_intact_on_the_second_read_is_loaded(
    two_steps: Store, caplog: pytest.LogCaptureFixture
) -> None:
    boxes = blank(whole(state(0)))
    manifest = load_newest(BadReader(two_steps, 1), RUN, boxes, Gang(), 1)  # type: ignore[arg-type]
    assert manifest is not None
    assert manifest.step == 6
    assert same(boxes, whole(state(6)))
    assert "passed it when they were read again" in caplog.text


def test_a_single_rank_quarantines_nothing_and_the_next_successful_attempt_loads_it(two_steps: Store) -> None:
    with pytest.raises(BadReaderError, match=r"step 6: .*fail their checksum; only node .* says so") as error:
        load_newest(BadReader(two_steps), RUN, blank(whole(state(0))), Gang(), 1)  # type: ignore[arg-type]
    assert error.value.here
    assert checkpoint_steps(two_steps, RUN) == [3, 6]
    boxes = blank(whole(state(0)))
    assert load_newest(two_steps, RUN, boxes, Gang(), 2) is not None
    assert same(boxes, whole(state(6)))


def test_two_agreeing_attempts_quarantine_a_checkpoint_and_its_packs_stay_until_newer_ones_exist(
    two_steps: Store,
) -> None:
    key = damage(two_steps, 6)
    for attempt in (1, 1):  # two reports of one attempt count as one reader
        with pytest.raises(BadReaderError):
            load_newest(two_steps, RUN, blank(whole(state(0))), Gang(), attempt)
    older = load_newest(two_steps, RUN, blank(whole(state(0))), Gang(), 2)
    assert older is not None
    assert older.step == 3
    assert names(two_steps, "checkpoints") == ["damaged/step-000000006.json", "step-000000003.json"]
    writer = checkpointer(two_steps, 2, keep_last=2)
    writer.adopt(older)
    save(writer, 6)
    save(writer, 9)
    assert two_steps.stat(key) is not None
    assert names(two_steps, "checkpoints/damaged") == ["step-000000006.json"]
    save(writer, 12)
    assert two_steps.stat(key) is None
    assert names(two_steps, "checkpoints/damaged") == []
    assert same(load(two_steps)[1], whole(state(12)))


def no_first_state(boxes: object) -> None:
    raise AssertionError("there is a checkpoint to load")


def test_an_attempt_that_was_replaced_sets_nothing_aside(two_steps: Store) -> None:
    damage(two_steps, 6)
    first, second, _ = (claim_attempt(two_steps, RUN).number for _ in range(3))
    with pytest.raises(BadReaderError):
        checkpointer(two_steps, first).restore(blank(whole(state(0))), no_first_state)
    with pytest.raises(FencedError, match="attempt 2 was replaced by attempt 3"):
        checkpointer(two_steps, second).restore(blank(whole(state(0))), no_first_state)
    assert checkpoint_steps(two_steps, RUN) == [3, 6]


@pytest.mark.parametrize("torn", [b"[{", b"{}", b'[{"key": 1}]', b"[7]", b"\xff"])
def test_a_doubt_that_cannot_be_read_counts_for_nothing(two_steps: Store, torn: bytes) -> None:
    damage(two_steps, 6)
    two_steps.put(f"{layout.doubts(RUN, 6)}000001.json", torn)
    with pytest.raises(BadReaderError):
        load_newest(two_steps, RUN, blank(whole(state(0))), Gang(), 2)
    assert checkpoint_steps(two_steps, RUN) == [3, 6]


@pytest.mark.parametrize(
    ("bad", "heard"),
    [
        ("one rank", ["False", "True", "False"]),
        ("two ranks of one node", ["True", "True", "False"]),
        ("the pack", ["3", "3", "3"]),
    ],
)
def test_another_rank_and_if_there_is_one_another_node_reads_what_one_cannot_verify(
    tmp_path: Path, bad: str, heard: list[str]
) -> None:
    assert in_ranks(3, _one_doubts, f"file://{tmp_path / 'store'}", tmp_path, bad) == heard
    steps = checkpoint_steps(opened(f"file://{tmp_path / 'store'}"), RUN)
    assert steps == ([3] if bad == "the pack" else [3, 6])


BAD_READERS = {(1, "one rank"), (0, "two ranks of one node"), (1, "two ranks of one node")}


def _one_doubts(rank: int, size: int, url: str, meetings: Path, bad: str) -> str:
    store = opened(url)
    with process_group(meetings / "meeting", rank, size):
        gang, writer = Gang(), checkpointer(store)
        for step in (3, 6):
            save(writer, step, shards(state(step), rank, size))
        if rank == 0 and bad == "the pack":
            key, start = pack_of(store, 6, 1)
            content = bytearray(store.get(key))
            content[start] ^= 4
            store.put(key, content)
        gang.barrier()
        if bad == "two ranks of one node":
            socket.gethostname = lambda: "node-b" if rank == 2 else "node-a"
        reader = BadReader(store) if (rank, bad) in BAD_READERS else store
        boxes = blank(shards(state(3), rank, size))
        try:
            loaded = load_newest(reader, RUN, boxes, gang, 1)  # type: ignore[arg-type]
        except BadReaderError as error:
            return str(error.here)
        assert loaded is not None
        return str(loaded.step)
