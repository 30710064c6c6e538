"""A folder and a glob give the same files: links are followed, every listing ends, and skipped entries are named."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.components.preprocess import run
from holdfast.corpus import identify
from holdfast.corpus.listing import list_files
from holdfast.dataset.manifest import load_manifest
from holdfast.spec.errors import AccessDeniedError, DataError, MissingError
from holdfast.store import Store
from tests.corpus.conftest import MakeSpec, prose


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `in` of the working directory: a file, and a link to an outside folder with another file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "other" / "deeper").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text(prose(1))
    (tmp_path / "in" / "deep" / "b.txt").write_text(prose(2))
    (tmp_path / "in" / ".hidden.txt").write_text(prose(3))
    (tmp_path / "other" / "c.txt").write_text(prose(4))
    (tmp_path / "other" / "deeper" / "d.txt").write_text(prose(5))
    (tmp_path / "in" / "sub").symlink_to("../other")
    return tmp_path / "in"


ALL = ["in/a.txt", "in/deep/b.txt", "in/sub/c.txt", "in/sub/deeper/d.txt"]


def names(uri: str) -> list[str]:
    return [name for name, _ in list_files(uri, Path(), "field").in_order()]


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("in", ALL),
        ("in/", ALL),
        ("in/**", ALL),
        ("in/**/*", ALL),
        ("in/**/**/*.txt", ALL),
        ("in/**/sub/**/*.txt", ALL[2:]),
        ("*n/**/?.txt", ALL),
        ("in/*", ALL[:1]),
        ("in/*/*.txt", ALL[1:3]),
        ("in/[!a]*/**/d*", ALL[3:]),
        ("in/**/deeper/d.txt", ALL[3:]),
        ("in/.*", ["in/.hidden.txt"]),
        ("in/*/../a.txt", ["in/deep/../a.txt"]),
    ],
)
def test_folders_and_globs_follow_links(folder: Path, uri: str, expected: list[str]) -> None:
    listing = names(uri)
    assert listing == expected if ".." not in uri else set(expected) <= set(listing)


def test_an_absolute_path_means_the_same_files(folder: Path) -> None:
    root = folder.parent.as_posix()
    expected = [f"{root}/{name}" for name in ALL]
    assert names(f"{root}/in") == names(f"{root}/in/**/*.txt") == names(f"file://{root}/i[n]/**") == expected


def test_entries_that_are_no_files_are_counted_and_listed_in_log_and_dataset(
    store: Store, make_spec: MakeSpec, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "gone.txt").symlink_to("/nowhere.txt")
    (folder / "self.txt").symlink_to("self.txt")
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("in/socket.txt")
        prepared = run(make_spec("in", validation_fraction=0), store)
        left_out = {kind: (entry.count, entry.example) for kind, entry in prepared.lineage[0].left_out.items()}
        assert left_out == {
            "link that leads to itself": (1, "in/self.txt"),
            "link to nothing": (1, "in/gone.txt"),
            "named pipe": (1, "in/pipe.txt"),
            "socket": (1, "in/socket.txt"),
        }
        assert prepared.documents["train"] == 4
        assert "1 left out, named pipe: in/pipe.txt" in caplog.text
        assert load_manifest(store, prepared.dataset_id).sources[0].lineage.left_out == prepared.lineage[0].left_out
        assert list_files("in/*.txt", Path(), "f").left_out() == prepared.lineage[0].left_out
        (folder / "gone.txt").unlink()
        assert identify(make_spec("in", validation_fraction=0)) == prepared.dataset_id


def test_a_folder_that_a_pattern_matches_and_does_not_enter_is_reported(folder: Path) -> None:
    left_out = list_files("in/*", Path(), "field").left_out()
    assert [(kind, entry.count, entry.example) for kind, entry in left_out.items()] == [
        ("folder that the pattern does not enter", 2, "in/deep")
    ]
    assert not list_files("in/**/*", Path(), "field").others


@pytest.mark.parametrize("uri", ["in", "in/**/*.txt"])
def test_circular_links_end_and_each_file_is_listed_once(folder: Path, uri: str) -> None:
    for number in range(12):  # without a limit there would be 12! paths
        (folder / f"loop{number}").symlink_to(".")
        (folder.parent / "other" / f"back{number}").symlink_to("../in")
    listing = list_files(uri, Path(), "field")
    assert sorted(listing.files) == ALL
    assert listing.left_out()["link to a folder that is read already"].count == 24


def test_a_source_that_is_no_file_is_refused_by_what_it_is(folder: Path, make_spec: MakeSpec) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "gone").symlink_to("absent")
    with pytest.raises(DataError, match=r"'in/pipe' is a named pipe and not a file; write its data to a file"):
        identify(make_spec("in/pipe"))
    with pytest.raises(DataError, match=r"'/dev/null' is a device and not a file"):
        identify(make_spec("/dev/null"))
    with pytest.raises(MissingError, match=r"'in/gone' is a link to .*absent, which does not exist"):
        identify(make_spec("in/gone"))
    with pytest.raises(MissingError, match=r"matches no file .*; left out, named pipe: in/pipe; check the pattern"):
        identify(make_spec("in/pip*"))


@pytest.fixture
def ordinary_user() -> Iterator[Path]:
    """A folder in which this process has only the rights of an ordinary user."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    before = os.geteuid()
    if not before:
        os.seteuid(12345)
    try:
        yield folder
    finally:
        os.seteuid(before)
        shutil.rmtree(folder)


@pytest.mark.parametrize("uri", ["", "/*/*", "/**/*.txt", "/closed/a.txt"])
def test_an_unreadable_folder_is_reported(ordinary_user: Path, uri: str) -> None:
    closed = ordinary_user / "closed"
    closed.mkdir()
    (closed / "a.txt").write_text("a")
    closed.chmod(0)
    try:
        with pytest.raises(AccessDeniedError, match=f"{closed}.*may not be"):
            list_files(f"{ordinary_user}{uri}", Path(), "field")
    finally:
        closed.chmod(0o700)
