"""The whole step: the same bytes however it runs, no repeated work, and repair of damage."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.components.preprocess import run
from holdfast.corpus import identify, units
from holdfast.corpus.encode import load_tokenizer
from holdfast.dataset import Dataset
from holdfast.dataset.dataset import damaged_shards
from holdfast.dataset.manifest import load_manifest
from holdfast.spec import Spec, dump_spec
from holdfast.spec.errors import DataError
from holdfast.store import Store, layout, open_store
from tests import warm
from tests.checkpoint.breaking_store import BreakingStore
from tests.corpus.conftest import MakeSpec, prose, tree, write_jsonl


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    for number in range(40):
        (folder / ("deep" if number % 2 else ".") / f"{number:03d}.txt").write_text(prose(number), encoding="utf-8")
    write_jsonl(folder / "more.jsonl", [prose(1000 + number) for number in range(300)])
    return folder


def texts(store: Store, dataset_id: str, cache: Path) -> list[str]:
    dataset = Dataset.open(store, dataset_id, cache)
    tokenizer = load_tokenizer(dataset.tokenizer_json())
    documents = []
    for stream in (*dataset._streams["train"], *dataset._streams["validation"]):
        documents += [tokenizer.decode(tokens.tolist()) for tokens in stream.documents(dataset.end_of_text)]
    return documents


def test_every_document_round_trips(store: Store, corpus: Path, make_spec: MakeSpec, tmp_path: Path) -> None:
    prepared = run(make_spec(corpus), store)
    expected = [prose(number) for number in (*range(40), *range(1000, 1300))]
    assert sorted(texts(store, prepared.dataset_id, tmp_path)) == sorted(expected)
    assert sum(prepared.documents.values()) == 340
    assert sum(prepared.text_bytes.values()) == sum(len(text.encode()) for text in expected)
    dataset = Dataset.open(store, prepared.dataset_id, tmp_path)
    dataset.verify()
    assert dataset.tokens("train") == prepared.tokens["train"]
    lengths = dataset.token_bytes()
    rows = dataset._streams["train"][0].read(0, prepared.tokens["train"])
    assert lengths[rows].sum() == prepared.text_bytes["train"]


def test_a_second_run_returns_the_existing_dataset(store: Store, corpus: Path, make_spec: MakeSpec) -> None:
    spec = make_spec(corpus)
    first, second = run(spec, store), run(spec, store)
    assert first.created
    assert not second.created
    assert second.dataset_id == first.dataset_id == identify(spec)
    assert second.tokens == first.tokens


def test_a_committed_dataset_is_complete_at_every_operation_of_preprocess(
    store: Store, corpus: Path, make_spec: MakeSpec
) -> None:
    """Readers begin with dataset.json. Therefore it is written last."""
    spec = make_spec(corpus, shard_tokens=4000)
    dataset_id, moments = identify(spec), [0, 0]

    def before(*_: object) -> None:
        is_committed = store.stat(layout.dataset(dataset_id)) is not None
        moments[is_committed] += 1
        if is_committed:
            manifest = load_manifest(store, dataset_id)
            assert damaged_shards(store, manifest) == {}
            assert store.stat(layout.dataset(dataset_id, manifest.tokenizer.file)) is not None

    run(spec, BreakingStore(store, kill=False, before=before))
    before()
    assert moments[False] > 5
    assert moments[True] >= 1


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bytes(
    corpus: Path, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 8000)  # many pieces; workers receive theirs
    stores = [open_store(f"file://{tmp_path / name}") for name in ("one", "three")]
    ids = {run(make_spec(corpus, workers=count), store).dataset_id for store, count in zip(stores, (1, 3), strict=True)}
    assert len(ids) == 1
    assert tree(stores[0], "datasets/") == tree(stores[1], "datasets/")
    assert len(tree(stores[0], "datasets/_units/")) > 10


def test_settings_without_effect_on_the_bytes_keep_the_dataset_id(
    corpus: Path, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = identify(make_spec(corpus))
    assert identify(make_spec({"uri": str(corpus), "weight": 2.0})) == base
    assert identify(make_spec(corpus, document_masks=True, workers=7)) == base
    moved = tmp_path / "moved"
    corpus.rename(moved)
    assert identify(make_spec(moved)) == base
    monkeypatch.chdir(tmp_path)
    assert identify(make_spec("moved/**/*.*")) == base


@pytest.mark.parametrize(
    "change",
    [
        {"validation_fraction": 0.2},
        {"shard_tokens": 2000},
        {"tokenizer": {"vocabulary": 301}},
        {"cleaning": {"unicode": "NFKC"}},
        {"cleaning": {"deduplicate": False}},
    ],
)
def test_settings_with_effect_on_the_bytes_change_the_dataset_id(
    corpus: Path, make_spec: MakeSpec, change: dict[str, Any]
) -> None:
    assert identify(make_spec(corpus, **change)) != identify(make_spec(corpus))


def test_a_changed_byte_changes_the_id(corpus: Path, make_spec: MakeSpec) -> None:
    before = identify(make_spec(corpus))
    path = corpus / "000.txt"
    path.write_bytes(path.read_bytes().replace(b"b", b"c", 1))
    assert identify(make_spec(corpus)) != before


def test_only_what_changed_is_tokenised_again(
    store: Store, corpus: Path, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 4000)
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 1000)
    first = run(make_spec(corpus), store)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(store.get(layout.dataset(first.dataset_id, "tokenizer.json")))
    fixed = {"tokenizer": {"kind": "file", "path": str(tokenizer)}}
    assert run(make_spec(corpus, **fixed), store).units_reused == first.units
    (corpus / "0005.txt").write_text(prose(7777), encoding="utf-8")
    more = run(make_spec(corpus, **fixed), store)
    assert more.created
    assert more.units - more.units_reused <= 2
    assert sum(more.documents.values()) == 341
    fresh = open_store(f"file://{tmp_path / 'fresh'}")
    restarted = run(make_spec(corpus, **fixed), fresh)
    assert tree(fresh, f"datasets/{restarted.dataset_id}/") == tree(store, f"datasets/{more.dataset_id}/")


def test_splits_follow_the_document_and_never_the_corpus(
    store: Store, corpus: Path, make_spec: MakeSpec, tmp_path: Path
) -> None:
    def held(spec: Spec) -> set[str]:
        dataset = Dataset.open(store, run(spec, store).dataset_id, tmp_path)
        tokenizer = load_tokenizer(dataset.tokenizer_json())
        return {tokenizer.decode(tokens.tolist()) for tokens in dataset.validation_documents()}

    whole, part = held(make_spec(corpus)), held(make_spec(corpus / "more.jsonl"))
    assert part
    assert part == {text for text in whole if int(text.split()[1]) >= 1000}
    fewer = held(make_spec(corpus, validation_fraction=0.05))
    assert fewer < whole


def test_duplicates_are_dropped_across_sources_and_counted(
    store: Store, corpus: Path, make_spec: MakeSpec, tmp_path: Path
) -> None:
    copy = write_jsonl(tmp_path / "copy.jsonl", [prose(3), prose(2000), prose(2000), prose(1005)])
    prepared = run(make_spec(corpus, copy), store)
    assert prepared.dropped == {"duplicate": 3}
    assert sum(prepared.documents.values()) == 341
    undeduplicated = run(make_spec(corpus, copy, cleaning={"deduplicate": False}), store)
    assert sum(undeduplicated.documents.values()) == 344


def test_the_first_duplicate_in_source_order_is_kept(store: Store, make_spec: MakeSpec, tmp_path: Path) -> None:
    shared = [prose(number) for number in range(30)]
    first = write_jsonl(tmp_path / "first.jsonl", [shared[0], "only in the first", *shared])
    second = write_jsonl(tmp_path / "second.jsonl", [*reversed(shared), "only in the second"])
    prepared = run(make_spec(first, second, validation_fraction=0), store)
    of_first, of_second = load_manifest(store, prepared.dataset_id).sources
    assert (of_first.splits["train"].documents, of_first.dropped) == (31, {"duplicate": 1})
    assert (of_second.splits["train"].documents, of_second.dropped) == (1, {"duplicate": 30})


def test_damaged_shards_and_manifests_are_reported_and_rebuilt(
    store: Store, corpus: Path, make_spec: MakeSpec, caplog: pytest.LogCaptureFixture
) -> None:
    spec = make_spec(corpus, shard_tokens=5000)
    prepared = run(spec, store)
    whole = tree(store, f"datasets/{prepared.dataset_id}/")
    shards = [path for key in whole if key.endswith(".tokens") and (path := store.local_path(key))]
    manifest = store.local_path(layout.dataset(prepared.dataset_id))
    assert manifest is not None
    for number, damage in enumerate(("truncate", "remove", "manifest")):
        caplog.clear()
        if damage == "truncate":
            os.truncate(shards[0], 100)
        elif damage == "remove":
            shards[1].unlink()
        else:
            manifest.write_text("{}")
        assert run(spec, store).created, number
        assert "again" in caplog.text
        assert tree(store, f"datasets/{prepared.dataset_id}/") == whole


def test_a_long_stream_is_stored_in_parts_and_resumes_after_the_last_one(
    store: Store, corpus: Path, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "PART_BYTES", 5000)
    spec = make_spec(corpus)
    prepared = run(spec, store)
    whole = tree(store, "datasets/")
    parts = sorted(key for key in whole if "_units" in key and "tokenizer" not in key)
    assert len(parts) > 5
    for key in parts[2:]:
        store.delete(key)
    store.delete(layout.dataset(prepared.dataset_id))
    run(spec, store)
    assert tree(store, "datasets/") == whole


def test_nothing_left_names_what_was_dropped(store: Store, corpus: Path, make_spec: MakeSpec) -> None:
    with pytest.raises(DataError, match="no text to train a tokenizer on"):
        run(make_spec(corpus, cleaning={"min_characters": 100_000}), store)
    prepared = run(make_spec(corpus), store)
    tokenizer = str(store.local_path(layout.dataset(prepared.dataset_id, "tokenizer.json")))
    fixed = {"tokenizer": {"kind": "file", "path": tokenizer}, "cleaning": {"min_characters": 100_000}}
    with pytest.raises(DataError, match=r"no document is left to train on \(dropped: 340 too_short"):
        run(make_spec(corpus, **fixed), store)
    assert len([key for key in tree(store, "datasets/") if key.endswith("dataset.json")]) == 1


def command(spec: Path, store: Store, *more: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.components.preprocess", "--spec", str(spec), "--store", store.url, *more]


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    corpus: Path, make_spec: MakeSpec, tmp_path: Path
) -> None:
    long = prose(0, 800)
    for number in range(6):
        write_jsonl(corpus / f"big{number}.jsonl", [f"{number} {line} {long}" for line in range(200)])
    spec = make_spec(corpus, workers=2)
    path = tmp_path / "spec.yaml"
    path.write_text(dump_spec(spec))
    undisturbed = open_store(f"file://{tmp_path / 'undisturbed'}")
    prepared = run(spec, undisturbed)
    store = open_store(f"file://{tmp_path / 'store'}")
    moments = random.Random(0)
    kills = 0
    for _ in range(4):
        process = warm.popen(
            command(path, store), os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(moments.uniform(0.3, 1.6))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)  # its workers must exit without help
            process.wait()
            kills += 1
        manifest = store.stat(layout.dataset(prepared.dataset_id))
        if manifest is not None:
            Dataset.open(store, prepared.dataset_id, tmp_path).verify()
    assert kills
    run(spec, store)
    assert tree(store, "datasets/") == tree(undisturbed, "datasets/")


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(corpus: Path, make_spec: MakeSpec, tmp_path: Path) -> None:
    long = prose(0, 1500)
    for number in range(4):
        write_jsonl(corpus / f"big{number}.jsonl", [f"{number} {line} {long}" for line in range(150)])
    path = tmp_path / "spec.yaml"
    path.write_text(dump_spec(make_spec(corpus, workers=2)))
    store = open_store(f"file://{tmp_path / 'store'}")
    process = warm.popen(command(path, store), os.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    while not [info for info in store.list("datasets/_units/") if info.key.endswith("/000000")]:
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()  # its workers are busy or wait for work
    assert process.stdout is not None
    process.stdout.read()  # returns when the last process with the inherited pipe has ended
    process.wait()


def test_a_split_is_wide_when_the_vocabulary_is(
    store: Store, corpus: Path, make_spec: MakeSpec, tmp_path: Path
) -> None:
    narrow = run(make_spec(corpus), store)
    tokenizer = json.loads(store.get(layout.dataset(narrow.dataset_id, "tokenizer.json")))
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 70_000, "content": "<|far|>"})
    path = tmp_path / "wide.json"
    path.write_text(json.dumps(tokenizer))
    fillers = [{**tokenizer["added_tokens"][0], "id": i, "content": f"<|{i}|>"} for i in range(300, 70_000)]
    tokenizer["added_tokens"][1:1] = fillers
    path.write_text(json.dumps(tokenizer))
    wide = run(make_spec(corpus, tokenizer={"kind": "file", "path": str(path)}), store)
    assert wide.vocabulary == 70_001
    assert wide.tokens == narrow.tokens
    a = Dataset.open(store, narrow.dataset_id, tmp_path).training(8, 4, 0).batch(3)
    b = Dataset.open(store, wide.dataset_id, tmp_path).training(8, 4, 0).batch(3)
    np.testing.assert_array_equal(a, b)
