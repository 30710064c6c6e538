"""Files whose bytes survive a crash: written whole, made durable together with their folder, and read to the end."""

import contextlib
import errno
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from holdfast.runtime.environment import make_home_of
from holdfast.spec.errors import DataError, MissingError, NoSpaceError
from holdfast.store.interface import Buffer, ObjectInfo
from holdfast.store.payload import Pieces

COPY_BYTES = 4 * 2**20
FILE_MODE = 0o666  # less the umask: the user and the folder decide who may read and change a store

log = logging.getLogger("holdfast.store")


@contextlib.contextmanager
def whole_file(path: Path, key: str) -> Iterator[int]:
    """A descriptor to write a local file. The file appears under `path` when the body ends without error."""
    temporary = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)  # noqa: PTH105
        sync_folder(path.parent)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise NoSpaceError(
            f"download {key} to {path}: {error.strerror}, {free_bytes(path.parent)} bytes free; free some space, "
            "then run the same command again"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read a local file. Raises MissingError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingError(f"upload: {path}: no such file") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def info(key: str, status: os.stat_result) -> ObjectInfo:
    """The store's description of a file."""
    version = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return ObjectInfo(key, status.st_size, status.st_mtime, version)


def write(descriptor: int, pieces: Pieces) -> None:
    """Write all of the pieces."""
    for piece in pieces:
        rest = piece
        while rest.nbytes:
            rest = rest[os.write(descriptor, rest) :]


def copy(source: int, target: int) -> None:
    """Copy the rest of one file to another."""
    buffer = memoryview(bytearray(COPY_BYTES))
    while count := os.readv(source, [buffer]):
        write(target, [buffer[:count]])


def fill(descriptor: int, target: memoryview, start: int, key: str) -> None:
    """Fill `target` with the bytes from `start`. Raises DataError when there are fewer."""
    filled = 0
    while filled < target.nbytes:
        count = os.preadv(descriptor, [target[filled:]], start + filled)
        if not count:
            raise DataError(f"{key}: became shorter while it was read; it was changed from outside the store")
        filled += count


def make_folder(folder: Path) -> None:
    """Create the folder and its parents, durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    make_home_of(folder)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where its file system supports that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):  # CIFS, 9p, some of FUSE
            raise
        _say_not_synced(os.fstat(descriptor).st_dev)
    finally:
        os.close(descriptor)


@cache
def _say_not_synced(device: int) -> None:
    log.warning(
        "the file system of device %d syncs no folders: after a power loss its newest files may be gone", device
    )


def free_bytes(folder: Path) -> int:
    """The free bytes on the disk of a folder, or of its first parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


# An object whose bytes are produced as they are written: none of it is in memory or on a disk beforehand.
#
# The bytes are requested once and in their order, for any number of threads that write them in parts. A producer that
# yields another number of bytes than announced leaves no object.

Content = Callable[[], Iterator[Buffer]]  # yields the bytes from the first one, each time it is called


class Stream:
    """The `size` bytes of the object `key`, in parts. Each thread waits until the bytes before its part are
    produced."""

    def __init__(self, key: str, size: int, content: Content) -> None:
        self._key, self._size, self._content = key, size, content
        self._turn = threading.Condition()
        self._made: Iterator[Buffer] = iter(())
        self._rest = memoryview(b"")
        self._position = 0
        self._failed = False

    def part(self, start: int, length: int) -> Pieces:
        """The bytes [start, start + length), which follow those of the previous call; start 0 begins anew. Raises
        DataError, and any error of the producer."""
        with self._turn:
            if start == 0:
                self._made, self._rest, self._position, self._failed = self._content(), memoryview(b""), 0, False
            self._turn.wait_for(lambda: self._position == start or self._failed)
            if self._failed:
                raise DataError(f"{self._key}: not written, since what comes before byte {start} could not be made")
            try:
                pieces = self._next(length)
            except BaseException:
                self._failed = True
                raise
            finally:
                self._turn.notify_all()
            return pieces

    def write_to(self, descriptor: int) -> None:
        """Write all of it to a file. Raises as `part` does."""
        for start in range(0, max(self._size, 1), COPY_BYTES):
            write(descriptor, self.part(start, min(COPY_BYTES, self._size - start)))

    def _next(self, length: int) -> Pieces:
        pieces: Pieces = []
        filled = 0
        while filled < length:
            if not self._rest.nbytes:
                following = next(self._made, None)
                if following is None:
                    raise self._wrong(f"ends after {self._position + filled}")
                self._rest = memoryview(following).cast("B")
            piece = self._rest[: length - filled]
            # Immutable bytes are not copied. The producer may reuse any other buffer for the next bytes.
            pieces.append(piece if type(piece.obj) is bytes else memoryview(bytes(piece)))
            filled += piece.nbytes
            self._rest = self._rest[piece.nbytes :]
        self._position += length
        if self._position == self._size and (
            self._rest.nbytes or any(memoryview(chunk).nbytes for chunk in self._made)
        ):
            raise self._wrong("extends beyond them")
        return pieces

    def _wrong(self, how: str) -> DataError:
        return DataError(f"{self._key}: {self._size} bytes were to be written, and what makes them {how}")
