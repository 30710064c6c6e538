"""The interface of the store, and the guarantees of each operation.

Every operation is atomic: a reader sees a whole object or none. It has a deadline with bounded, jittered retries of
retryable failures, and its errors name the key and the attempt. The errors, all from `holdfast.spec.errors`, are
MissingError (no such object), StoreUnreachableError (deadline passed), AccessDeniedError and NoSpaceError.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.spec.errors import DataError, HoldfastError

Buffer = bytes | bytearray | memoryview
Data = Buffer | Sequence[Buffer]  # several buffers are written one after another, without joining them first


WHOLE_BYTES = 2**30  # the largest object that is read whole, unless the caller sets another bound
STALE_SECONDS = 24 * 3600.0  # an unfinished write untouched for this long belongs to a dead writer


class ConflictError(HoldfastError):
    """The object is not what the caller of a conditional write expected."""


class TooLargeError(DataError):
    """An object is larger than its reader accepts; nothing of it was read."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object in the store."""

    key: str
    size: int  # bytes
    modified: float  # Unix seconds, by the store's clock
    version: str  # opaque, changes with the content; `compare_and_swap` takes that of `get_versioned`


@dataclass(frozen=True)
class Read:
    """A requested range of an object: the bytes from `start` fill `target`, then the thread that filled it
    calls `use`."""

    key: str
    start: int
    target: memoryview
    use: Callable[[], None] = lambda: None


class Store(Protocol):
    """Objects by key. Keys are relative, with `/` between parts; `..`, empty parts and a leading `/` are refused."""

    @property
    def url(self) -> str:
        """The root, without credentials: file:///path or s3://bucket/prefix."""

    def put(self, key: str, data: Data) -> None:
        """Write an object, replacing any former one."""

    def put_if_absent(self, key: str, data: Data) -> bool:
        """Write an object unless the key is taken. True if the object now holds exactly `data`, written by this call or
        by an earlier one whose answer was lost. False if it holds something else. It is one request, which a bucket
        accepts up to 5 GiB."""

    def compare_and_swap(self, key: str, data: Data, expected: str | None) -> str:
        """Replace an object whose version is `expected` (None: absent) and return the new version. Raises ConflictError
        otherwise."""

    def get(self, key: str, start: int = 0, length: int | None = None, *, most: int = WHOLE_BYTES) -> bytes:
        """Read an object, or `length` bytes of it from `start`. Raises DataError if it is shorter than that. Without a
        length, raises TooLargeError for more than `most` bytes, before a buffer is allocated."""

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fill `target` with the object's bytes from `start`. Raises DataError if the object is too short."""

    def read_many(self, reads: Iterable[Read]) -> None:
        """Carry out many reads concurrently: one result is used (verified, copied) while other reads are in flight.
        Reads are drawn as threads become free and finish in any order, so a generator that allocates their targets
        bounds the memory. Raises as `read_into` does, or what a `use` raises: the error of the earliest read that
        failed."""

    def get_versioned(self, key: str, *, most: int = WHOLE_BYTES) -> tuple[bytes, str]:
        """Read a whole object together with the version that `compare_and_swap` expects. Raises as `get` does."""

    def stat(self, key: str) -> ObjectInfo | None:
        """The metadata of an object, without reading it; None if it does not exist."""

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key begins with `prefix` and comes after the key `after`, in the order of their keys.
        Unfinished writes do not show. A bucket is listed lazily, a thousand keys per request."""

    def folders(self, prefix: str) -> Iterator[str]:
        """The names of the folders whose path begins with `prefix`, in order, at a cost that does not depend on their
        content. `runs/` lists all runs, `runs/3f` those whose name begins with 3f. A bucket returns a thousand in one
        request."""

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is fine."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove several objects, with few requests; missing ones are fine. Not atomic: after an error some of them are
        gone."""

    def end_abandoned(self, folder: str, older_than: float = STALE_SECONDS) -> int:
        """End unfinished writes below `folder` that began more than `older_than` seconds ago. Killed writers leave
        them: no listing shows them, and a bucket charges for them. A bucket may have other users, so a folder is
        required, and nothing outside of it is touched. Bounded and best effort. Returns the number of ended writes."""

    def put_stream(self, key: str, size: int, content: Callable[[], Iterator[Buffer]]) -> None:
        """Write an object of `size` bytes while they are produced, replacing any former one. At most a few hundred MiB
        of it are in memory. `content` yields the bytes in order; it is called again when an upload has to restart.
        Raises DataError for another number of bytes, and any error of `content`; then nothing is written."""

    def upload(self, path: Path, key: str) -> None:
        """Copy a local file into the store, streaming."""

    def download(self, key: str, path: Path) -> None:
        """Copy an object to a local file, streaming; the file appears only when it is whole."""

    def local_path(self, key: str) -> Path | None:
        """The object's file on this machine, for memory mapping; None if it has none."""
