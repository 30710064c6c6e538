"""The store in a folder: the embedded default, and any file system that several machines mount.

A crash at any moment leaves whole objects or none. Bytes go to a hidden temporary file and are made durable by fsync of
the file and of its folder. They appear under their key in one atomic step. Needs rename, hard links and, for
compare_and_swap, flock.

No operation follows a symbolic link below the root: objects outside the root would be read, listed and deleted. The
root itself may be a link.
"""

import contextlib
import errno
import fcntl
import os
import random
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from blake3 import blake3

from holdfast.runtime.locks import NO_LOCKS, no_locks, open_lock
from holdfast.spec.errors import (
    AccessDeniedError,
    DataError,
    HoldfastError,
    MissingError,
    NoSpaceError,
    Problem,
    SpecError,
    StoreUnreachableError,
)
from holdfast.store.durable import (
    COPY_BYTES,
    FILE_MODE,
    Content,
    Stream,
    copy,
    fill,
    free_bytes,
    info,
    make_folder,
    opened,
    sync_folder,
    whole_file,
    write,
)
from holdfast.store.interface import STALE_SECONDS, WHOLE_BYTES, ConflictError, Data, ObjectInfo, Read
from holdfast.store.parallel import read_many
from holdfast.store.payload import (
    Pieces,
    check_folder,
    check_key,
    check_prefix,
    check_range,
    conflict,
    content_digest,
    filled,
    size_of,
    too_large,
    too_short,
    views,
    window,
)

HIDDEN = ".holdfast"


class FileStore:
    """Objects as files under `root`. `deadline`: seconds that compare_and_swap waits for another writer of its key."""

    def __init__(self, root: Path, *, deadline: float = 60.0) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links
        self.deadline = deadline
        self._swept = False

    @property
    def url(self) -> str:
        """The root: file:///path."""
        return f"file://{quote(str(self.root))}"

    def __repr__(self) -> str:
        return f"FileStore({self.url!r})"

    def put(self, key: str, data: Data) -> None:
        """Write an object, replacing any former one."""
        pieces = views(data)
        with self._temporary("put", key, lambda file: write(file, pieces), size_of(pieces)) as temporary:
            self._publish(os.replace, temporary, self._path(key))

    def put_if_absent(self, key: str, data: Data) -> bool:
        """Write an object unless the key is taken; True if it now holds exactly `data`."""
        pieces = views(data)
        path = self._path(key)
        if path.exists():
            return self._holds(key, pieces)
        with self._temporary("put_if_absent", key, lambda file: write(file, pieces), size_of(pieces)) as temporary:
            if self._link(temporary, path):
                return True
        return self._holds(key, pieces)

    def compare_and_swap(self, key: str, data: Data, expected: str | None) -> str:
        """Replace an object whose version is `expected` (None: absent); the version is the digest of the content."""
        pieces = views(data)
        path = self._path(key)
        with (
            self._temporary("compare_and_swap", key, lambda file: write(file, pieces), size_of(pieces)) as temporary,
            self._locked(key),
        ):
            try:
                current = self.get_versioned(key)[1]
            except MissingError:
                current = None
            if current != expected:
                raise conflict(key, current, expected)
            if expected is not None:
                self._publish(os.replace, temporary, path)
            elif not self._link(temporary, path):
                raise ConflictError(f"{key}: exists although it was expected absent; read it and decide anew")
        return content_digest(pieces)

    def get(self, key: str, start: int = 0, length: int | None = None, *, most: int = WHOLE_BYTES) -> bytes:
        """Read an object, or `length` bytes of it from `start`."""
        check_range(start, length)
        with self._reading("get", key) as descriptor:
            size = os.fstat(descriptor).st_size
            size_read = max(length if length is not None else size - start, 0)
            if length is None and size_read > most:
                raise too_large(key, size_read, most)
            self._long_enough(key, size, start, size_read)
            return filled(size_read, lambda view: fill(descriptor, view, start, key))

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fill `target` with the object's bytes from `start`."""
        check_range(start, None)
        target = target.cast("B")
        with self._reading("read_into", key) as descriptor:
            self._long_enough(key, os.fstat(descriptor).st_size, start, target.nbytes)
            fill(descriptor, target, start, key)

    def read_many(self, reads: Iterable[Read]) -> None:
        """Carry out many reads concurrently."""
        read_many(self.read_into, reads)

    def get_versioned(self, key: str, *, most: int = WHOLE_BYTES) -> tuple[bytes, str]:
        """Read a whole object together with the version that `compare_and_swap` expects."""
        content = self.get(key, most=most)
        return content, content_digest(views(content))

    def stat(self, key: str) -> ObjectInfo | None:
        """The metadata of an object, without reading it; None if it does not exist."""
        path = self._path(key)
        with self._speaking("stat", key):
            try:
                status = path.lstat()
            except (FileNotFoundError, NotADirectoryError) as error:
                self._require_folder(error)
                return None
            if stat.S_ISLNK(status.st_mode):
                raise self._link_error(path)
            return info(key, status) if stat.S_ISREG(status.st_mode) else None

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key begins with `prefix` and comes after `after`, in the order of their keys."""
        folder = check_prefix(prefix).rpartition("/")[0]
        return self._walk(self._folder(folder), f"{folder}/" if folder else "", prefix, after)

    def folders(self, prefix: str) -> Iterator[str]:
        """The names of the folders whose path begins with `prefix`, in order."""
        parent, _, beginning = check_prefix(prefix).rpartition("/")
        folder = self._folder(parent)
        with self._speaking("list", prefix):
            try:
                with os.scandir(folder) as entries:
                    names = sorted(entry.name for entry in entries if self._is_folder(entry))
            except (FileNotFoundError, NotADirectoryError) as error:
                self._require_folder(error)
                return iter(())
        folder_names = (name for name in names if name.startswith(beginning) and not name.startswith("."))
        return (name for name in folder_names if self._has_some(folder / name))

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is fine."""
        self.delete_many([key])

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove several objects; each folder is made durable once."""
        paths = {self._path(key): key for key in keys}
        for path, key in paths.items():
            with self._speaking("delete", key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
        for folder in {path.parent for path in paths}:
            with self._speaking("delete", keys[0]), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                sync_folder(folder)

    def end_abandoned(self, folder: str, older_than: float = STALE_SECONDS) -> int:
        """Remove the temporary files of killed writers. All of this store's are in one place, for any folder."""
        check_folder(folder)
        return self._sweep(older_than)

    def _sweep(self, older_than: float) -> int:
        oldest = time.time() - older_than
        count = 0
        with contextlib.suppress(OSError):
            for leftover in self._own_folder("unfinished").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if leftover.lstat().st_mtime < oldest:
                        leftover.unlink()
                        count += 1
        return count

    def put_stream(self, key: str, size: int, content: Content) -> None:
        """Write an object while its bytes are produced."""
        with self._temporary("put_stream", key, Stream(key, size, content).write_to, size) as temporary:
            self._publish(os.replace, temporary, self._path(key))

    def upload(self, path: Path, key: str) -> None:
        """Copy a local file into the store, streaming."""
        with (
            opened(path) as source,
            self._temporary("upload", key, lambda file: copy(source, file), os.fstat(source).st_size) as temporary,
        ):
            self._publish(os.replace, temporary, self._path(key))

    def download(self, key: str, path: Path) -> None:
        """Copy an object to a local file, streaming; the file appears only when it is whole."""
        with self._reading("download", key) as descriptor, whole_file(path, key) as target:
            copy(descriptor, target)

    def local_path(self, key: str) -> Path | None:
        """The file of the object; None if it does not exist."""
        path = self._path(key)
        if path.is_symlink():
            raise self._link_error(path)
        return path if path.is_file() else None

    def _path(self, key: str) -> Path:
        folder, _, name = check_key(key).rpartition("/")
        return self._folder(folder) / name

    def _own_folder(self, name: str) -> Path:
        return self._folder(f"{HIDDEN}/{name}")

    def _folder(self, name: str) -> Path:
        """A folder below the root. Raises DataError if it is reached by a symbolic link."""
        path = str(self.root)
        for part in name.split("/") if name else ():
            path = f"{path}/{part}"
            if os.path.islink(path):  # noqa: PTH114 - several times faster
                raise self._link_error(path)
        return Path(path)

    def _link_error(self, path: Path | str) -> DataError:
        return DataError(
            f"{path}: is a symbolic link, and the store {self.url} follows none; replace it by what it names, or "
            "remove it. To keep a folder on another disk, mount that disk there"
        )

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        """Raises DataError for a symbolic link: without the objects behind it a listing would be incomplete, and a
        collector would delete what they need."""
        if entry.is_symlink() and not entry.name.startswith("."):
            raise self._link_error(entry.path)
        return entry.is_dir(follow_symlinks=False)

    def _holds(self, key: str, pieces: Pieces) -> bool:
        with self._reading("put_if_absent", key) as descriptor:
            size = os.fstat(descriptor).st_size
            if size != size_of(pieces):
                return False
            for start in range(0, size, COPY_BYTES):
                stored = memoryview(bytearray(min(COPY_BYTES, size - start)))
                fill(descriptor, stored, start, key)
                if stored != b"".join(window(pieces, start, COPY_BYTES)):
                    return False
        return True

    @contextlib.contextmanager
    def _temporary(self, operation: str, key: str, write: Callable[[int], None], size: int) -> Iterator[Path]:
        """A durable temporary file, always removed at the end, and the folder that its key needs."""
        path = self._path(key)
        temporary = self._own_folder("unfinished") / uuid.uuid4().hex
        with self._speaking(operation, key, size):
            try:
                make_folder(temporary.parent)
                make_folder(path.parent)
                if not self._swept:  # once in the life of this object
                    self._swept = True
                    self._sweep(STALE_SECONDS)
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
                try:
                    write(descriptor)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                yield temporary
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)

    def _publish(self, move: Callable[[Path, Path], None], temporary: Path, path: Path) -> None:
        move(temporary, path)
        sync_folder(path.parent)

    def _link(self, temporary: Path, path: Path) -> bool:
        """Give the temporary file its key unless that is taken."""
        try:
            self._publish(os.link, temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            raise AccessDeniedError(
                f"{self.root}: this file system refuses hard links ({error.strerror}), which put_if_absent needs; "
                "use another folder or an s3:// store"
            ) from None
        return True

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Exclude other writers that swap `key`. The kernel releases the lock of a process that dies."""
        lock = self._own_folder("locks") / blake3(key.encode()).hexdigest()[:2]
        make_folder(lock.parent)
        descriptor = open_lock(lock)
        try:
            end = time.monotonic() + self.deadline
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:
                        raise StoreUnreachableError(
                            f"compare_and_swap {key}: another process held {lock} for {self.deadline:g} s; "
                            "see whether it is stopped, then run the same command again"
                        ) from None
                    time.sleep(random.uniform(0.0005, 0.01))  # noqa: S311
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        raise
                    remedy = "compare_and_swap needs them: mount it with locks, use another folder or an s3:// store"
                    raise no_locks(self.root, error, remedy) from None
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile shares the descriptor
            os.close(descriptor)

    @contextlib.contextmanager
    def _reading(self, operation: str, key: str) -> Iterator[int]:
        path = self._path(key)
        with self._speaking(operation, key):
            try:
                # A pipe would block the open.
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            except (FileNotFoundError, NotADirectoryError) as error:
                self._require_folder(error)
                raise MissingError(f"{operation} {key}: no such object in {self.url}") from None
            except OSError as error:
                if error.errno == errno.ELOOP and path.is_symlink():
                    raise self._link_error(path) from None
                raise
            try:
                mode = os.fstat(descriptor).st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    raise MissingError(f"{operation} {key}: is no regular file in {self.url}; remove it")
                yield descriptor
            except IsADirectoryError:
                raise MissingError(f"{operation} {key}: is a folder in {self.url}; name an object in it") from None
            finally:
                os.close(descriptor)

    def _long_enough(self, key: str, size: int, start: int, length: int) -> None:
        if start + length > size:
            raise too_short(key, size, start, length)

    @contextlib.contextmanager
    def _speaking(self, operation: str, key: str, size: int = 0) -> Iterator[None]:
        """Turn errors of the operating system into errors that name the operation, the key and the remedy."""
        try:
            yield
        except OSError as error:
            raise self._explained(error, operation, key, size) from error

    def _require_folder(self, error: OSError) -> None:
        """Raise SpecError if a file is in the place of the root, or of a folder above it."""
        if error.errno not in (errno.ENOTDIR, errno.EEXIST):
            return
        for path in (self.root, *self.root.parents):
            if path.exists():
                if not path.is_dir():
                    message = f"cannot be a store: {path} is a file and not a folder"
                    remedy = "name a folder, or a path that does not exist yet"
                    raise SpecError([Problem("store", self.url, message, remedy)], "store") from None
                return

    def _explained(self, error: OSError, operation: str, key: str, size: int) -> HoldfastError:
        self._require_folder(error)
        cause = f"{operation} {key} in {self.url}: {error.strerror}"
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                free = free_bytes(self.root)
                return NoSpaceError(
                    f"{cause}: {size} bytes to write, {free} bytes free; free some space or name another store, "
                    "then run the same command again"
                )
            case errno.EACCES | errno.EPERM | errno.EROFS:
                return AccessDeniedError(
                    f"{cause}; make the folder writable for this user, or name another store. In a folder of a group, "
                    "its members need umask 002"
                )
            case errno.ENOSYS | errno.EOPNOTSUPP:
                return AccessDeniedError(f"{cause}: this file system lacks the operation; name another store")
            case errno.ENOTDIR | errno.EISDIR | errno.EEXIST | errno.ENOTEMPTY:
                return ConflictError(f"{cause}: a key cannot be an object and a folder of others; choose another key")
        return StoreUnreachableError(
            f"{cause}; see whether the file system is healthy, then run the same command again"
        )

    def _has_some(self, folder: Path) -> bool:
        """Whether a folder has any object: deleting its objects leaves it empty."""
        return next(self._walk(folder, "", ""), None) is not None

    def _walk(self, folder: Path, parent: str, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        with self._speaking("list", prefix):
            try:
                with os.scandir(folder) as entries:
                    by_name = sorted((f"{e.name}/" if self._is_folder(e) else e.name, e) for e in entries)
            except (FileNotFoundError, NotADirectoryError) as error:
                self._require_folder(error)
                return
            for name, entry in by_name:
                key = parent + name
                if name.startswith(".") or not (key.startswith(prefix) or prefix.startswith(key)):
                    continue
                if key <= after and not after.startswith(key):
                    continue
                if name.endswith("/"):
                    yield from self._walk(folder / entry.name, key, prefix, after)
                elif key > after and key.startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                        yield info(key, entry.stat(follow_symlinks=False))
