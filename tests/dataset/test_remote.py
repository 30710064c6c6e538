"""Datasets in a bucket: read in pieces over real HTTP, kept in a bounded cache, and always checked."""

import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from holdfast.dataset import Dataset
from holdfast.dataset.cache import BlockCache
from holdfast.dataset.remote import PIECE_BYTES
from holdfast.dataset.shards import BLOCK_BYTES
from holdfast.pipelines.chaos.proxy import FaultyProxy, Forward, Reply, Request
from holdfast.spec.errors import DataError, SpecError
from holdfast.store import Store, layout
from tests.dataset.conftest import DATASET_ID, Meter, Write

CONTEXT = 16
PIECE_TOKENS = PIECE_BYTES // 2


def pieces(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file() and path.name.isdigit())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flip_object(store: Store, at: int, name: str = "000-train-000000.tokens") -> None:
    key = layout.dataset(DATASET_ID, name)
    data = bytearray(store.get(key))
    data[at] ^= 1
    store.put(key, bytes(data))


def test_a_dataset_in_a_bucket_reads_like_one_in_a_folder(
    bucket: Store, store: Store, write: Write, tmp_path: Path
) -> None:
    tokens = [np.arange(90_000) % 45_000, np.arange(21_000)]
    held_out = [np.arange(3000), np.arange(200)]
    for place in (store, bucket):
        write(tokens, held_out, shard_tokens=40_000, to=place)
    local, remote = (Dataset.open(place, DATASET_ID, tmp_path / "cache") for place in (store, bucket))
    for rows in (slice(None), slice(3, 9), slice(None, None, -2)):
        np.testing.assert_array_equal(
            remote.training(CONTEXT, 32, seed=0).batch(2, rows), local.training(CONTEXT, 32, seed=0).batch(2, rows)
        )
    np.testing.assert_array_equal(  # rows across several shards
        remote.training(20_000, 3, seed=0).batch(1), local.training(20_000, 3, seed=0).batch(1)
    )
    for actual, expected in zip(remote.validation(CONTEXT, 5000), local.validation(CONTEXT, 5000), strict=True):
        np.testing.assert_array_equal(actual, expected)
    remote.verify()


def test_a_row_reads_its_piece_and_not_the_shard(
    bucket: Store, proxy: FaultyProxy, write: Write, tmp_path: Path
) -> None:
    write([np.arange(8 * PIECE_TOKENS) % 50_000], shard_tokens=10**7, to=bucket)
    meter = Meter(proxy)
    batches = Dataset.open(bucket, DATASET_ID, tmp_path).training(CONTEXT, 1, seed=0)
    batches.batch(0)
    assert meter.bytes == PIECE_BYTES + 16 * 8 * PIECE_BYTES // BLOCK_BYTES  # and the list of digests
    batches.batch(0)
    assert meter.requests == 2


def test_processes_of_a_machine_fetch_a_piece_once(
    bucket: Store, proxy: FaultyProxy, write: Write, tmp_path: Path
) -> None:
    write([np.arange(5000)], to=bucket)
    meter = Meter(proxy)
    readers = [Dataset.open(bucket, DATASET_ID, tmp_path).training(CONTEXT, 128, seed=0) for _ in range(6)]
    batches: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda one=reader: batches.append(one.batch(1))) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((batch == batches[0]).all() for batch in batches)
    assert len(batches) == 6
    assert len(meter.ranges) == len(set(meter.ranges)) == 10


def test_a_damaged_cache_is_fetched_again_and_a_damaged_bucket_is_an_error(
    bucket: Store, write: Write, tmp_path: Path
) -> None:
    write([np.arange(900)], to=bucket)
    good = Dataset.open(bucket, DATASET_ID, tmp_path).training(CONTEXT, 32, seed=0).batch(0)
    (cached,) = pieces(tmp_path)
    (digests,) = tmp_path.rglob("digests")
    for damage in (lambda: flip(cached, 10), lambda: os.truncate(cached, 5), lambda: flip(digests, 3)):
        damage()
        refetched = Dataset.open(bucket, DATASET_ID, tmp_path).training(CONTEXT, 32, seed=0).batch(0)
        np.testing.assert_array_equal(refetched, good)
    flip_object(bucket, 10)
    cached.unlink()
    with pytest.raises(DataError, match="block 0"):
        Dataset.open(bucket, DATASET_ID, tmp_path).training(CONTEXT, 32, seed=0).batch(0)
    digests.unlink()
    flip_object(bucket, -1)
    with pytest.raises(DataError, match="list of block digests"):
        Dataset.open(bucket, DATASET_ID, tmp_path).training(CONTEXT, 32, seed=0).batch(0)


def test_a_byte_that_was_altered_on_its_way_is_read_again(
    bucket: Store, proxy: FaultyProxy, write: Write, tmp_path: Path
) -> None:
    write([np.arange(900)], to=bucket)
    altered = []

    def alter(request: Request, forward: Forward) -> Reply:
        reply = forward(request)
        if request.headers.get("Range", "").startswith("bytes=0-"):
            altered.append(request)
            reply.body = b"\1" + reply.body[1:]
            reply.headers = [(n, v) for n, v in reply.headers if not n.lower().startswith("x-amz-checksum")]
        return reply

    proxy.inject(alter, method="GET", path=".tokens", times=2)
    batch = Dataset.open(bucket, DATASET_ID, tmp_path).training(CONTEXT, 56, seed=0).batch(0)
    assert len(altered) == 1
    assert sorted(batch[:, 0].tolist()) == [sample * CONTEXT for sample in range(56)]


def test_the_cache_stays_within_its_limit_and_keeps_what_was_used_last(
    bucket: Store, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write([np.arange(40 * PIECE_TOKENS) % 50_000], shard_tokens=10**8, to=bucket)
    monkeypatch.setenv("HOLDFAST_CACHE_GIB", str(10 * PIECE_BYTES / 2**30))
    stream = Dataset.open(bucket, DATASET_ID, tmp_path)._streams["train"][0]
    for piece in range(40):
        start = piece * PIECE_TOKENS
        assert stream.read(start, 3).tolist() == [(start + place) % 50_000 for place in range(3)]
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 10 * PIECE_BYTES
    numbers = sorted(int(path.name) for path in pieces(tmp_path))
    assert numbers == list(range(40 - len(numbers), 40))
    assert len(numbers) >= 7
    assert stream.read(0, 3).tolist() == [0, 1, 2]  # dropped pieces are fetched again


@pytest.mark.parametrize("given", ["many", "-1", "nan", "1e99"])
def test_a_limit_that_is_no_size_is_refused(
    store: Store, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    write([np.arange(100)])
    monkeypatch.setenv("HOLDFAST_CACHE_GIB", given)
    with pytest.raises(SpecError, match=r"HOLDFAST_CACHE_GIB.*is no number of GiB"):
        Dataset.open(store, DATASET_ID, tmp_path)


def test_an_unwritable_block_cache_is_logged_once_and_reads_continue(
    bucket: Store, proxy: FaultyProxy, write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write([np.arange(5000)], to=bucket)
    (tmp_path / "blocks").write_text("a file where the cache wants a folder")
    meter = Meter(proxy)
    batches = Dataset.open(bucket, DATASET_ID, tmp_path).training(CONTEXT, 312, seed=0)
    assert sorted(batches.batch(0)[:, 0].tolist()) == [sample * CONTEXT for sample in range(312)]
    across = 4  # rows across two shards
    assert meter.requests == 5 * 2 + across * 2  # a piece and the digests of five shards, instead of a request per row
    batches.batch(1)
    assert meter.requests > 5 * 2 + across * 2
    assert caplog.text.count("blocks are read from the store each time") == 1


def test_a_full_disk_makes_room_and_leaves_no_torn_piece(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "blocks", 2**30)
    cache.write("small/0", b"kept")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a larger write fails in the middle, as on a full disk
    try:
        cache.write("big/0", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert cache.read("big/0") is None
    assert [path.name for path in (tmp_path / "blocks" / "big").iterdir()] == []
    assert cache.read("small/0") == b"kept"
    cache.write("big/0", bytes(5000))
    assert cache.read("big/0") == bytes(5000)


def test_a_child_forked_during_a_fetch_does_not_hold_the_lock_of_the_block(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "blocks", 2**20)
    with cache.fetching("a"):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        fetched = threading.Event()

        def fetch() -> None:
            with cache.fetching("a"):
                fetched.set()

        threading.Thread(target=fetch, daemon=True).start()
        assert fetched.wait(180), "the child still holds the lock"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
