"""Export: from the pieces of a checkpoint to the Hugging Face layout, with the same bytes after any crash."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.checkpoint import (
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
from holdfast.components.train.export import export
from holdfast.dataset import Dataset
from holdfast.model import export as model_export
from holdfast.model import verified
from holdfast.model.exported import require_intact
from holdfast.model.files import Folder
from holdfast.model.hugging_face import load_exported
from holdfast.model.initialise import initial_tensor, parameter_shapes
from holdfast.model.verified import Digester, ExportRecord, VerifiedFiles
from holdfast.spec.errors import DataError, MissingError, StoreUnreachableError
from holdfast.store import Store, layout
from tests.checkpoint.breaking_store import BreakingStore
from tests.train.tiny_run import DATASET_ID, VOCABULARY, tiny_spec, write_dataset

RUN, STEP, SPEC = "1111222233334444", 12, tiny_spec("model.layers=1")
FOLDER = layout.exports(RUN)


@pytest.fixture(autouse=True)
def several_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set shards to a few tensors."""
    monkeypatch.setattr(model_export, "MAX_SHARD_BYTES", 20_000)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """The weights of a model."""
    shapes = parameter_shapes(SPEC.model, VOCABULARY)
    return {name: initial_tensor(name, shape, SPEC.model, seed) for name, shape in shapes.items()}


def saved(store: Store, seed: int = 1, attempt: int = 1) -> Manifest:
    """The checkpoint of a model, saved like two ranks that share columns, with a moment that no export has."""
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


def prefix(manifest: Manifest) -> str:
    return layout.export(RUN, STEP, manifest.state_digest)


def exported(store: Store, manifest: Manifest) -> dict[str, bytes]:
    return {info.key.removeprefix(prefix(manifest)): store.get(info.key) for info in store.list(prefix(manifest))}


def run_export(store: Store, manifest: Manifest, cache: Path) -> str:
    return export(SPEC, manifest, Dataset.open(store, DATASET_ID, cache), store)


def test_an_export_is_the_model_of_the_checkpoint(store: Store, tmp_path: Path) -> None:
    manifest = saved(store)
    run_export(store, manifest, tmp_path)
    files = exported(store, manifest)
    assert len([name for name in files if name.endswith(".safetensors")]) > 3
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    loaded: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        loaded |= load_file(path)
    assert loaded.keys() == tensors(1).keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(1).items())
    assert load_exported(tmp_path)[0].vocabulary == VOCABULARY


@pytest.mark.slow
def test_an_export_that_fails_at_any_operation_resumes_with_the_same_bytes(folder_store: Store, tmp_path: Path) -> None:
    manifest = saved(folder_store)
    whole = BreakingStore(folder_store, kill=False)
    run_export(whole, manifest, tmp_path)
    expected = exported(folder_store, manifest)
    for at in range(whole.operations):
        for info in list(folder_store.list(layout.run(RUN, "export/"))):
            folder_store.delete(info.key)
        with pytest.raises(StoreUnreachableError):
            run_export(BreakingStore(folder_store, at, kill=False), manifest, tmp_path)
        versions_before = [info.version for info in folder_store.list(prefix(manifest))]
        run_export(folder_store, manifest, tmp_path)
        assert exported(folder_store, manifest) == expected
        versions_after = [info.version for info in folder_store.list(prefix(manifest))]
        assert len(set(versions_before) - set(versions_after)) <= 1, "one file at most is written again"
    operations: list[str] = []
    run_export(
        BreakingStore(folder_store, kill=False, before=lambda name, _: operations.append(name)), manifest, tmp_path
    )
    assert not {"put", "put_stream"} & set(operations)


def test_a_changed_export_file_is_rewritten_and_another_state_gets_another_folder(
    folder_store: Store, tmp_path: Path
) -> None:
    manifest = saved(folder_store, seed=1)
    digest = run_export(folder_store, manifest, tmp_path)
    first = exported(folder_store, manifest)
    folder_store.put(prefix(manifest) + "config.json", first["config.json"] + b" ")
    assert run_export(folder_store, read_manifest(folder_store, RUN, STEP), tmp_path) == digest
    assert exported(folder_store, manifest) == first
    folder_store.delete(layout.checkpoint(RUN, STEP))
    other = saved(folder_store, seed=2, attempt=2)
    assert run_export(folder_store, other, tmp_path) != digest
    second = exported(folder_store, other)
    assert {name for name in first if first[name] != second[name]} == {n for n in first if n.endswith(".safetensors")}
    assert exported(folder_store, manifest) == first, "what was judged stays"


@pytest.mark.parametrize("bytes_flipped", [1, 100_000])
def test_the_record_knows_every_byte(folder_store: Store, tmp_path: Path, bytes_flipped: int) -> None:
    manifest = saved(folder_store)
    digest = run_export(folder_store, manifest, tmp_path)
    folder = prefix(manifest)
    record = require_intact(folder_store, folder, digest)
    assert record.files.keys() == exported(folder_store, manifest).keys()
    for name in record.files:
        whole = folder_store.get(folder + name)
        for at in {0, len(whole) // 2, len(whole) - 1}:
            damaged = bytearray(whole)
            for offset in range(at, min(at + bytes_flipped, len(whole))):
                damaged[offset] ^= 0x20
            folder_store.put(folder + name, bytes(damaged))
            for changed in (False, True):
                with pytest.raises(DataError, match=f"{name}: bytes 0 to {len(whole)} are not those"):
                    require_intact(folder_store, folder, digest, changed=changed)
        folder_store.put(folder + name, whole[:-1])
        with pytest.raises(DataError, match=f"{name}: has {len(whole) - 1} bytes, and {len(whole)} were exported"):
            require_intact(folder_store, folder)
        folder_store.delete(folder + name)
        with pytest.raises(MissingError, match=f"{name}: is missing"):
            require_intact(folder_store, folder)
        folder_store.put(folder + name, whole)
    with pytest.raises(DataError, match="is another export"):
        require_intact(folder_store, folder, "0" * 16)


def test_any_range_of_a_file_is_checked_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "BLOCK_BYTES", 16)
    content = bytes(range(100))
    (tmp_path / "file").write_bytes(content)
    digester = Digester()
    for part in (content[:3], content[3:40], content[40:]):
        digester.update(part)
    record = ExportRecord(state_digest="s", files={"file": digester.record("")}, whole=True)
    assert [file.size for file in record.files.values()] == [100]
    files = VerifiedFiles(Folder(tmp_path), record)
    for start in range(101):
        for end in range(start, 101):
            target = bytearray(end - start)
            files.read_into("file", start, memoryview(target))
            assert bytes(target) == content[start:end]
    with pytest.raises(DataError, match="ends after 100 bytes"):
        files.read_into("file", 90, memoryview(bytearray(11)))
    assert files.size("other") is None
    (tmp_path / "file").write_bytes(content[:50] + b"x" + content[51:])
    fresh = VerifiedFiles(Folder(tmp_path), record)
    fresh.read_into("file", 64, memoryview(bytearray(36)))
    for start, end in ((48, 64), (50, 51), (63, 64), (0, 100), (40, 49)):
        with pytest.raises(DataError, match="bytes 48 to 64 are not those"):
            fresh.read_into("file", start, memoryview(bytearray(end - start)))


def test_a_damaged_piece_is_never_exported(folder_store: Store, tmp_path: Path) -> None:
    manifest = saved(folder_store)
    pack = next(info.key for info in folder_store.list(layout.run(RUN, "packs/")))
    damaged = bytearray(folder_store.get(pack))
    damaged[len(damaged) // 2] ^= 1
    folder_store.put(pack, damaged)
    with pytest.raises(DataError, match="fail their checksum"):
        run_export(folder_store, manifest, tmp_path)
    assert "tokenizer.json" not in exported(folder_store, manifest)  # the last of the files


def test_each_piece_of_the_checkpoint_is_read_once(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "PIECE_BYTES", 256)  # twelve rows of the narrow columns, or two of the wide ones
    monkeypatch.setattr(reader, "READ_BYTES", 1)
    manifest = saved(folder_store)
    read: list[str] = []
    counting = BreakingStore(folder_store, kill=False, before=lambda _, key: read.append(key))
    run_export(counting, manifest, tmp_path)
    checkpoint = Checkpoint(folder_store, manifest)
    pieces = [piece for name in tensors(1) for piece in checkpoint.pieces(name)]
    assert len(pieces) > 100
    assert len([key for key in read if "/packs/" in key]) == len(pieces)
