"""What every store promises, checked on both: a folder, and a real S3 over HTTP."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.components.spec.errors import DataError, MissingError
from holdfast.components.store import ConflictError, Store, open_store, s3_parts


def keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_what_is_put_is_read_back(store: Store) -> None:
    store.put("a/b.bin", b"0123456789")
    assert store.get("a/b.bin") == b"0123456789"


def test_put_replaces(store: Store) -> None:
    store.put("k", b"long content")
    store.put("k", b"new")
    assert store.get("k") == b"new"


@pytest.mark.parametrize(
    ("data", "content"),
    [
        (b"", b""),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abcdef")[2:4], b"cd"),
        ([b"ab", bytearray(b"cd"), memoryview(b"ef"), b""], b"abcdef"),
        ((b"",), b""),
        (memoryview(b"abcdefgh").cast("I"), b"abcdefgh"),
    ],
    ids=["empty", "bytearray", "slice", "several", "empty sequence", "of integers"],
)
def test_every_kind_of_buffer_is_written_as_its_bytes(store: Store, data: object, content: bytes) -> None:
    store.put("put", data)  # type: ignore[arg-type]
    assert store.put_if_absent("absent", data)  # type: ignore[arg-type]
    store.compare_and_swap("swapped", data, None)  # type: ignore[arg-type]
    assert [store.get(key) for key in ("put", "absent", "swapped")] == [content] * 3


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(0, None, b"0123456789"), (0, 4, b"0123"), (3, 4, b"3456"), (7, None, b"789"), (9, 1, b"9"), (10, None, b""),
     (10, 0, b""), (0, 0, b""), (0, 10, b"0123456789")],
)  # fmt: skip
def test_a_range_is_exactly_the_bytes_asked_for(store: Store, start: int, length: int | None, expected: bytes) -> None:
    store.put("k", b"0123456789")
    assert store.get("k", start, length) == expected


@pytest.mark.parametrize(("start", "length"), [(0, 11), (8, 3), (10, 1), (11, None), (11, 0), (100, 1)])
def test_a_range_beyond_the_end_is_bad_data_and_says_the_size(store: Store, start: int, length: int | None) -> None:
    store.put("k", b"0123456789")
    with pytest.raises(DataError, match="k: has 10 bytes"):
        store.get("k", start, length)


def test_read_into_fills_the_target_and_nothing_else(store: Store) -> None:
    store.put("k", b"0123456789")
    target = bytearray(b"........")
    store.read_into("k", 4, memoryview(target)[2:5])
    assert target == b"..456..."
    with pytest.raises(DataError, match="has 10 bytes"):
        store.read_into("k", 8, memoryview(target))


@pytest.mark.parametrize("operation", ["get", "range", "nothing", "read_into", "get_versioned", "download"])
def test_reading_what_is_absent_is_a_missing_error_that_names_the_key(
    store: Store, tmp_path: Path, operation: str
) -> None:
    with pytest.raises(MissingError, match="no/such"):
        match operation:
            case "get":
                store.get("no/such")
            case "range":
                store.get("no/such", 2, 3)
            case "nothing":
                store.get("no/such", 0, 0)
            case "read_into":
                store.read_into("no/such", 0, memoryview(bytearray(1)))
            case "get_versioned":
                store.get_versioned("no/such")
            case "download":
                store.download("no/such", tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_put_if_absent_takes_a_free_key_once(store: Store) -> None:
    assert store.put_if_absent("claim", b"mine")
    assert not store.put_if_absent("claim", b"other")
    assert not store.put_if_absent("claim", b"else")
    assert store.get("claim") == b"mine"


def test_put_if_absent_of_the_same_content_is_true_again(store: Store) -> None:
    assert store.put_if_absent("pack", b"content")
    assert store.put_if_absent("pack", [b"con", b"tent"])
    store.put("plain", b"content")
    assert store.put_if_absent("plain", b"content")
    assert not store.put_if_absent("plain", b"contenT")


def test_compare_and_swap_follows_the_versions(store: Store) -> None:
    first = store.compare_and_swap("k", b"1", None)
    assert store.get_versioned("k") == (b"1", first)
    second = store.compare_and_swap("k", b"2", first)
    assert second != first
    assert store.get_versioned("k") == (b"2", second)
    with pytest.raises(ConflictError, match="k: version is"):
        store.compare_and_swap("k", b"3", first)
    with pytest.raises(ConflictError, match="not absent"):
        store.compare_and_swap("k", b"3", None)
    assert store.get("k") == b"2"


def test_compare_and_swap_with_an_absent_key_conflicts_unless_absence_is_expected(store: Store) -> None:
    version = store.compare_and_swap("k", b"1", None)
    store.delete("k")
    with pytest.raises(ConflictError, match="absent"):
        store.compare_and_swap("k", b"2", version)
    assert store.stat("k") is None


def test_stat_knows_size_and_time_and_sees_every_write(store: Store) -> None:
    assert store.stat("k") is None
    store.put("k", b"12345")
    info = store.stat("k")
    assert info is not None
    assert (info.key, info.size) == ("k", 5)
    assert info.modified > 1e9
    store.put("k", b"54321")
    again = store.stat("k")
    assert again is not None
    assert again.version != info.version


def test_list_gives_the_keys_under_a_prefix_in_order(store: Store) -> None:
    names = ["a/b", "a-b", "a.b", "a/b2/c", "a0", "b/step-2", "b/step-10", "b/step-1", "B"]
    for name in names:
        store.put(name, name.encode())
    assert keys(store) == sorted(names)
    assert keys(store, "a/") == ["a/b", "a/b2/c"]
    assert keys(store, "a") == ["a-b", "a.b", "a/b", "a/b2/c", "a0"]
    assert keys(store, "b/step-1") == ["b/step-1", "b/step-10"]
    assert keys(store, "nothing/") == []
    assert [info.size for info in store.list("B")] == [1]


def test_list_agrees_with_stat(store: Store) -> None:
    store.put("folder/k", b"12345")
    assert list(store.list("folder/")) == [store.stat("folder/k")]


def test_delete_removes_and_may_be_repeated(store: Store) -> None:
    store.put("folder/k", b"1")
    store.delete("folder/k")
    store.delete("folder/k")
    store.delete("nothing/here")
    assert keys(store) == []
    assert store.put_if_absent("folder/k", b"2")


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_files_are_uploaded_and_downloaded(store: Store, tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "source").write_bytes(content)
    store.upload(tmp_path / "source", "folder/k")
    store.download("folder/k", tmp_path / "made" / "target")
    assert (tmp_path / "made" / "target").read_bytes() == content
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["target"]


def test_uploading_a_file_that_is_not_there_names_it(store: Store, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="nothing-here"):
        store.upload(tmp_path / "nothing-here", "k")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts so small that a test can afford several (S3 itself wants 5 MiB)."""
    size = 5 * 2**20
    monkeypatch.setattr(s3_parts, "PART_BYTES", size)
    return size


def test_large_objects_survive_every_way_in_and_out(store: Store, small_parts: int, tmp_path: Path) -> None:
    content = os.urandom(2 * small_parts + 12_345)
    split = [content[:7], memoryview(content)[7 : small_parts + 9], bytearray(content[small_parts + 9 :])]
    store.put("put", split)
    assert store.put_if_absent("absent", split)
    assert store.put_if_absent("absent", content)
    assert not store.put_if_absent("absent", content[:-1] + b"\0" + content[-1:])
    (tmp_path / "source").write_bytes(content)
    store.upload(tmp_path / "source", "uploaded")
    store.download("put", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content
    assert store.get("absent") == content
    assert store.get("uploaded", 5, 2 * small_parts) == content[5 : 5 + 2 * small_parts]
    assert store.get("uploaded", 3) == content[3:]


@pytest.mark.parametrize(
    "key",
    ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a/.", ".hidden", "a/.hidden", "a\\b", "a\nb", "a\0b", "x" * 201,
     "/".join(["x" * 100] * 10)],
)  # fmt: skip
def test_keys_that_could_leave_the_root_or_hide_are_refused(store: Store, key: str, tmp_path: Path) -> None:
    for operation in (
        lambda: store.put(key, b""),
        lambda: store.put_if_absent(key, b""),
        lambda: store.compare_and_swap(key, b"", None),
        lambda: store.get(key),
        lambda: store.get(key, 0, 0),
        lambda: store.get_versioned(key),
        lambda: store.stat(key),
        lambda: store.delete(key),
        lambda: store.upload(tmp_path, key),
        lambda: store.download(key, tmp_path / "x"),
        lambda: store.local_path(key),
    ):
        with pytest.raises(ValueError, match="key"):
            operation()


def test_negative_ranges_are_refused(store: Store) -> None:
    store.put("k", b"1")
    for start, length in ((-1, None), (0, -1)):
        with pytest.raises(ValueError, match="negative"):
            store.get("k", start, length)


def test_the_url_opens_the_same_store_again(store: Store) -> None:
    store.put("k", b"1")
    assert open_store(store.url).get("k") == b"1"


def test_local_path_is_the_file_or_nothing(store: Store) -> None:
    assert store.local_path("k") is None
    store.put("k", b"1")
    path = store.local_path("k")
    assert path is None if store.url.startswith("s3:") else path is not None and path.read_bytes() == b"1"


def test_of_many_threads_exactly_one_takes_a_key(store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: store.put_if_absent("claim", b"writer %d" % n), range(48)))
    assert won.count(True) == 1
    assert store.get("claim") == b"writer %d" % won.index(True)


def _increment(url: str, times: int) -> int:
    """Add 1 so many times; returns how often another writer was first."""
    store, lost = open_store(url), 0
    for _ in range(times):
        while True:
            content, version = store.get_versioned("counter")
            try:
                store.compare_and_swap("counter", b"%d" % (int(content) + 1), version)
                break
            except ConflictError:
                lost += 1
    return lost


def _claim(url: str, number: int) -> bool:
    return open_store(url).put_if_absent("claim", b"process %d" % number)


def test_a_counter_loses_no_increment_of_many_threads(store: Store) -> None:
    store.compare_and_swap("counter", b"0", None)
    with ThreadPoolExecutor(8) as pool:
        lost = sum(pool.map(lambda _: _increment(store.url, 5), range(8)))
    assert store.get("counter") == b"40"
    assert lost > 0  # they did meet


def test_processes_neither_share_a_claim_nor_lose_an_increment(store: Store) -> None:
    store.compare_and_swap("counter", b"0", None)
    with multiprocessing.get_context("fork").Pool(4) as pool:  # forked with the store's connections open
        won = pool.starmap(_claim, [(store.url, number) for number in range(8)])
        pool.starmap(_increment, [(store.url, 5)] * 4)
    assert won.count(True) == 1
    assert store.get("claim") == b"process %d" % won.index(True)
    assert store.get("counter") == b"20"


def test_a_store_opened_before_a_fork_works_after_it(store: Store) -> None:
    store.put("k", b"1")
    child = os.fork()
    if child == 0:
        try:
            store.put("child", store.get("k"))
            os._exit(0)
        finally:
            os._exit(1)
    store.put("parent", store.get("k"))
    assert os.waitpid(child, 0)[1] == 0
    assert keys(store) == ["child", "k", "parent"]


def test_several_objects_are_removed_and_those_that_are_not_there_are_fine(store: Store) -> None:
    for key in ("a/1", "a/2", "b/1", "b/2"):
        store.put(key, b"1")
    store.delete_many(["a/1", "b/1", "b/2", "never/there"])
    assert keys(store) == ["a/2"]
    store.delete_many([])
    with pytest.raises(ValueError, match="parts"):
        store.delete_many(["a/2", "../x"])
    assert keys(store) == ["a/2"]
