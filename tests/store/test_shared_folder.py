"""The folder store with several users, and on file systems with missing features."""

import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.runtime import environment
from holdfast.spec.errors import AccessDeniedError
from holdfast.store import durable, open_store
from holdfast.store.file import FileStore

FIRST, SECOND, STRANGER, GROUP = 61001, 61002, 61003, 62000


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder with setgid for the first user's group. (`tmp_path` is closed to other users.)"""
    root = Path(tempfile.mkdtemp(prefix="holdfast-shared-"))
    os.chown(root, FIRST, GROUP)
    root.chmod(0o2775)
    yield root
    shutil.rmtree(root)


def as_user(user: int, group: int, umask: int, work: Callable[[], object]) -> str:
    """Run `work` as another user. Returns its error as text."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        message = ""
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)
            os.umask(umask)
            work()
        except BaseException as error:  # noqa: BLE001
            message = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, message.encode()[:4000])
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return file.read()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become other users")
def test_members_of_a_group_share_a_folder_and_a_stranger_is_kept_out_by_the_umask(shared: Path) -> None:
    root = shared / "store"

    def begin() -> None:
        store = FileStore(root, deadline=5)
        for number in range(40):  # of 256 locks
            store.compare_and_swap(f"a/{number}.json", b"first", None)
        store.put("runs/run/weights.pack", b"weights")
        store.put_if_absent("runs/run/root.json", b"{}")

    def continue_writing() -> None:
        store = FileStore(root, deadline=5)
        for number in range(40):
            version = store.get_versioned(f"a/{number}.json")[1]
            store.compare_and_swap(f"a/{number}.json", b"second", version)
        store.put("runs/run/weights.pack", b"others")
        store.delete("runs/run/root.json")

    assert as_user(FIRST, GROUP, 0o007, begin) == ""
    assert as_user(SECOND, GROUP, 0o007, continue_writing) == ""
    assert as_user(FIRST, GROUP, 0o007, continue_writing) == ""
    for path in [root, *root.rglob("*")]:
        status = path.stat()
        assert status.st_gid == GROUP
        assert stat.S_IMODE(status.st_mode) == (0o2770 if path.is_dir() else 0o660), path
    assert "PermissionError" in as_user(STRANGER, STRANGER, 0o002, (root / "runs/run/weights.pack").read_bytes)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become other users")
def test_a_lock_created_by_another_user_under_a_strict_umask_is_usable(shared: Path) -> None:
    def begin() -> None:
        FileStore(shared, deadline=5).compare_and_swap("a.json", b"first", None)
        for folder in (shared / ".holdfast", *(shared / ".holdfast").iterdir()):
            folder.chmod(0o2775)

    def continue_writing() -> None:
        store = FileStore(shared, deadline=5)
        store.compare_and_swap("a.json", b"second", store.get_versioned("a.json")[1])

    assert as_user(FIRST, GROUP, 0o022, begin) == ""
    assert as_user(SECOND, GROUP, 0o022, continue_writing) == ""


def test_the_home_is_made_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, work in {
        "store": lambda home: open_store((home / "store").as_uri()).put("a", b"x"),
        "logs": lambda home: environment.make_folder(home / "logs" / "run"),
    }.items():
        home = tmp_path / name / "home"
        monkeypatch.setenv("HOLDFAST_HOME", str(home))
        work(home)
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_IMODE((home / name).stat().st_mode) == 0o755 & ~_umask()
    home.chmod(0o750)  # as an administrator may set it
    environment.make_folder(home / "logs")
    assert stat.S_IMODE(home.stat().st_mode) == 0o750


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def refuse(number: int) -> Callable[..., object]:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    from holdfast.launch import LocalLauncher

    monkeypatch.setattr(fcntl, "flock", refuse(number))
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    with pytest.raises(AccessDeniedError, match=r"no file locks.*s3://"):
        FileStore(tmp_path / "store", deadline=60).compare_and_swap("a", b"x", None)
    with (
        pytest.raises(AccessDeniedError, match=r"no file locks.*HOLDFAST_HOME"),
        LocalLauncher(tmp_path).only_one("run"),
    ):
        pass


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_named_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", refuse(number))
    with pytest.raises(AccessDeniedError, match=r"refuses hard links.*s3://"):
        FileStore(tmp_path / "store").put_if_absent("a", b"x")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_a_folder_without_fsync_is_logged_once_and_writes_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        refuse(number)() if stat.S_ISDIR(os.fstat(descriptor).st_mode) else real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    durable._say_not_synced.cache_clear()
    with caplog.at_level(logging.WARNING):
        store = FileStore(tmp_path / "store")
        for key in ("a/b", "a/c"):
            store.put(key, b"x")
            assert store.get(key) == b"x"
    assert caplog.text.count("syncs no folders") == 1
