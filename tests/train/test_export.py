"""Export: from the pieces of a checkpoint to the Hugging Face layout, the same bytes whatever dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.components.checkpoint import (
    Attempt,
    Checkpoint,
    Checkpointer,
    Manifest,
    Retention,
    TensorBox,
    box,
    read_manifest,
    reader,
)
from holdfast.components.dataset import Dataset
from holdfast.components.model import export as model_export
from holdfast.components.model.hugging_face import load_exported
from holdfast.components.model.initialise import initial_tensor, parameter_shapes
from holdfast.components.spec.errors import DataError, StoreUnreachableError
from holdfast.components.store import Store, layout
from holdfast.components.train.export import export
from tests.checkpoint.breaking_store import BreakingStore
from tests.train.tiny_run import DATASET_ID, VOCABULARY, tiny_spec, write_dataset

RUN, STEP, SPEC = "1111222233334444", 12, tiny_spec()
PREFIX = layout.export(RUN, STEP)


@pytest.fixture(autouse=True)
def several_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a few tensors."""
    monkeypatch.setattr(model_export.export_files, "__kwdefaults__", {"max_shard_bytes": 20_000})


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """The weights of a model."""
    shapes = parameter_shapes(SPEC.model, VOCABULARY)
    return {name: initial_tensor(name, shape, SPEC.model, seed) for name, shape in shapes.items()}


def saved(store: Store, seed: int = 1, attempt: int = 1) -> Manifest:
    """The checkpoint of a model, saved as two ranks would that share columns, with a moment that no export has."""
    if store.stat(layout.dataset(DATASET_ID)) is None:
        write_dataset(store)
    describe = {"dataset_id": DATASET_ID, "layout": {}, "random": {}}
    boxes = [TensorBox.whole("optimizer.exp_avg.model.norm.weight", torch.zeros(32))]
    for name, tensor in tensors(seed).items():
        if tensor.dim() == 1:
            boxes.append(TensorBox.whole(name, tensor))
        else:
            boxes.append(TensorBox(name, tuple(tensor.shape), (0, 0), tensor[:, :5]))
            boxes.append(TensorBox(name, tuple(tensor.shape), (0, 5), tensor[:, 5:]))
    writer = Checkpointer(store, Attempt(RUN, attempt), Retention(9, None), describe=describe)
    writer.save(STEP, boxes, {})
    writer.wait()
    return read_manifest(store, RUN, STEP)


def exported(store: Store) -> dict[str, bytes]:
    return {info.key.removeprefix(PREFIX): store.get(info.key) for info in store.list(PREFIX)}


def run_export(store: Store, manifest: Manifest, cache: Path) -> None:
    export(SPEC, manifest, Dataset.open(store, DATASET_ID, cache), store)


def test_an_export_is_the_model_of_the_checkpoint(store: Store, tmp_path: Path) -> None:
    run_export(store, saved(store), tmp_path)
    files = exported(store)
    assert len([name for name in files if name.endswith(".safetensors")]) > 3
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    loaded: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        loaded |= load_file(path)
    assert loaded.keys() == tensors(1).keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(1).items())
    assert load_exported(tmp_path)[0].vocabulary == VOCABULARY


def test_an_export_that_dies_anywhere_goes_on_and_gives_the_same_bytes(folder_store: Store, tmp_path: Path) -> None:
    manifest = saved(folder_store)
    whole = BreakingStore(folder_store, kill=False)
    run_export(whole, manifest, tmp_path)
    expected = exported(folder_store)
    for at in range(whole.operations):
        for info in list(folder_store.list(layout.run(RUN, "export/"))):
            folder_store.delete(info.key)
        with pytest.raises(StoreUnreachableError):
            run_export(BreakingStore(folder_store, at, kill=False), manifest, tmp_path)
        written = [info.version for info in folder_store.list(PREFIX)]
        run_export(folder_store, manifest, tmp_path)
        assert exported(folder_store) == expected
        kept = [info.version for info in folder_store.list(PREFIX)]
        assert len(set(written) - set(kept)) <= 1, "one file at most is written again"
    operations: list[str] = []
    run_export(
        BreakingStore(folder_store, kill=False, before=lambda name, _: operations.append(name)), manifest, tmp_path
    )
    assert not {"put", "put_stream"} & set(operations)


def test_the_export_of_another_state_or_a_changed_file_is_written_anew(folder_store: Store, tmp_path: Path) -> None:
    run_export(folder_store, saved(folder_store, seed=1), tmp_path)
    first = exported(folder_store)
    folder_store.put(PREFIX + "config.json", first["config.json"] + b" ")
    run_export(folder_store, read_manifest(folder_store, RUN, STEP), tmp_path)
    assert exported(folder_store) == first
    folder_store.delete(layout.checkpoint(RUN, STEP))
    run_export(folder_store, saved(folder_store, seed=2, attempt=2), tmp_path)
    second = exported(folder_store)
    assert {name for name in first if first[name] != second[name]} == {
        n for n in first if n.endswith(".safetensors") and n != "none"
    }


def test_a_damaged_piece_is_never_exported(folder_store: Store, tmp_path: Path) -> None:
    manifest = saved(folder_store)
    pack = next(info.key for info in folder_store.list(layout.run(RUN, "packs/")))
    damaged = bytearray(folder_store.get(pack))
    damaged[len(damaged) // 2] ^= 1
    folder_store.put(pack, damaged)
    with pytest.raises(DataError, match="fail their checksum"):
        run_export(folder_store, manifest, tmp_path)
    assert "tokenizer.json" not in exported(folder_store)  # the last of the files


def test_each_piece_of_the_checkpoint_is_read_once(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "PIECE_BYTES", 256)  # twelve rows of the narrow columns, two of the wide ones
    monkeypatch.setattr(reader, "READ_BYTES", 1)
    manifest = saved(folder_store)
    read: list[str] = []
    counting = BreakingStore(folder_store, kill=False, before=lambda _, key: read.append(key))
    run_export(counting, manifest, tmp_path)
    checkpoint = Checkpoint(folder_store, manifest)
    pieces = [piece for name in tensors(1) for piece in checkpoint.pieces(name)]
    assert len(pieces) > 100
    assert len([key for key in read if "/packs/" in key]) == len(pieces)
