"""The contract of every store, checked on a folder and on a real S3 over HTTP."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from holdfast.spec.errors import DataError, MissingError
from holdfast.store import ConflictError, Read, Store, open_store, parallel


def keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_a_put_object_is_read_back(store: Store) -> None:
    for content in (b"long content", b"new"):
        store.put("a/b.bin", content)
        assert store.get("a/b.bin") == content


def test_every_kind_of_buffer_is_written_as_its_bytes(store: Store) -> None:
    kinds: list[tuple[Any, bytes]] = [
        (b"", b""),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abcdef")[2:4], b"cd"),
        ([b"ab", bytearray(b"cd"), memoryview(b"ef"), b""], b"abcdef"),
        ((b"",), b""),
        (memoryview(b"abcdefgh").cast("I"), b"abcdefgh"),
    ]
    for number, (data, content) in enumerate(kinds):
        store.put("put", data)
        assert store.put_if_absent(f"absent{number}", data)
        store.compare_and_swap(f"swapped{number}", data, None)
        assert [store.get(key) for key in ("put", f"absent{number}", f"swapped{number}")] == [content] * 3


def test_a_range_read_is_exact_and_past_the_end_raises_data_error_with_the_size(store: Store) -> None:
    content = b"0123456789"
    store.put("k", content)
    for start, length in ((0, None), (0, 4), (3, 4), (7, None), (9, 1), (10, None), (10, 0), (0, 0), (0, 10)):
        assert store.get("k", start, length) == content[start : None if length is None else start + length]
    for start, length in ((0, 11), (8, 3), (10, 1), (11, None), (11, 0), (100, 1)):
        with pytest.raises(DataError, match="k: has 10 bytes"):
            store.get("k", start, length)
    for start, length in ((-1, None), (0, -1)):
        with pytest.raises(ValueError, match="negative"):
            store.get("k", start, length)


def test_read_into_fills_the_target_and_nothing_else(store: Store) -> None:
    store.put("k", b"0123456789")
    target = bytearray(b"........")
    store.read_into("k", 4, memoryview(target)[2:5])
    assert target == b"..456..."
    with pytest.raises(DataError, match="has 10 bytes"):
        store.read_into("k", 8, memoryview(target))


def test_read_many_fills_all_targets_and_calls_each_callback(store: Store) -> None:
    content = {f"k{number}": os.urandom(1000 + number) for number in range(5)}
    for key, data in content.items():
        store.put(key, data)
    reads: list[tuple[str, int, bytes]] = []

    def add(key: str, start: int, target: memoryview) -> None:
        reads.append((key, start, bytes(target)))

    def wanted() -> Iterator[Read]:
        for key in content:
            for start in range(0, 900, 90):
                target = memoryview(bytearray(100))
                yield Read(key, start, target, partial(add, key, start, target))

    store.read_many(wanted())
    assert sorted(reads) == [
        (key, start, content[key][start : start + 100]) for key in content for start in range(0, 900, 90)
    ]
    store.read_many([])


def test_many_reads_draw_only_what_they_have_room_for(store: Store) -> None:
    store.put("k", bytes(100))
    drawn_reads = used_reads = most = 0
    count = threading.Lock()

    def use() -> None:
        nonlocal used_reads
        with count:
            used_reads += 1

    def wanted() -> Iterator[Read]:
        nonlocal drawn_reads, most
        for start in range(100):
            with count:
                drawn_reads += 1
                most = max(most, drawn_reads - used_reads)
            yield Read("k", start, memoryview(bytearray(1)), use)

    store.read_many(wanted())
    assert used_reads == 100
    assert most <= parallel.THREADS + 1


def test_read_many_raises_the_first_failure_and_starts_no_more_reads(store: Store) -> None:
    store.put("k", bytes(100))
    endless = (Read("no/such" if number == 3 else "k", 0, memoryview(bytearray(1))) for number in itertools.count())
    with pytest.raises(MissingError, match="read_into no/such"):
        store.read_many(endless)

    def refuse() -> None:
        raise ValueError("its digest is another")

    with pytest.raises(ValueError, match="its digest"):
        store.read_many([Read("k", 0, memoryview(bytearray(9))), Read("k", 9, memoryview(bytearray(9)), refuse)])


def test_reading_what_is_absent_is_a_missing_error_that_names_the_key(store: Store, tmp_path: Path) -> None:
    for read in (
        lambda: store.get("no/such"),
        lambda: store.get("no/such", 2, 3),
        lambda: store.get("no/such", 0, 0),
        lambda: store.read_into("no/such", 0, memoryview(bytearray(1))),
        lambda: store.get_versioned("no/such"),
        lambda: store.download("no/such", tmp_path / "there"),
    ):
        with pytest.raises(MissingError, match="no/such"):
            read()
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
    rewritten = store.stat("k")
    assert rewritten is not None
    assert rewritten.version != info.version


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


def test_a_listing_can_begin_behind_a_key(store: Store) -> None:
    names = ["a/b", "a-b", "a/b2/c", "a/b2/d", "a0", "b/1"]
    for name in names:
        store.put(name, b"")
    for after in (*names, "a", "a/", "a/b1", "a/b2/", "zz", "0"):
        assert [info.key for info in store.list("", after)] == sorted(name for name in names if name > after)
        keys = [info.key for info in store.list("a/b2", after)]
        assert keys == [name for name in ("a/b2/c", "a/b2/d") if name > after]


def test_folders_are_named_without_what_is_in_them(store: Store) -> None:
    for name in ("runs/3f2a/run.json", "runs/3f2a/packs/1", "runs/3fb/x/y", "runs/9/z", "runs/file", "other/a/b"):
        store.put(name, b"")
    assert list(store.folders("runs/")) == ["3f2a", "3fb", "9"]
    assert list(store.folders("runs/3f")) == ["3f2a", "3fb"]
    assert list(store.folders("runs/3f2a/")) == ["packs"]
    assert list(store.folders("nothing/")) == []
    store.delete("runs/9/z")
    assert list(store.folders("runs/")) == ["3f2a", "3fb"]


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


@pytest.mark.parametrize("size", [0, 100_000])
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
    """Small parts, so that a test can upload several (real S3 requires 5 MiB)."""
    size = 5 * 2**20
    monkeypatch.setattr(parallel, "PART_BYTES", size)
    return size


def test_large_objects_survive_every_way_in_and_out(store: Store, small_parts: int, tmp_path: Path) -> None:
    content = os.urandom(2 * small_parts + 12_345)
    middle = memoryview(content)[7 : small_parts + 9]
    split: list[bytes | bytearray | memoryview] = [content[:7], middle, bytearray(content[small_parts + 9 :])]
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


@pytest.mark.parametrize("size", [0, 12 * 2**20 + 17])
def test_an_object_is_written_while_its_bytes_are_made(store: Store, small_parts: int, size: int) -> None:
    content = os.urandom(size)
    calls: list[int] = []

    def made() -> Iterator[bytes]:
        calls.append(1)
        for start in range(0, size, 700_001):
            yield content[start : start + 700_001]
            yield b""

    store.put_stream("streamed", size, made)
    assert store.get("streamed") == content
    assert len(calls) == 1


@pytest.mark.parametrize(("size", "words"), [(7, "extends beyond"), (9, "ends after 8"), (12 * 2**20, "ends after 8")])
def test_a_stream_with_another_length_than_declared_is_not_written(
    store: Store, small_parts: int, size: int, words: str
) -> None:
    store.put("k", b"before")
    with pytest.raises(DataError, match=f"k: {size} bytes were to be written, and what makes them {words}"):
        store.put_stream("k", size, lambda: iter([b"1234", b"5678"]))
    assert store.get("k") == b"before"


def test_an_error_of_a_stream_producer_reaches_the_caller_and_writes_nothing(store: Store, small_parts: int) -> None:
    def made() -> Iterator[bytes]:
        yield bytes(small_parts + 5)
        raise MissingError("a pack is gone")

    with pytest.raises(MissingError, match="a pack is gone"):
        store.put_stream("k", 8 * small_parts, made)
    assert keys(store) == []


def test_keys_that_could_leave_the_root_or_hide_are_refused(store: Store, tmp_path: Path) -> None:
    keys = ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a/.", ".hidden", "a/.hidden", "a\\b", "a\nb", "a\0b",
            "x" * 201, "/".join(["x" * 100] * 10)]  # fmt: skip
    operations: tuple[Callable[[str], object], ...] = (
        lambda key: store.put(key, b""),
        lambda key: store.put_if_absent(key, b""),
        lambda key: store.compare_and_swap(key, b"", None),
        store.get,
        lambda key: store.get(key, 0, 0),
        store.get_versioned,
        store.stat,
        store.delete,
        lambda key: store.upload(tmp_path, key),
        lambda key: store.download(key, tmp_path / "x"),
        store.local_path,
    )
    for key, operation in product(keys, operations):
        with pytest.raises(ValueError, match="key"):
            operation(key)


def test_the_url_opens_the_same_store_again(store: Store) -> None:
    store.put("k", b"1")
    assert open_store(store.url).get("k") == b"1"


def test_local_path_is_the_file_or_nothing(store: Store) -> None:
    assert store.local_path("k") is None
    store.put("k", b"1")
    path = store.local_path("k")
    assert path is None if not store.url.startswith("file:") else path is not None and path.read_bytes() == b"1"


def test_several_objects_are_removed_and_those_that_are_not_there_are_fine(store: Store) -> None:
    for key in ("a/1", "a/2", "b/1", "b/2"):
        store.put(key, b"1")
    store.delete_many(["a/1", "b/1", "b/2", "never/there"])
    assert keys(store) == ["a/2"]
    store.delete_many([])
    with pytest.raises(ValueError, match="parts"):
        store.delete_many(["a/2", "../x"])
    assert keys(store) == ["a/2"]
