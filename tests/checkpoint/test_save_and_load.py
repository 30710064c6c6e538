"""A checkpoint gives back what was saved, at any layout, and writes what changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.components.checkpoint import TensorBox, load_newest, read_manifest, read_tensor
from holdfast.components.checkpoint import box as box_module
from holdfast.components.checkpoint import reader as reader_module
from holdfast.components.checkpoint import writer as writer_module
from holdfast.components.checkpoint.manifest import UnfitError
from holdfast.components.runtime.gang import Gang
from holdfast.components.spec.errors import DivergedError, MissingError
from holdfast.components.store import Store
from tests.checkpoint.ranks import in_ranks, process_group
from tests.checkpoint.saving import RUN, blank, checkpointer, load, names, opened, same, save, shards, state, whole


def test_every_kind_of_tensor_comes_back_bit_for_bit(store: Store) -> None:
    save(checkpointer(store), 3)
    manifest, boxes = load(store)
    assert manifest is not None
    assert manifest.step == 3
    assert same(boxes, whole(state(3)))
    assert all(torch.equal(read_tensor(store, manifest, name), tensor) for name, tensor in state(3).items())


def test_a_run_without_checkpoints_has_none(store: Store) -> None:
    assert load(store)[0] is None
    with pytest.raises(MissingError, match="step-000000003"):
        read_manifest(store, RUN, 3)


def test_large_tensors_are_cut_and_read_in_parts(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_module, "PIECE_BYTES", 64)
    monkeypatch.setattr(writer_module, "PACK_BYTES", 100)
    monkeypatch.setattr(reader_module, "READ_BYTES", 150)
    save(checkpointer(folder_store), 3)
    manifest, boxes = load(folder_store)
    assert same(boxes, whole(state(3)))
    assert manifest is not None
    assert len(manifest.packs) > 2
    assert len(manifest.tensors["matrix"].pieces) == 3


def test_training_may_change_the_state_as_soon_as_save_returns(folder_store: Store) -> None:
    writer, tensors = checkpointer(folder_store), state(3)
    writer.save(3, whole(tensors), {})
    for tensor in tensors.values():
        tensor.zero_()
    writer.wait()
    assert same(load(folder_store)[1], whole(state(3)))


def test_what_did_not_change_is_not_written_again(folder_store: Store) -> None:
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


def test_what_does_not_fit_is_refused_and_stays(folder_store: Store) -> None:
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
    for saved in range(1, 5):
        store = opened(f"file://{tmp_path / 'store'}/{saved}")
        assert same(load(store)[1], whole(state(saved)))


def _reshard(rank: int, size: int, url: str, meetings: Path) -> bool:
    right = True
    for saved in range(1, size + 1):
        if rank < saved:
            with process_group(meetings / f"save-{saved}", rank, saved):
                save(checkpointer(opened(f"{url}/{saved}")), 3, shards(state(saved), rank, saved))
    for loading in range(1, size + 1):
        if rank < loading:
            with process_group(meetings / f"load-{loading}", rank, loading):
                gang = Gang()
                for saved in range(1, size + 1):
                    wanted = shards(state(saved), rank, loading)
                    found = blank(wanted)
                    load_newest(opened(f"{url}/{saved}"), RUN, found, gang)
                    right &= same(found, wanted)
    return right
