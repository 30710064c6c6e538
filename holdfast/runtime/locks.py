"""File locks that other processes may hold, with a bounded wait.

A member of a group can lock a file that another member has made. A file system without locks gets a named error.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.spec.errors import AccessDeniedError, HungError

_PAUSE = 0.005  # seconds between two tries


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)  # errors of flock where locks do not exist


def open_lock(path: Path) -> int:
    """A descriptor of a file to lock, created if missing. Another user's file that may only be read also works."""
    flags = os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | flags, 0o666)  # NFS requires it
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags, 0o666)


def no_locks(path: Path, error: OSError, remedy: str) -> AccessDeniedError:
    """The error for a file on a file system that has no locks."""
    return AccessDeniedError(f"{path}: this file system has no file locks ({error.strerror}); {remedy}")


def lock_within(descriptor: int, seconds: float) -> bool:
    """Take the exclusive lock of an open file. Returns whether it was free within `seconds`. Raises OSError where locks
    do not exist."""
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


@contextmanager
def holding_lock(path: Path, seconds: float, doing: str) -> Iterator[None]:
    """Hold the lock of a file in the cache of this node. `doing` says what another holder does. Raises HungError if it
    is not free within `seconds`, and AccessDeniedError where locks do not exist."""
    descriptor = open_lock(path)
    try:
        try:
            if not lock_within(descriptor, seconds):
                raise HungError(f"{path}: another process {doing} for over {seconds:.0f} s; end it")
        except OSError as error:
            raise no_locks(path, error, "set HOLDFAST_HOME to a local folder") from None
        yield
    finally:
        os.close(descriptor)
