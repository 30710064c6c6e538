"""A checkpoint restores what was saved, at any layout, and a save writes only what changed."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import (
    Checkpoint,
    TensorBox,
    digest_of,
    load_newest,
    open_checkpoint,
    packing,
    read_manifest,
)
from holdfast.checkpoint import box as box_module
from holdfast.checkpoint import reader as reader_module
from holdfast.checkpoint.agent.buffers import Copy
from holdfast.checkpoint.box import DTYPES
from holdfast.checkpoint.catalogue import Catalogue
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.checkpoint.root import UnfitError
from holdfast.collectives import Gang
from holdfast.spec.errors import BadReaderError, DivergedError, MissingError
from holdfast.store import Store, layout
from tests.checkpoint.breaking_store import BreakingStore
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


def test_every_kind_of_tensor_round_trips_bit_for_bit(store: Store) -> None:
    save(checkpointer(store), 3)
    manifest, boxes = load(store)
    assert manifest is not None
    assert manifest.step == 3
    assert same(boxes, whole(state(3)))
    assert all(torch.equal(manifest.tensor(name), tensor) for name, tensor in state(3).items())


def test_a_run_without_checkpoints_has_none(store: Store) -> None:
    assert load(store)[0] is None
    with pytest.raises(MissingError, match="step-000000003"):
        read_manifest(store, RUN, 3)


def test_a_tensor_is_read_row_after_row_and_each_piece_once(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_module, "PIECE_BYTES", 64)
    monkeypatch.setattr(reader_module, "READ_BYTES", 100)
    tensors = {**state(3), "tall": torch.randn(50, 8), "columns": torch.randn(23, 8)}
    columns = tensors.pop("columns")
    halves = [
        TensorBox("columns", (23, 8), (0, 3), columns[:, 3:]),
        TensorBox("columns", (23, 8), (0, 0), columns[:, :3]),
    ]
    save(checkpointer(folder_store), 3, [*whole(tensors), *halves])
    checkpoint = open_checkpoint(folder_store, RUN, 3)
    read: list[int] = []
    fill = Checkpoint.fill

    def counted(self: Checkpoint, boxes: Sequence[TensorBox]) -> None:
        read.append(boxes[0].data.nbytes)
        fill(self, boxes)

    monkeypatch.setattr(Checkpoint, "fill", counted)
    for name, tensor in {**tensors, "columns": columns}.items():
        read.clear()
        rows = list(checkpoint.rows(name))
        assert torch.equal(rows[0] if tensor.dim() == 0 else torch.cat(rows), tensor), name
        if name == "tall":  # pieces of two rows: two pieces at a time, because 100 bytes are less than 128
            assert read == [128] * 12 + [64]
        if name == "columns":  # both halves are cut at the same rows
            assert read == [128] * 5 + [96]


def test_large_tensors_are_cut_and_read_in_parts(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_module, "PIECE_BYTES", 64)
    monkeypatch.setattr(packing, "PACK_BYTES", 100)
    monkeypatch.setattr(reader_module, "READ_BYTES", 150)
    save(checkpointer(folder_store), 3)
    manifest, boxes = load(folder_store)
    assert same(boxes, whole(state(3)))
    assert manifest is not None
    assert len(manifest.packs()) > 2
    assert len(manifest.pieces("matrix")) == 3


class _Device:
    """An accelerator that works on request: its streams and their events."""

    def __init__(self) -> None:
        self.done, self.requested, self.waits = threading.Event(), threading.Event(), 0

    def wait_event(self, event: object) -> None:
        self.waits += event is self

    def record_event(self) -> object:
        return self

    def query(self) -> bool:
        self.requested.set()
        return self.done.is_set()


def test_training_waits_for_an_accelerator_in_its_stream_and_never_for_its_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no real device. The test checks the order in which operations are issued."""
    stream, boxes = _Device(), whole({"matrix": torch.randn(7, 5), "step": torch.tensor(3)})
    copies, copy = blank(boxes), Copy(boxes)
    copy.device = "made up"  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    copying = threading.Thread(target=copy.fill, args=(copies, stream))
    copying.start()
    assert stream.requested.wait(180)
    copy.wait()  # returns before the device has reached it
    assert (stream.waits, copy.digest) == (1, None)
    assert copying.is_alive()
    stream.done.set()
    copying.join()
    assert copy.digest == digest_of(boxes)
    assert same(copies, boxes)


def test_training_may_change_the_state_as_soon_as_it_is_copied_and_only_the_third_save_waits_for_a_buffer(
    folder_store: Store,
) -> None:
    store_resumes = threading.Event()

    def before(operation: str, key: str) -> None:
        if operation == "put" and "/packs/" in key:
            assert store_resumes.wait(180)

    writer = checkpointer(BreakingStore(folder_store, kill=False, before=before), max_lag_steps=100)

    def saved(step: int) -> None:
        tensors = state(step)
        writer.save(step, whole(tensors), {})
        writer.wait_for_staging()
        for tensor in tensors.values():
            tensor.zero_()

    for step in (3, 6):
        saved(step)
    third = threading.Thread(target=saved, args=(9,))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    store_resumes.set()
    third.join()
    writer.wait()
    for step in (3, 6, 9):
        checkpoint, boxes = open_checkpoint(folder_store, RUN, step), blank(whole(state(0)))
        checkpoint.fill(boxes)
        assert same(boxes, whole(state(step)))


def test_rank_0_waits_for_a_commit_rather_than_run_further_ahead_than_is_allowed(folder_store: Store) -> None:
    commits = threading.Event()

    def before(operation: str, key: str) -> None:
        if operation == "put_if_absent" and "/checkpoints/" in key:
            assert commits.wait(180)

    writer = checkpointer(BreakingStore(folder_store, kill=False, before=before), max_lag_steps=4)
    writer.save(3, whole(state(3)), {})
    second = threading.Thread(target=save, args=(writer, 6))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert list(folder_store.list(layout.indexes(RUN, 1, 6))) == []
    commits.set()
    second.join()
    assert checkpoint_steps(folder_store, RUN) == [3, 6]


def test_unchanged_tensors_are_not_written_again(folder_store: Store) -> None:
    def bytes_kept() -> int:
        return sum(info.size for info in folder_store.list(f"runs/{RUN}/packs/"))

    writer = checkpointer(folder_store)
    save(writer, 3)
    first = bytes_kept()
    save(writer, 4, whole(state(3)))
    assert bytes_kept() == first
    save(writer, 5)
    assert bytes_kept() == first + first - 40  # all but the ten numbers of `frozen`
    manifest, _ = load(folder_store)
    assert manifest is not None
    resumed = checkpointer(folder_store, 2)
    resumed.adopt(manifest)
    save(resumed, 6, whole(state(5)))
    assert bytes_kept() == 2 * first - 40


def test_a_checkpoint_that_does_not_fit_the_model_is_refused_and_kept(folder_store: Store) -> None:
    save(checkpointer(folder_store), 3)
    for box in (TensorBox.whole("matrix", torch.empty(5, 7)), TensorBox.whole("other", torch.empty(1))):
        with pytest.raises(
            UnfitError, match=rf"^{box.name}: the checkpoint at step 3 holds .* the model needs float32"
        ):
            load_newest(folder_store, RUN, [box], Gang())
    assert load(folder_store)[0] is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["matrix", "half", "scalar"])
def test_a_state_that_is_not_finite_is_never_saved(folder_store: Store, name: str, value: float) -> None:
    writer = checkpointer(folder_store)
    save(writer, 3)
    tensors = state(4)
    tensors[name].view(-1)[-1] = value
    with pytest.raises(DivergedError, match=f"step 4: {name} is no longer finite"):
        save(writer, 4, whole(tensors))
    assert names(folder_store, "checkpoints") == ["step-000000003.json"]


def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path: Path) -> None:
    assert in_ranks(4, _reshard, f"file://{tmp_path / 'store'}", tmp_path) == [True] * 4
    for ranks in range(1, 5):
        store = opened(f"file://{tmp_path / 'store'}/{ranks}")
        assert same(load(store)[1], whole(state(ranks)))


def _reshard(rank: int, size: int, url: str, meetings: Path) -> bool:
    right = True
    for writers in range(1, size + 1):
        if rank < writers:
            with process_group(meetings / f"save-{writers}", rank, writers):
                save(checkpointer(opened(f"{url}/{writers}")), 3, shards(state(writers), rank, writers))
    for loading in range(1, size + 1):
        if rank < loading:
            with process_group(meetings / f"load-{loading}", rank, loading):
                gang = Gang()
                for writers in range(1, size + 1):
                    expected = shards(state(writers), rank, loading)
                    boxes = blank(expected)
                    load_newest(opened(f"{url}/{writers}"), RUN, boxes, gang)
                    right &= same(boxes, expected)
    return right


def test_boxes_known_only_from_the_catalogue_are_made_again_for_each_checkpoint_that_is_tried(tmp_path: Path) -> None:
    store = opened(f"file://{tmp_path / 'store'}")
    first, seen, filled = state(3), [], dict[str, torch.Tensor]()
    writer = checkpointer(store)
    save(writer, 3, whole(first))
    save(writer, 6, whole(state(6) | {"later": torch.ones(5)}))
    key, start = pack_of(store, 6, -1)
    content = bytearray(store.get(key))
    content[start] ^= 4
    store.put(key, content)

    def boxes(catalogue: Catalogue | None) -> list[TensorBox]:
        assert catalogue is not None
        seen.append("later" in catalogue)
        filled.clear()
        filled.update({name: torch.zeros(info.shape, dtype=DTYPES[info.dtype]) for name, info in catalogue.items()})
        return whole(filled)

    with pytest.raises(BadReaderError):
        load_newest(store, RUN, boxes, Gang(), 1)
    checkpoint = load_newest(store, RUN, boxes, Gang(), 2)
    assert checkpoint is not None
    assert checkpoint.step == 3
    assert seen == [True, True, False]
    assert same(whole(dict(sorted(filled.items()))), whole(dict(sorted(first.items()))))
