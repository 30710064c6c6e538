"""States are exported and imported bit by bit, in bounded memory, and nothing of an import is executed."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint import Checkpoint, digest_of, open_checkpoint
from holdfast.checkpoint.fingerprint import StateDigest
from holdfast.checkpoint.tools import verify
from holdfast.dataset import Dataset
from holdfast.exchange import (
    DistributedCheckpoint,
    HuggingFace,
    ImportedCheckpoint,
    Source,
    UniversalCheckpoint,
    export_dcp,
    export_hugging_face,
    import_checkpoint,
    upload_dcp,
)
from holdfast.model.initialise import initial_tensor, parameter_shapes
from holdfast.spec import Spec, run_id
from holdfast.spec.errors import DataError, MissingError, StoreUnreachableError
from holdfast.store import Store, open_store
from tests.checkpoint.ranks import in_ranks
from tests.checkpoint.saving import RUN, checkpointer, save, state, whole
from tests.model.exporting import write_hugging_face
from tests.train.ranks import Runs, join, train_in_ranks
from tests.train.test_engines import overrides
from tests.train.tiny_run import (
    DATASET_ID,
    END_OF_TEXT,
    VOCABULARY,
    _tokenizer,
    new_store,
    tiny_assignment,
    tiny_spec,
)

MOMENTS = {"exp_avg": "optimizer.exp_avg.", "exp_avg_sq": "optimizer.exp_avg_sq."}


def tensors_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.tensor(name) for name in checkpoint.tensors}


def weights(spec: Spec) -> dict[str, torch.Tensor]:
    """Weights that no seed of a spec gives."""
    shapes = parameter_shapes(spec.model, VOCABULARY)
    return {name: initial_tensor(name, shape, spec.model, seed=77) for name, shape in shapes.items()}


def taken(store: Store, source: Source, step: int = 0) -> tuple[ImportedCheckpoint, Checkpoint]:
    imported = import_checkpoint(tiny_spec(), DATASET_ID, source, store, step=step)
    assert verify(store, imported.run_id, step).intact
    return imported, open_checkpoint(store, imported.run_id, step)


def test_torch_loads_what_was_exported_for_it(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.exchange.dcp.PART_BYTES", 40)  # several parts per tensor
    save(checkpointer(folder_store), 3)
    progress: list[tuple[int, int]] = []
    export_dcp(open_checkpoint(folder_store, RUN, 3), tmp_path / "out", lambda *now: progress.append(now))
    expected = state(3)
    loaded: dict[str, Any] = {name: torch.full_like(tensor, 9) for name, tensor in expected.items() if tensor.numel()}
    loaded["optimizer.step"] = torch.tensor(0)
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    assert loaded.pop("optimizer.step").item() == 3
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name
    assert progress[-1][0] == progress[-1][1] == sum(tensor.nbytes for tensor in expected.values())
    with pytest.raises(DataError, match="not empty"):
        export_dcp(open_checkpoint(folder_store, RUN, 3), tmp_path / "out")


def test_torch_loads_what_was_uploaded_for_it_and_an_interrupted_upload_is_no_checkpoint(
    folder_store: Store, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.exchange.dcp.PART_BYTES", 40)
    save(checkpointer(folder_store), 3)
    checkpoint, target = open_checkpoint(folder_store, RUN, 3), open_store(f"{s3_url}/dcp")
    upload, uploaded, here = type(target).upload, list[str](), set[int]()

    def interrupted(store: Store, path: Path, key: str) -> None:
        if len(uploaded) == 3:
            raise StoreUnreachableError("the bucket is gone")
        here.add(len(list(path.parent.iterdir())))
        upload(store, path, key)
        uploaded.append(key)

    with monkeypatch.context() as patch, pytest.raises(StoreUnreachableError, match="the bucket is gone"):
        patch.setattr(type(target), "upload", interrupted)
        upload_dcp(checkpoint, target)
    assert [info.key for info in target.list("")] == sorted(uploaded)
    assert len(uploaded) == 3
    assert here == {1}  # files on this machine at a time
    upload_dcp(checkpoint, target)
    export_dcp(checkpoint, tmp_path / "folder")
    keys = {path.name for path in (tmp_path / "folder").iterdir()}
    assert {".metadata", *uploaded} <= keys
    (tmp_path / "out").mkdir()
    for key in keys:
        target.download(key, tmp_path / "out" / key)
    expected = state(3)
    loaded: dict[str, Any] = {name: torch.full_like(tensor, 9) for name, tensor in expected.items() if tensor.numel()}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name
    with pytest.raises(DataError, match="name another prefix"):
        upload_dcp(checkpoint, target)


def test_the_model_of_a_checkpoint_becomes_a_hugging_face_folder_that_reads_back_to_the_bit(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec()
    tensors = weights(spec)
    save(
        checkpointer(store),
        3,
        [*whole(tensors), *whole({MOMENTS["exp_avg"] + name: tensors[name] for name in tensors})],
    )
    progress: list[tuple[int, int]] = []
    export_hugging_face(
        open_checkpoint(store, RUN, 3),
        spec,
        Dataset.open(store, DATASET_ID, tmp_path / "cache"),
        open_store(f"file://{tmp_path / 'out'}"),
        lambda *now: progress.append(now),
    )
    source = HuggingFace(str(tmp_path / "out"))
    for name, tensor in tensors.items():
        assert torch.equal(torch.cat([box.data for box in source.boxes(name)]), tensor)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == _tokenizer()
    assert progress[-1][0] == progress[-1][1]


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_a_distributed_checkpoint_of_torch_is_imported_with_its_moments(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    # More writers than entries of a root.
    monkeypatch.setattr(sys.modules["holdfast.exchange.import_checkpoint"], "WRITER_BYTES", 2000)
    tensors = weights(tiny_spec())
    moments = {key: {name: torch.randn_like(tensor) for name, tensor in tensors.items()} for key in MOMENTS}
    if own:
        flat = dict(tensors)
        for key, prefix in MOMENTS.items():
            flat |= {prefix + name: tensor for name, tensor in moments[key].items()}
        dcp.save(flat, checkpoint_id=tmp_path / "dcp", no_dist=True)
    else:
        optimizer = {name: {key: moments[key][name] for key in MOMENTS} for name in tensors}
        nested = {"app": {"model": tensors, "optim": {"state": optimizer}}, "epoch": 3}
        dcp.save(nested, checkpoint_id=tmp_path / "dcp", no_dist=True)
    imported, checkpoint = taken(folder_store, DistributedCheckpoint(tmp_path / "dcp"), step=4)
    assert (imported.moments, imported.step, checkpoint.manifest.writers > 32) == (True, 4, True)
    loaded = tensors_of(checkpoint)
    assert loaded.keys() == {*tensors, *(prefix + name for prefix in MOMENTS.values() for name in tensors)}
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        for key, prefix in MOMENTS.items():
            assert torch.equal(loaded[prefix + name], moments[key][name])
    reimported, _ = taken(folder_store, DistributedCheckpoint(tmp_path / "dcp"), step=4)
    assert (reimported.again, reimported.run_id, reimported.state_digest) == (
        True,
        imported.run_id,
        imported.state_digest,
    )
    assert taken(folder_store, DistributedCheckpoint(tmp_path / "dcp"), step=5)[0].run_id != imported.run_id
    assert run_id(tiny_spec(), DATASET_ID, imported.salt) == imported.run_id


class _Hostile:
    """An object that runs a command when it is unpickled without protection."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return subprocess.check_call, (["touch", str(self._path)],)


def test_a_pickle_that_would_run_a_command_is_refused_and_runs_none(tmp_path: Path) -> None:
    folder, proof = tmp_path / "dcp", tmp_path / "ran"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(_Hostile(proof)))
    with pytest.raises(DataError, match=r"names 'subprocess\.check_call', which no checkpoint of this kind holds"):
        DistributedCheckpoint(folder)
    dcp.save(weights(tiny_spec()), checkpoint_id=tmp_path / "good", no_dist=True)
    for file in (tmp_path / "good").glob("*.distcp"):
        file.write_bytes(pickle.dumps(_Hostile(proof)) * 200)
    with pytest.raises(DataError, match="cannot be read"):
        list(DistributedCheckpoint(tmp_path / "good").boxes("model.norm.weight"))
    universal = tmp_path / "universal" / "zero" / "model.norm.weight"
    universal.mkdir(parents=True)
    (universal / "fp32.pt").write_bytes(pickle.dumps(_Hostile(proof)))
    with pytest.raises(DataError, match="cannot be read"):
        UniversalCheckpoint(tmp_path / "universal").shape("model.norm.weight")
    assert not proof.exists()


def test_a_checkpoint_of_another_model_is_refused_with_the_tensor(folder_store: Store, tmp_path: Path) -> None:
    tensors = weights(tiny_spec())
    tensors["model.norm.weight"] = torch.ones(33)
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(
        DataError, match=r"model\.norm\.weight has the shape \[33\], the model of the spec needs \[32\]"
    ):
        taken(folder_store, DistributedCheckpoint(tmp_path / "dcp"))
    with pytest.raises(MissingError, match=r"dcp\.save"):
        DistributedCheckpoint(tmp_path)
    with pytest.raises(MissingError, match="ds_to_universal"):
        UniversalCheckpoint(tmp_path)
    assert list(folder_store.list("runs/")) == []


@pytest.mark.slow
def test_training_from_imported_weights_matches_training_with_init_from(tmp_path: Path) -> None:
    spec = tiny_spec()
    folder = tmp_path / "llama"
    options: dict[str, Any] = {"tokenizer_json": _tokenizer().decode(), "end_of_text": END_OF_TEXT}
    write_hugging_face(folder, spec.model, VOCABULARY, weights(spec).items(), **options)
    store = new_store(tmp_path / "store")
    imported, checkpoint = taken(store, HuggingFace(str(folder)))
    assert (imported.moments, imported.step) == (False, 0)
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in weights(spec).items())
    assert all(not checkpoint.tensor(name).any() for name in checkpoint.tensors if name.startswith("optimizer."))
    runs: Runs = [((f"model.init_from={folder}",), "", None), ((), imported.salt, None)]
    assert train_in_ranks(1, store.url, tmp_path / "ranks", runs) == ["", ""]
    digests = {
        open_checkpoint(store, info.key.split("/")[1], 12).manifest.state_digest
        for info in store.list("runs/")
        if info.key.endswith("checkpoints/step-000000012.json")
    }
    assert len(digests) == 1
    assert open_checkpoint(store, imported.run_id, 12).manifest.segments[0].from_step == 0


def _deepspeed_saves(rank: int, size: int, folder: Path) -> tuple[StateDigest, int]:
    """Train a little with ZeRO and let DeepSpeed save. Returns the digest of this rank's part of the state."""
    from holdfast.engines.interface import build_engine
    from holdfast.engines.weights import SeededState

    join(folder, rank, size, always=True)
    assignment = tiny_assignment(*overrides("zero1", processes=size))
    engine = build_engine(assignment, VOCABULARY, 0)
    SeededState(assignment.model, 3).fill(engine.boxes())
    engine.restored(0)
    for step in range(2):
        engine.step((torch.arange(4 * 17).view(4, 17) + step) % VOCABULARY, 0.01)
    engine._engine.save_checkpoint(str(folder / "saved"), tag="two")  # type: ignore[attr-defined]
    return digest_of(engine.saved()), sum(box.data.numel() for box in engine.saved())


@pytest.mark.parametrize("prefix", ["", "module."])
def test_each_file_of_a_universal_checkpoint_is_read_by_its_name(tmp_path: Path, prefix: str) -> None:
    name = "model.norm.weight"
    files = {"": "fp32.pt", "optimizer.exp_avg.": "exp_avg.pt", "optimizer.exp_avg_sq.": "exp_avg_sq.pt"}
    folder = tmp_path / "universal" / "zero" / f"{prefix}{name}"
    folder.mkdir(parents=True)
    values = {key: torch.randn(6, 4) for key in files}
    for key, file in files.items():
        torch.save({"param": values[key], "cat_dim": 0}, folder / file)
    source = UniversalCheckpoint(tmp_path / "universal")
    for key, value in values.items():
        assert source.shape(key + name) == (6, 4)
        assert torch.equal(torch.cat([box.data for box in source.boxes(key + name)]), value), key


@pytest.mark.drill
def test_a_universal_checkpoint_of_deepspeed_is_imported_to_the_bit(tmp_path: Path) -> None:
    parts = in_ranks(2, _deepspeed_saves, tmp_path, seconds=300)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(tmp_path / "saved/two"), "--output_folder", str(tmp_path / "universal")]
    process = subprocess.run([*command, "--num_extract_workers", "1", "--num_merge_workers", "1"], capture_output=True,
                          text=True, env={"DS_ACCELERATOR": "cpu", "PATH": "/usr/bin:/bin"}, check=False)  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    store = open_store(f"file://{tmp_path / 'store'}")
    imported, checkpoint = taken(store, UniversalCheckpoint(tmp_path / "universal"), step=2)
    assert imported.moments
    assert digest_of(whole(tensors_of(checkpoint))) == parts[0][0] + parts[1][0]
