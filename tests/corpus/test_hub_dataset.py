"""Datasets of the Hub: pinned to a commit, identified without a fetch, and read as local files, from a real server."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.corpus import identify, prepare
from holdfast.corpus.sources import resolve
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store
from tests.corpus.conftest import MakeSpec, prose, tree, write_jsonl
from tests.model.test_hub import COMMIT, Hub, serving

TEXTS = [prose(number) for number in range(40)]
URI = "hf://datasets/tiny/llama"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "dataset"
    (folder / "data").mkdir(parents=True)
    pq.write_table(pa.table({"text": TEXTS[:20]}), folder / "data" / "train-00000-of-00002.parquet")
    write_jsonl(folder / "data" / "train-00001-of-00002.jsonl", TEXTS[20:])
    write_jsonl(folder / "data" / "test-00000-of-00001.jsonl", ["a question of the test"])
    (folder / "README.md").write_text("About it.")
    (folder / ".gitattributes").write_text("hidden")
    with serving(folder, monkeypatch, "datasets") as server:
        yield server


def test_a_dataset_of_the_hub_has_the_bytes_of_its_files(
    hub: Hub, store: Store, make_spec: MakeSpec, tmp_path: Path
) -> None:
    spec = make_spec(URI)
    dataset_id = identify(spec)
    assert not any("resolve" in request for request in hub.requests)
    prepared = prepare(spec, store)
    assert prepared.dataset_id == dataset_id
    assert sum(prepared.documents.values()) == 40
    (lineage,) = prepared.lineage
    assert (lineage.kind, lineage.repository, lineage.revision) == ("hub", "tiny/llama", COMMIT)
    assert {kind: group.example for kind, group in lineage.left_out.items()} == {
        "file of another split than train": "data/test-00000-of-00001.jsonl",
        "file that is not parquet or jsonl": "README.md",
    }
    local = prepare(make_spec(hub.folder / "data" / "train-*"), store)
    shards = [tree(store, f"datasets/{result.dataset_id}/0") for result in (prepared, local)]
    assert list(shards[0].values()) == list(shards[1].values())


def test_files_are_of_the_commit_that_the_revision_named(hub: Hub, make_spec: MakeSpec, store: Store) -> None:
    spec = make_spec(f"{URI}@main")
    (resolved,) = resolve(spec.data)
    assert {file.stamp for file in resolved.files} == {COMMIT}
    prepare(spec, store)
    assert {request.split("/")[5] for request in hub.requests if "resolve" in request} == {COMMIT}
    before = identify(spec)
    hub.commit = "d" * 40
    assert identify(spec) == before  # another commit, the same bytes
    write_jsonl(hub.folder / "data" / "train-00001-of-00002.jsonl", TEXTS[:30])
    assert identify(spec) != before


def test_a_path_or_a_glob_names_files_of_the_repository(hub: Hub, make_spec: MakeSpec) -> None:
    def names(uri: str) -> list[str]:
        return [file.path for file in resolve(make_spec(uri).data)[0].files]

    assert names(f"{URI}/data/test*") == ["data/test-00000-of-00001.jsonl"]
    assert names(f"{URI}@main/README.md") == ["README.md"]
    assert len(names(f"{URI}/data")) == 3
    with pytest.raises(MissingError, match=r"no file of .* matches 'test/\*'; name one or a glob of its files: README"):
        names(f"{URI}/test/*")
    with pytest.raises(MissingError, match="the Hub has no such repository"):
        names("hf://datasets/other/name")
    with pytest.raises(DataError, match=r"is no dataset; write hf://datasets/owner/name"):
        names("hf://tiny/llama")
    with pytest.raises(DataError, match=r"data.sources.0.uri: .* is not hf://datasets/owner/name"):
        names("hf://datasets/tiny")
    assert hub.requests
