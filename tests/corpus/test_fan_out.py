"""One corpus on many machines: in any order and after any crash, the dataset equals that of one process."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast.corpus import divide, duplicates, identify, prepare, tokenise, units
from holdfast.corpus.duplicates import first_occurrences
from holdfast.corpus.shard_plan import load
from holdfast.dataset import Dataset
from holdfast.spec import Spec, run_id
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, open_store
from tests.corpus.conftest import MakeSpec, prose, tree, write_jsonl


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 6000)
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 1500)


@pytest.fixture
def spec(tmp_path: Path, make_spec: MakeSpec) -> Spec:
    """Two sources, with duplicates in a unit, between units and between the sources."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:03d}.txt").write_text(prose(number % 50), encoding="utf-8")
    lines = write_jsonl(tmp_path / "lines.jsonl", [prose(number % 170) for number in range(20, 400)])
    return make_spec(folder, lines, shard_tokens=2000)


@pytest.fixture
def alone(spec: Spec, tmp_path: Path) -> Store:
    """The store of one process that did all the work."""
    store = open_store(f"file://{tmp_path / 'alone'}")
    prepare(spec, store)
    return store


def dataset_of(store: Store, dataset_id: str) -> dict[str, bytes]:
    return tree(store, f"datasets/{dataset_id}/")


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 1000])
def test_any_number_of_workers_in_any_order_gives_the_bytes_of_one(
    spec: Spec, alone: Store, store: Store, workers: int
) -> None:
    plan = divide(spec, store, workers)
    assert len(plan.shares) == min(workers, plan.units)
    assert plan.units > 20
    random.Random(workers).shuffle(plan.shares)
    results = [tokenise(spec, store, plan.division, share) for share in plan.shares]
    assert sum(result.units for result in results) == plan.units
    assert sum(result.bytes for result in results) == plan.bytes
    assert sum(result.units_reused for result in results) == 0  # no work is repeated
    prepared = prepare(spec, store, division=plan.division)
    assert prepared.created
    assert prepared.units_reused == prepared.units == plan.units
    assert prepared.dropped["duplicate"] > 200
    assert prepared.dataset_id == identify(spec)
    assert dataset_of(store, prepared.dataset_id) == dataset_of(alone, prepared.dataset_id)
    Dataset.open(store, prepared.dataset_id, Path("unused")).verify()


def test_the_shares_are_about_equal_and_follow_each_other(spec: Spec, store: Store) -> None:
    plan = divide(spec, store, 5)
    parts = [load(store, plan.division, spec.data, (number, 5)).pieces for number in range(5)]
    whole = load(store, plan.division, spec.data).pieces
    assert [piece for part in parts for piece in part] == whole
    sizes = [sum(piece.bytes for piece in part) for part in parts]
    assert max(sizes) - min(sizes) <= 2 * max(piece.bytes for piece in whole)


def test_how_many_there_are_is_in_no_identity(spec: Spec, make_spec: MakeSpec) -> None:
    many = spec.model_copy(update={"data": spec.data.model_copy(update={"fan_out": 16})})
    assert identify(many) == identify(spec)
    assert run_id(many, "d" * 16, "") == run_id(spec, "d" * 16, "")


def test_tokenized_units_are_reused(spec: Spec, alone: Store, store: Store, tmp_path: Path) -> None:
    plan = divide(spec, store, 3)
    tokenise(spec, store, plan.division, "1/3")
    replan = divide(spec, store, 7)
    assert replan.division == plan.division  # the same corpus at any number of workers
    results = [tokenise(spec, store, replan.division, share) for share in replan.shares]
    reused = sum(result.units_reused for result in results)
    assert 0 < reused < plan.units
    prepare(spec, store, division=replan.division)
    division = tree(store, f"datasets/_units/division-{plan.division}/")
    assert tree(store, "datasets/") == tree(alone, "datasets/") | division


def test_an_existing_dataset_needs_no_preprocessing(spec: Spec, alone: Store) -> None:
    plan = divide(spec, alone, 3)
    assert (plan.division, plan.shares) == ("finished", ["0/1"])
    assert tokenise(spec, alone, plan.division, "0/1").units == 0
    assert not prepare(spec, alone, division=plan.division).created


def test_the_join_rebuilds_missing_and_damaged_units(
    spec: Spec, alone: Store, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    plan = divide(spec, store, 4)
    for share in plan.shares[:3]:
        tokenise(spec, store, plan.division, share)
    units = [key for key in tree(store, "datasets/_units/") if key.endswith("/000000")]
    for key, at in zip(units[:2], (-1, 900), strict=True):  # in the tokens, and in the index
        path = store.local_path(key)
        assert path is not None
        raw = bytearray(path.read_bytes())
        raw[at] ^= 0xFF
        path.write_bytes(raw)
    prepared = prepare(spec, store, division=plan.division)
    assert "making it again" in caplog.text
    assert prepared.units_reused == len(units) - 2
    assert dataset_of(store, prepared.dataset_id) == dataset_of(alone, prepared.dataset_id)


def test_a_division_of_other_settings_a_damaged_one_and_one_that_is_gone_are_refused(
    spec: Spec, store: Store, make_spec: MakeSpec
) -> None:
    division = divide(spec, store, 2).division
    other = spec.model_copy(update={"data": spec.data.model_copy(update={"validation_fraction": 0.3})})
    with pytest.raises(DataError, match="was made with other settings of `data`"):
        tokenise(other, store, division, "0/2")
    for share in ("2/2", "-1/2", "1", "0/0"):
        with pytest.raises(DataError, match="is not I/N"):
            tokenise(spec, store, division, share)
    with pytest.raises(DataError, match="is no name of a division"):
        tokenise(spec, store, "../x", "0/2")
    with pytest.raises(MissingError, match="run divide again"):
        tokenise(spec, store, "0" * 32, "0/2")
    pieces = store.local_path(f"datasets/_units/division-{division}/pieces-000000.json")
    assert pieces is not None
    pieces.write_bytes(pieces.read_bytes().replace(b"000.txt", b"001.txt", 1))
    with pytest.raises(DataError, match="is not what was written; run divide again"):
        tokenise(spec, store, division, "0/2")
    assert divide(spec, store, 2).division == division
    tokenise(spec, store, division, "0/2")


def test_a_file_with_another_time_but_the_same_bytes_is_the_file_that_was_listed(
    spec: Spec, store: Store, tmp_path: Path
) -> None:
    plan = divide(spec, store, 2)
    file = tmp_path / "corpus" / "000.txt"
    os.utime(file, (1, 1))  # the modification time in the same image on another node
    tokenise(spec, store, plan.division, "0/2")
    file.write_text("others")
    with pytest.raises(DataError, match="has other bytes than when the corpus was divided"):
        tokenise(spec, store, plan.division, "0/2")
    shutil.rmtree(tmp_path / "corpus")
    with pytest.raises(MissingError, match="is not on this machine"):
        tokenise(spec, store, plan.division, "0/2")


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "sorted_", "range_"), [(50, 20, 64), (50, 5, 1), (7, 1, 13), (5000, 20, 64)])
def test_the_first_of_equal_texts_is_kept_however_little_fits_into_memory(
    monkeypatch: pytest.MonkeyPatch, chunk: int, sorted_: int, range_: int
) -> None:
    monkeypatch.setattr(duplicates, "CHUNK", chunk)
    monkeypatch.setattr(duplicates, "SORTED", sorted_)
    monkeypatch.setattr(duplicates, "RANGE", range_)
    random_ = np.random.default_rng(0)
    digests = random_.integers(0, 60, (2000, 2)).astype("<u8").view("V16").reshape(-1)
    digests[::3] = digests[5]  # one text occurs very often
    _, places = np.unique(digests.view("<u8").reshape(-1, 2), axis=0, return_index=True)
    cuts = np.sort(random_.integers(0, 2000, 40))
    with first_occurrences(np.split(digests, cuts)) as first:
        answers = np.concatenate([first.take(len(part)) for part in np.split(digests, cuts[::2])])
    assert np.flatnonzero(answers).tolist() == sorted(places.tolist())


@pytest.mark.slow
def test_the_memory_that_duplicates_take_does_not_grow_with_the_corpus() -> None:
    program = """
import resource, sys
import numpy as np
from holdfast.corpus.duplicates import first_occurrences
count = int(sys.argv[1])
def parts():
    for start in range(0, count, 2**18):
        words = np.arange(start, min(count, start + 2**18), dtype="<u8") % np.uint64(count * 3 // 4)
        low = words * np.uint64(0x9E3779B97F4A7C15)
        yield np.stack([low, low ^ words], axis=1).view("V16").reshape(-1)
with first_occurrences(parts()) as first:
    kept = sum(int(first.take(min(2**18, count - start)).sum()) for start in range(0, count, 2**18))
assert kept == count * 3 // 4, kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""

    def peak(count: int) -> int:
        """The peak memory in MiB."""
        command = [sys.executable, "-c", program, str(count)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) // 1024

    small, large = peak(2**20), peak(2**23)
    assert large < small + 64, (small, large)  # at 16 bytes each, the additional documents would take 112 MiB
