"""Locks of files that other processes may hold: waited for, and not for ever.

Promises that a member of a group can lock what another one has made, and that a file system without locks is named.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from holdfast.spec.errors import AccessDeniedError

_PAUSE = 0.005  # seconds between two tries


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)  # what flock says where there are none


def open_lock(path: Path) -> int:
    """A file to lock, made where there is none. One of another user that may only be read will do."""
    flags = os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | flags, 0o666)  # as NFS wants it
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags, 0o666)


def no_locks(path: Path, error: OSError, remedy: str) -> AccessDeniedError:
    """The error for a file on a file system that has no locks."""
    return AccessDeniedError(f"{path}: this file system has no file locks ({error.strerror}); {remedy}")


def lock_within(descriptor: int, seconds: float) -> bool:
    """Take the exclusive lock of an open file; whether it was free within so long. Raises OSError where there are
    no locks."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        else:
            return True
