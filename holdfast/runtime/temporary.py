"""Temporary folders that do not outlive their process for long, however it ends.

A folder is held by a lock on itself for as long as its process, or a process that was forked from it, lives. Promises
that a folder whose process was killed is removed when the next process makes one, and that a folder of a process that
lives never is: a lock ends with its last holder, whatever the clocks, process ids and containers are. Where the file
system has no locks, nothing is removed but by its own process.
"""

from __future__ import annotations

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
    """The path of an empty folder of this user, which is removed in the end. `name` says what for."""
    remove_abandoned()
    made = tempfile.mkdtemp(prefix=f"{PREFIX}{name}-" if name else PREFIX)
    holder = None
    try:
        holder = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # there are no locks: it keeps the name of one that nobody else removes
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made = str(Path(made).rename(f"{made}{HELD}"))
        _holders[made] = holder
        yield made
    finally:
        _holders.pop(made, None)
        shutil.rmtree(made, ignore_errors=True)
        if holder is not None:
            os.close(holder)


def holders_of(folder: Path) -> tuple[int, ...]:
    """What a child process has to inherit (`pass_fds`) that uses the folder and may outlive this process."""
    found = _holders.get(str(folder))
    return () if found is None else (found,)


def remove_abandoned() -> None:
    """Remove the temporary folders of this user whose processes are dead."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.name.endswith(HELD):
                _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    try:
        holder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it is gone meanwhile, or another user's
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
