"""Opening and reading: damage is detected and named, held-out text is stable, bytes are counted."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.dataset import Dataset
from holdfast.dataset.cache import BlockCache
from holdfast.dataset.remote import PIECE_BYTES, Bucket, RemoteShard
from holdfast.dataset.shards import BLOCK_BYTES
from holdfast.spec.errors import DataError, ExitCode, MissingError
from holdfast.store import Store, layout
from tests.dataset.conftest import DATASET_ID, Write

CONTEXT = 16


def shard_path(store: Store, name: str = "000-train-000000.tokens") -> Path:
    path = store.local_path(layout.dataset(DATASET_ID, name))
    assert path is not None
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_missing_dataset_error_names_preprocess_as_the_remedy(store: Store, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="run preprocess") as error:
        Dataset.open(store, DATASET_ID, tmp_path)
    assert error.value.exit_code == ExitCode.NOT_FOUND


@pytest.mark.parametrize("change", [-1, -40, 8])
def test_a_shard_of_the_wrong_size_is_refused_when_opened(
    store: Store, write: Write, tmp_path: Path, change: int
) -> None:
    write([np.arange(2500)])
    path = shard_path(store, "000-train-000001.tokens")
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(
        DataError, match=r"000-train-000001\.tokens: has \d+ bytes instead of \d+; run preprocess again"
    ):
        Dataset.open(store, DATASET_ID, tmp_path)


def test_a_missing_shard_is_refused_when_opened(store: Store, write: Write, tmp_path: Path) -> None:
    write([np.arange(2500)])
    shard_path(store, "000-train-000002.tokens").unlink()
    with pytest.raises(DataError, match=r"000-train-000002\.tokens: is missing"):
        Dataset.open(store, DATASET_ID, tmp_path)


def test_any_flipped_byte_is_noticed_when_its_block_is_touched_and_not_before(
    store: Store, write: Write, tmp_path: Path
) -> None:
    tokens = 3 * BLOCK_BYTES // 2  # three blocks
    write([np.arange(tokens) % 50_000], shard_tokens=10**6)
    path = shard_path(store)
    size = path.stat().st_size
    for at in (0, 2 * BLOCK_BYTES - 1, 3 * BLOCK_BYTES - 1, 3 * BLOCK_BYTES, size - 1):
        flip(path, at)
        with pytest.raises(DataError, match=r"000-train-000000\.tokens"):
            Dataset.open(store, DATASET_ID, tmp_path).verify()
        flip(path, at)
    Dataset.open(store, DATASET_ID, tmp_path).verify()

    flip(path, 2 * BLOCK_BYTES + 5)
    stream = Dataset.open(store, DATASET_ID, tmp_path)._streams["train"][0]
    stream.read(0, BLOCK_BYTES)  # the first two blocks
    with pytest.raises(DataError, match="block 2"):
        stream.read(BLOCK_BYTES - 1, 2)


def test_a_row_checks_the_block_of_its_first_token_to_that_of_its_last_and_no_other(
    store: Store, write: Write, tmp_path: Path
) -> None:
    """To the token: a row with one token of a damaged block is refused, a row that ends before it is read."""
    block_tokens = BLOCK_BYTES // 2
    write([np.arange(4 * block_tokens) % 50_000], shard_tokens=10**6)
    flip(shard_path(store), 2 * BLOCK_BYTES)  # the third block
    intact = np.arange(4 * block_tokens) % 50_000
    for length in (1, 2, 17, block_tokens, block_tokens + 1, 2 * block_tokens):
        ends = {
            first + move
            for first in (2 * block_tokens - length, 2 * block_tokens, 3 * block_tokens)
            for move in (-1, 0, 1)
        }
        for start in sorted(first for first in ends if 0 <= first <= 4 * block_tokens - length):
            touches = start < 3 * block_tokens and start + length > 2 * block_tokens
            for read in ("gather", "run", "pieces"):
                stream = Dataset.open(store, DATASET_ID, tmp_path)._streams["train"][0]
                if read == "pieces":
                    far = RemoteShard(stream.files[0].shard, Bucket(store, BlockCache(tmp_path, 1)), "", "")
                    for width in (PIECE_BYTES // BLOCK_BYTES, 1):  # the same positions, four blocks further
                        touched = far.pieces(np.array([start * width]), length * width)
                        blocks = range(
                            start * width // block_tokens, (start * width + length * width - 1) // block_tokens + 1
                        )
                        assert touched == {block // (PIECE_BYTES // BLOCK_BYTES) for block in blocks}
                elif touches:
                    with pytest.raises(DataError, match="block 2"):
                        stream.gather(np.array([0, start]), length) if read == "gather" else stream.read(start, length)
                else:
                    rows = (
                        stream.gather(np.array([start]), length)[0] if read == "gather" else stream.read(start, length)
                    )
                    np.testing.assert_array_equal(rows, intact[start : start + length])


def test_training_on_a_damaged_shard_stops(store: Store, write: Write, tmp_path: Path) -> None:
    write([np.arange(2000)])
    flip(shard_path(store), 100)
    batches = Dataset.open(store, DATASET_ID, tmp_path).training(CONTEXT, 125, seed=0)
    with pytest.raises(DataError, match=r"000-train-000000\.tokens: block 0"):
        batches.batch(0)


def test_a_manifest_from_a_newer_version_is_refused(store: Store, write: Write, tmp_path: Path) -> None:
    manifest = json.loads(write([np.arange(2000)]).dump())
    store.put(layout.dataset(DATASET_ID), json.dumps(manifest | {"format_version": 2}).encode())
    with pytest.raises(DataError, match="newer Holdfast; upgrade"):
        Dataset.open(store, DATASET_ID, tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m | {"surprise": 1},
        lambda m: m | {"dataset_id": "f" * 16},
        lambda m: m["sources"][0]["splits"]["train"].update(tokens=5) or m,
        lambda m: m["sources"][0]["splits"]["train"]["shards"][0].update(name="../../../etc/passwd") or m,
        lambda m: m["tokenizer"].update(end_of_text_id=10**6) or m,
        lambda m: m["tokenizer"].update(file="../x") or m,
    ],
)
def test_a_manifest_that_does_not_add_up_is_refused(
    store: Store, write: Write, tmp_path: Path, damage: Callable[[Any], Any]
) -> None:
    manifest = json.loads(write([np.arange(2000)]).dump())
    store.put(layout.dataset(DATASET_ID), json.dumps(damage(manifest)).encode())
    with pytest.raises(DataError, match=r"dataset.json: .*; delete it and run preprocess again"):
        Dataset.open(store, DATASET_ID, tmp_path)


def test_a_torn_manifest_is_refused(store: Store, write: Write, tmp_path: Path) -> None:
    raw = write([np.arange(2000)]).dump()
    store.put(layout.dataset(DATASET_ID), raw[: len(raw) // 2])
    with pytest.raises(DataError, match=r"dataset\.json"):
        Dataset.open(store, DATASET_ID, tmp_path)


def test_validation_is_the_same_text_in_order_shared_between_sources(
    store: Store, write: Write, tmp_path: Path
) -> None:
    write([np.arange(100)] * 2, [np.arange(30 * CONTEXT + 1), 20_000 + np.arange(10 * CONTEXT + 1)], shard_tokens=77)
    dataset = Dataset.open(store, DATASET_ID, tmp_path)
    whole = np.concatenate(list(dataset.validation(CONTEXT, 10**9)))
    assert whole.shape == (40, CONTEXT + 1)
    np.testing.assert_array_equal(whole[:30, 0], np.arange(30) * CONTEXT)
    np.testing.assert_array_equal(whole[30:, 0], 20_000 + np.arange(10) * CONTEXT)
    part = np.concatenate(list(dataset.validation(CONTEXT, 8 * CONTEXT, rows=3)))
    assert part.shape == (8, CONTEXT + 1)
    assert (part[:, 0] >= 20_000).sum() == 2
    np.testing.assert_array_equal(part, np.concatenate(list(dataset.validation(CONTEXT, 8 * CONTEXT))))
    assert len(np.concatenate(list(dataset.validation(CONTEXT, 1)))) == 1


def test_held_out_text_too_short_for_a_sample_names_the_remedy(store: Store, write: Write, tmp_path: Path) -> None:
    write([np.arange(100)], [np.arange(10)])
    with pytest.raises(DataError, match=r"10 held-out tokens.*data.validation_fraction"):
        Dataset.open(store, DATASET_ID, tmp_path).validation(CONTEXT, 1000)


def test_held_out_documents_are_complete_across_shards_and_blocks(store: Store, write: Write, tmp_path: Path) -> None:
    documents = [np.arange(1, length + 1) for length in (5, 0, 1, 200, 33)]
    tokens = np.concatenate([np.append(document, 0) for document in documents])
    write([np.arange(100)], [tokens], shard_tokens=7)
    read = list(Dataset.open(store, DATASET_ID, tmp_path).validation_documents())
    assert [document.tolist() for document in read] == [document.tolist() for document in documents]


def test_bytes_of_tokens_count_text_and_not_special_tokens(store: Store, write: Write, tmp_path: Path) -> None:
    write([np.arange(100)], vocabulary=6)
    dataset = Dataset.open(store, DATASET_ID, tmp_path)
    assert dataset.token_bytes().tolist() == [0, 1, 4, 2, 0, 0]  # eot, "a", " def", "é", two unused ids
    assert dataset.end_of_text == 0


def test_an_altered_tokenizer_is_refused(store: Store, write: Write, tmp_path: Path) -> None:
    write([np.arange(100)])
    dataset = Dataset.open(store, DATASET_ID, tmp_path)
    store.put(layout.dataset(DATASET_ID, "tokenizer.json"), b"{}")
    with pytest.raises(DataError, match=r"tokenizer.json: is not the tokenizer"):
        dataset.tokenizer_json()


SHARDS = 5000
FEW_DESCRIPTORS = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import numpy as np
from pathlib import Path
from holdfast.dataset import Dataset
from holdfast.store import open_store

dataset = Dataset.open(open_store(sys.argv[1]), {DATASET_ID!r}, Path(sys.argv[2]))
batches = dataset.training({CONTEXT}, 500, seed=0)
firsts = [int(row[0]) for step in range({2 * SHARDS // 500}) for row in batches.batch(step)]
assert sorted(firsts) == [sample * {CONTEXT} for sample in range({2 * SHARDS})]
dataset.verify()
np.testing.assert_array_equal(batches.batch(3), dataset.training({CONTEXT}, 500, seed=0).batch(3))
maps = sum(1 for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".tokens"))
print(maps)
"""


@pytest.mark.slow
def test_thousands_of_shards_are_read_with_few_descriptors_and_few_maps(
    store: Store, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the test does not measure their writes
    # Rows within one shard and across two.
    write([np.arange(2 * SHARDS * CONTEXT + 1)], shard_tokens=2 * CONTEXT, vocabulary=200_000)
    process = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS, store.url, str(tmp_path / "cache")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert 0 < int(process.stdout) <= 64
