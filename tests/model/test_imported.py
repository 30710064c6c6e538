"""Imported weights are identified by their bytes, in any place."""

import shutil
from pathlib import Path

import pytest

from holdfast.model.hub import require_weights, weights_digest
from holdfast.spec import Spec, parse_spec, run_id
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import open_store


def importing(location: object) -> Spec:
    return parse_spec("name: a\ndata: {sources: [{uri: x}]}\n", [f"model.init_from={location}"])


def identity(location: object) -> str:
    spec = importing(location)
    return run_id(spec, "d", "", weights_digest(spec.model.init_from))


def weights(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_same_weights_elsewhere_are_the_same_run_and_other_weights_in_place_another(tmp_path: Path) -> None:
    folder = weights(tmp_path / "here")
    first = identity(folder)
    shutil.copytree(folder, tmp_path / "there")
    assert identity(tmp_path / "there") == first
    (folder / "README.md").write_text("not a weight")
    assert identity(folder) == first
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert identity(folder) != first


def test_weights_on_s3_are_known_without_being_fetched(tmp_path: Path, s3_url: str) -> None:
    store = open_store(s3_url)
    store.put("model.safetensors", b"weights")
    first = identity(s3_url)
    store.put("model.safetensors", b"Weights")
    assert identity(s3_url) != first


def test_a_folder_without_weights_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"init_from.*no \.safetensors"):
        weights_digest(str(tmp_path))


def test_no_weights_are_imported_by_default() -> None:
    assert weights_digest(parse_spec("name: a\ndata: {sources: [{uri: x}]}\n").model.init_from) == ""


def test_weights_that_are_not_those_the_run_was_named_after_are_refused(tmp_path: Path) -> None:
    folder = str(weights(tmp_path / "here"))
    digest = weights_digest(folder)
    require_weights(folder, digest)
    (tmp_path / "here" / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(DataError, match=r"here holds other weights .* than those the run id was made from"):
        require_weights(folder, digest)
