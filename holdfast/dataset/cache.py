"""Bounded cache of blocks on the local disk, shared by all processes of a machine.

A reader finds whole blocks or none. The folder stays within its limit: the least recently used blocks are dropped. A
full or read-only disk costs speed and never causes a failure, because blocks are then not kept. Callers verify what
they read, because they know the digests.
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from holdfast.runtime import heartbeat
from holdfast.runtime.environment import make_folder
from holdfast.runtime.locks import lock_within

LOCK_SECONDS = 90.0  # a request to the store may take a minute
LOCKS = 64  # files; two blocks that share one are fetched one after another
TRIM_EVERY = 100  # the folder is measured when this process has added this part (1/100) of the limit...
TRIM_TO = 0.85  # ...and trimmed to this share of it, so that fifteen processes together stay below the limit
FRESH_SECONDS = 60.0  # a block is marked as used at most once in this time
UNFINISHED_SECONDS = 3600.0  # an older unfinished file belongs to a dead writer

log = logging.getLogger("holdfast.dataset")


class BlockCache:
    """Blocks as files under `folder`, at most `limit` bytes in total."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._added = limit  # bytes since the folder was measured; initially its size is unknown
        self._lock = threading.Lock()
        self._warned = False

    def has(self, name: str) -> bool:
        """Whether the block is in the cache."""
        return (self._folder / name).exists()

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """`length` bytes of a block from `start`, or the whole block. None if it is missing or shorter."""
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            size = status.st_size - start if length is None else length
            data = os.pread(descriptor, size, start)
            if time.time() - status.st_mtime > FRESH_SECONDS:
                os.utime(descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return data if len(data) == size else None

    def write(self, name: str, data: bytes) -> None:
        """Store a block, if the disk accepts it."""
        path = self._folder / name
        unfinished = path.with_name(f".{uuid.uuid4().hex}")
        try:
            make_folder(path.parent)
            try:
                unfinished.write_bytes(data)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            self._not_kept(error)
            return
        with self._lock:
            self._added += len(data)
            due = self._added * TRIM_EVERY >= self._limit
        if due:
            self._trim(int(self._limit * TRIM_TO), self._limit)

    def drop(self, name: str) -> None:
        """Remove a block."""
        with contextlib.suppress(OSError):
            (self._folder / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def fetching(self, name: str) -> Iterator[None]:
        """Hold the lock to fetch a block: only one process of this machine fetches it, if the disk supports locks."""
        lock = self._folder / f".lock-{int(blake3(name.encode()).hexdigest()[:8], 16) % LOCKS:02d}"
        descriptor = -1
        with contextlib.suppress(OSError):
            make_folder(lock.parent)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with heartbeat.here.requesting():  # the holder requests it for both
                lock_within(descriptor, LOCK_SECONDS)  # a holder that hangs is ignored: both fetch the same bytes
        try:
            yield
        finally:
            if descriptor >= 0:
                _unlock(descriptor)

    def _not_kept(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: %s: blocks are read from the store each time; free some space, or lower HOLDFAST_CACHE_GIB",
                self._folder,
                error.strerror,
            )
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._trim(None, 0)

    def _trim(self, target: int | None, limit: int) -> None:
        """Drop the least recently used blocks until `target` bytes are left (None: nine tenths of the current
        bytes). Nothing is dropped up to TRIM_TO of `limit` bytes. One process trims at a time, on behalf of all."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._folder / ".trim", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._added = 0
                self._drop_oldest(target, limit)
            finally:
                _unlock(descriptor)

    def _drop_oldest(self, target: int | None, limit: int) -> None:
        now, entries, total = time.time(), [], 0
        for folder, _, names in os.walk(self._folder):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    if not name.startswith("."):
                        entries.append((status.st_mtime, status.st_size, path))
                        total += status.st_size
                    elif Path(folder) != self._folder and now - status.st_mtime > UNFINISHED_SECONDS:
                        path.unlink()
        if total <= limit * TRIM_TO:
            return
        keep = total * 9 // 10 if target is None else target
        for _, size, path in sorted(entries):
            if total <= keep:
                return
            path.unlink(missing_ok=True)
            total -= size


def _unlock(descriptor: int) -> None:
    """Release the lock before closing: a child forked meanwhile shares the descriptor, and would keep the lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
