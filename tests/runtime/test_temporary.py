"""Temporary folders: the folders of a killed process are removed, and those of a live process stay."""

import multiprocessing
import os
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from holdfast.runtime.temporary import remove_abandoned, temporary_folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of the temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _hold(connection: Connection) -> None:
    with temporary_folder("test") as folder:
        Path(folder, "sub").mkdir()
        connection.send(folder)
        signal.pause()


def test_temporary_folders_of_killed_processes_are_removed_and_of_live_ones_kept(place: Path) -> None:
    foreign = [place / "holdfast-other.held.not", place / "holdfast-of-an-older-version", place / "other.held"]
    for folder in foreign:
        folder.mkdir()
    (place / "holdfast-link.held").symlink_to(foreign[1])
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_hold, args=(theirs,))
    process.start()
    folder = Path(ours.recv())
    with temporary_folder() as own:
        remove_abandoned()
        assert (folder / "sub").is_dir()
        assert Path(own).is_dir()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert folder.is_dir()
        with temporary_folder():
            assert not folder.exists()
            assert Path(own).is_dir()
    assert not Path(own).exists()
    assert all(path.is_dir() for path in foreign)


def test_a_process_that_was_forked_keeps_the_folder_of_one_that_was_killed(place: Path) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    first = os.fork()
    if first == 0:
        with temporary_folder() as folder:
            second = os.fork()
            if second == 0:
                signal.pause()
            theirs.send((folder, second))
            signal.pause()
    folder, second = ours.recv()
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    remove_abandoned()
    assert Path(folder).is_dir()
    os.kill(second, signal.SIGKILL)
    while Path(folder).is_dir():  # the kernel closes its files
        remove_abandoned()
    assert [*place.iterdir()] == []
