"""Temporary folders that do not outlive their process for long, however it ends.

A lock on the folder itself holds it while its process, or a process forked from it, lives. The next process that makes
a folder removes those whose process was killed. A folder of a living process is never removed: a lock ends with its
last holder, independent of clocks, process ids and containers. Without file locks, only its own process removes a
folder.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_holders: dict[str, int] = {}  # folder -> the descriptor that holds it
PREFIX, HELD = "holdfast-", ".held"  # a folder gets its last name once its lock is held


@contextmanager
def temporary_folder(name: str = "") -> Iterator[str]:
    """The path of an empty folder of this user, which is removed at the end. `name` describes its purpose."""
    remove_abandoned()
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{name}-" if name else PREFIX)
    holder = None
    try:
        holder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # without locks, it keeps a name that no other process removes
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = str(Path(folder).rename(f"{folder}{HELD}"))
        _holders[folder] = holder
        yield folder
    finally:
        _holders.pop(folder, None)
        shutil.rmtree(folder, ignore_errors=True)
        if holder is not None:
            os.close(holder)


def holders_of(folder: Path) -> tuple[int, ...]:
    """The descriptors that a child process must inherit (`pass_fds`) if it uses the folder and may outlive this
    process."""
    holder = _holders.get(str(folder))
    return () if holder is None else (holder,)


def remove_abandoned() -> None:
    """Remove the temporary folders of this user whose processes are dead."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.name.endswith(HELD):
                _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    try:
        holder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it is gone meanwhile, or belongs to another user
        return
    try:
        if os.fstat(holder).st_uid != os.getuid() or not stat.S_ISDIR(os.fstat(holder).st_mode):
            return
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # it is held
        return
    finally:
        os.close(holder)
