"""Data that is tokenized to measure a champion exists as long as it is needed, and no longer."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.components.preprocess import run
from holdfast.components.trigger import step
from holdfast.dataset.dataset import damaged_shards
from holdfast.dataset.manifest import load_manifest
from holdfast.spec import Spec, parse_spec
from holdfast.store import Store, layout, open_store
from holdfast.tracking import Champion
from tests.checkpoint.breaking_store import BreakingStore
from tests.corpus.conftest import prose
from tests.exports import write_export

Inputs = tuple[Spec, Store, Champion]


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    """A spec over a corpus, a store, and a champion in it whose tokenizer was trained on other text."""
    store = open_store(f"file://{tmp_path / 'store'}")
    for name, first in (("old", 0), ("new", 100)):
        (tmp_path / name).mkdir()
        for number in range(12):
            (tmp_path / name / f"{number}.txt").write_text(prose(first + number), encoding="utf-8")

    def spec(name: str) -> Spec:
        text = f"{{name: a, data: {{sources: [{{uri: '{tmp_path / name}'}}]}}}}"
        return parse_spec(text, ("data.tokenizer.vocabulary=280", "data.validation_fraction=0.3", "data.workers=1"))

    prepared = run(spec("old"), store)
    (tmp_path / "tokenizer.json").write_bytes(store.get(layout.dataset(prepared.dataset_id, "tokenizer.json")))
    export, digest = write_export(store, "run", 3, "state", tmp_path, ["tokenizer.json"])
    champion = Champion(
        registry="r", model="a", version=1, run_id="run", store_url=store.url, export=export, export_digest=digest,
        run_digest="", dataset_id=prepared.dataset_id, metrics={}, tags={}, created=0.0,
    )  # fmt: skip
    return spec("new"), store, champion


def objects(store: Store, dataset_id: str) -> int:
    return len(list(store.list(layout.dataset(dataset_id, ""))))


def test_a_measured_dataset_is_deleted_unless_it_existed_or_is_needed_for_retraining(inputs: Inputs) -> None:
    with step._in_its_tokens(*inputs, keep="other") as fresh:
        whole = objects(inputs[1], fresh)
    assert objects(inputs[1], fresh) == 0 < whole
    with pytest.raises(ZeroDivisionError), step._in_its_tokens(*inputs, keep="other"):
        raise ZeroDivisionError
    assert objects(inputs[1], fresh) == 0
    with step._in_its_tokens(*inputs, keep=fresh):
        pass
    assert objects(inputs[1], fresh) == whole  # the retraining starts with it
    with step._in_its_tokens(*inputs, keep="other"):
        pass
    assert objects(inputs[1], fresh) == whole  # another run uses it


def test_a_dataset_stays_complete_while_it_is_measured(inputs: Inputs) -> None:
    """Another run may prepare the same dataset at this moment. It finds a complete dataset, or none."""
    spec, store, theirs = inputs
    is_new: list[bool] = []

    def before(*_: str) -> None:
        for info in list(store.list("datasets/")):
            if info.key.endswith("/dataset.json"):
                manifest = load_manifest(store, info.key.split("/")[-2])
                is_new.append(manifest.dataset_id != theirs.dataset_id)
                assert damaged_shards(store, manifest) == {}
                assert store.stat(layout.dataset(manifest.dataset_id, manifest.tokenizer.file)) is not None

    watched: Any = BreakingStore(store, kill=False, before=before)
    with step._in_its_tokens(spec, watched, theirs, keep="other"):
        before()
    assert any(is_new)
