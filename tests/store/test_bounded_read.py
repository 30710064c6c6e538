import os
from pathlib import Path

import pytest

from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, TooLargeError, read_bounded, read_file_bounded
from holdfast.store.file import FileStore


def test_an_object_above_the_bound_is_refused_with_its_size_and_one_at_the_bound_is_read(store: Store) -> None:
    store.put("runs/a.json", b"x" * 100)
    assert read_bounded(store, "runs/a.json", 100) == b"x" * 100
    assert store.get_versioned("runs/a.json", most=100)[0] == b"x" * 100
    with pytest.raises(TooLargeError, match=r"runs/a\.json: has 100 bytes, and at most 99 are read"):
        read_bounded(store, "runs/a.json", 99)
    with pytest.raises(TooLargeError, match="at most 99"):
        store.get_versioned("runs/a.json", most=99)
    assert store.get("runs/a.json", 0, 100, most=1) == b"x" * 100  # the caller chose this length
    with pytest.raises(MissingError):
        read_bounded(store, "runs/b.json", 99)


def test_no_object_is_read_whole_above_a_gib_and_no_buffer_is_made_for_it(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("root.json", b"")
    os.truncate(tmp_path / "root.json", 1 << 43)  # a sparse file: a buffer of this size could not be allocated
    for read in (store.get, store.get_versioned):
        with pytest.raises(TooLargeError, match="8796093022208 bytes"):
            read("root.json")


def test_a_pipe_in_the_folder_of_a_store_is_no_object_and_blocks_no_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(MissingError, match="no regular file"):
        FileStore(tmp_path).get("run.json")
    with pytest.raises(DataError, match="no regular file"):
        read_file_bounded(tmp_path / "run.json")


def test_a_local_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(MissingError, match=r"config\.json"):
        read_file_bounded(path)
    path.write_bytes(b"{}")
    assert read_file_bounded(path, 2) == b"{}"
    with pytest.raises(TooLargeError, match="at most 1 are read"):
        read_file_bounded(path, 1)
    os.truncate(path, 1 << 43)
    with pytest.raises(TooLargeError):
        read_file_bounded(path)
