"""A store in memory, with the conditional semantics of a real one, and hooks for simulations and watchers.

It passes the contract tests of every store (`test_bucket` runs them). Every read sees every earlier write. A listing
consists of pages that are read one after another, as from S3.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from holdfast.spec.errors import DataError, MissingError
from holdfast.store.interface import (
    STALE_SECONDS,
    WHOLE_BYTES,
    Buffer,
    ConflictError,
    Data,
    ObjectInfo,
    Read,
)
from holdfast.store.payload import (
    check_key,
    check_prefix,
    check_range,
    content_digest,
    too_large,
    views,
)

T = TypeVar("T")

MAX_READS = 4  # concurrent reads of `read_many`


@dataclass(frozen=True)
class Stored:
    """An object in the bucket."""

    data: bytes
    modified: float
    version: int

    @property
    def tag(self) -> str:
        """The value that a conditional write compares: a tag of the content, as S3's entity tag."""
        return content_digest(views(self.data))


Watcher = Callable[[str, Stored | None, Stored | None], None]  # key, former object, current object


class Bucket:
    """The objects, shared by all connections. `watchers` are called after every change."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.objects: dict[str, Stored] = {}
        self.keys: list[str] = []  # sorted
        self.watchers: list[Watcher] = []
        self._clock, self._versions = clock, itertools.count(1)

    def write(self, key: str, data: bytes) -> Stored:
        """Put an object unconditionally."""
        before, after = self.objects.get(key), Stored(data, self._clock(), next(self._versions))
        if before is None:
            insort(self.keys, key)
        self.objects[key] = after
        self._tell(key, before, after)
        return after

    def remove(self, key: str) -> None:
        """Remove an object if it exists."""
        before = self.objects.pop(key, None)
        if before is not None:
            del self.keys[bisect_left(self.keys, key)]
            self._tell(key, before, None)

    def page(self, prefix: str, after: str, size: int) -> list[ObjectInfo]:
        """Up to `size` objects under a prefix, with keys after `after`."""
        first = bisect_right(self.keys, after) if after >= prefix else bisect_left(self.keys, prefix)
        keys = itertools.takewhile(lambda key: key.startswith(prefix), self.keys[first : first + size])
        return [info_of(key, self.objects[key]) for key in keys]

    def copy(self) -> Bucket:
        """The same objects in another bucket without watchers."""
        other = Bucket(self._clock)
        other.objects, other.keys, other._versions = dict(self.objects), list(self.keys), itertools.count(1 << 40)
        return other

    def _tell(self, key: str, before: Stored | None, after: Stored | None) -> None:
        for watch in self.watchers:
            watch(key, before, after)


def info_of(key: str, stored: Stored) -> ObjectInfo:
    """What the store says about an object."""
    return ObjectInfo(key, len(stored.data), stored.modified, str(stored.version))


class MemoryStore:
    """A connection to a bucket. In `_request`, a simulation can let time pass and inject faults."""

    def __init__(self, bucket: Bucket, page: int = 1000) -> None:
        self.bucket, self._page = bucket, page

    @property
    def url(self) -> str:
        """A root that no other process can open."""
        return "s3://memory"

    def _request(self, operation: str, key: str, effect: Callable[[], T], again: Callable[[], T] | None = None) -> T:
        """The outcome of `effect`, which is atomic. `again` runs if an earlier try may have been applied without a
        reply.
        """
        return effect()

    def put(self, key: str, data: Data) -> None:
        """See `Store`."""
        content = _joined(check_key(key), data)
        self._request("put", key, lambda: self._write(key, content))

    def put_if_absent(self, key: str, data: Data) -> bool:
        """See `Store`."""
        content = _joined(check_key(key), data)

        def effect() -> bool:
            if (stored := self.bucket.objects.get(key)) is not None:
                return stored.data == content
            self._write(key, content)
            return True

        return self._request("put_if_absent", key, effect)

    def compare_and_swap(self, key: str, data: Data, expected: str | None) -> str:
        """See `Store`."""
        content = _joined(check_key(key), data)

        def effect() -> str:
            stored = self.bucket.objects.get(key)
            tag = stored.tag if stored else None
            if tag != expected:
                raise ConflictError(f"{key}: version is {tag or 'absent'}, not {expected or 'absent'}; read it again")
            if stored is not None and expected is None:
                raise ConflictError(f"{key}: exists although it was expected absent; read it and decide anew")
            return self._write(key, content).tag

        def again() -> str:
            stored = self.bucket.objects.get(key)
            return stored.tag if stored is not None and stored.data == content else effect()

        return self._request("compare_and_swap", key, effect, again)

    def get(self, key: str, start: int = 0, length: int | None = None, *, most: int = WHOLE_BYTES) -> bytes:
        """See `Store`."""
        content = self._get("get", key, start, length)
        if length is None and len(content) > most:
            raise too_large(key, len(content), most)
        return content

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Store`."""
        target = target.cast("B")
        target[:] = self._get("read_into", key, start, target.nbytes)

    def read_many(self, reads: Iterable[Read]) -> None:
        """See `Store`. A few reads are drawn at a time; `_order` gives the order of their replies."""
        source = iter(reads)
        while batch := list(itertools.islice(source, MAX_READS)):
            failures: dict[int, Exception] = {}
            for number in self._order(len(batch)):
                try:
                    self.read_into(batch[number].key, batch[number].start, batch[number].target)
                    batch[number].use()
                except Exception as failure:  # noqa: BLE001 - the earliest is raised
                    failures[number] = failure
            if failures:
                raise failures[min(failures)]

    def get_versioned(self, key: str, *, most: int = WHOLE_BYTES) -> tuple[bytes, str]:
        """See `Store`."""
        check_key(key)

        def effect() -> tuple[bytes, str]:
            stored = self._there("get_versioned", key)
            if len(stored.data) > most:
                raise too_large(key, len(stored.data), most)
            return self._read(key, 0, stored.data), stored.tag

        return self._request("get_versioned", key, effect)

    def stat(self, key: str) -> ObjectInfo | None:
        """See `Store`."""
        check_key(key)

        def effect() -> ObjectInfo | None:
            stored = self.bucket.objects.get(key)
            return None if stored is None else info_of(key, stored)

        return self._request("stat", key, effect)

    def folders(self, prefix: str) -> Iterator[str]:
        """See `Store`."""
        parent = check_prefix(prefix).rpartition("/")[0]
        names = (info.key.removeprefix(f"{parent}/" if parent else "") for info in self.list(prefix))
        return iter(dict.fromkeys(name.partition("/")[0] for name in names if "/" in name and name[0] != "."))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """See `Store`."""
        check_prefix(prefix)
        while True:
            page = self._request("list", prefix, partial(self.bucket.page, prefix, after, self._page))
            yield from page
            if len(page) < self._page:
                return
            after = page[-1].key

    def delete(self, key: str) -> None:
        """See `Store`."""
        self.delete_many([key])

    def delete_many(self, keys: Sequence[str]) -> None:
        """See `Store`."""
        for key in keys:
            check_key(key)
        for key in keys:  # not atomic, so one request per key
            self._request("delete", key, partial(self.bucket.remove, key))

    def end_abandoned(self, folder: str, older_than: float = STALE_SECONDS) -> int:
        """See `Store`: no upload is ever unfinished here."""
        return 0

    def put_stream(self, key: str, size: int, content: Callable[[], Iterator[Buffer]]) -> None:
        """See `Store`."""
        check_key(key)
        data = b"".join(bytes(chunk) for chunk in content())
        if len(data) != size:
            how = f"ends after {len(data)}" if len(data) < size else "extends beyond them"
            raise DataError(f"{key}: {size} bytes were to be written, and what makes them {how}")
        self.put(key, data)

    def upload(self, path: Path, key: str) -> None:
        """See `Store`."""
        check_key(key)
        if not path.is_file():
            raise MissingError(f"upload: {path}: no such file")
        self.put(key, path.read_bytes())

    def download(self, key: str, path: Path) -> None:
        """See `Store`."""
        content = self.get(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def local_path(self, key: str) -> Path | None:
        """See `Store`."""
        check_key(key)
        return None

    def _get(self, operation: str, key: str, start: int, length: int | None) -> bytes:
        check_range(start, length)
        check_key(key)

        def effect() -> bytes:
            data = self._there(operation, key).data
            end = len(data) if length is None else start + length
            if max(start, end) > len(data):
                raise DataError(f"{key}: has {len(data)} bytes, and bytes {start} to {end} were requested")
            return self._read(key, start, data[start:end])

        return self._request(operation, key, effect)

    def _order(self, count: int) -> Sequence[int]:
        """The order of the replies to concurrent reads."""
        return range(count)

    def _write(self, key: str, content: bytes) -> Stored:
        return self.bucket.write(key, content)

    def _read(self, key: str, start: int, data: bytes) -> bytes:
        """The bytes at `start` as a reader sees them."""
        return data

    def _there(self, operation: str, key: str) -> Stored:
        stored = self.bucket.objects.get(key)
        if stored is None:
            raise MissingError(f"{operation} {key}: no such object in {self.url}")
        return stored


def _joined(key: str, data: Data) -> bytes:
    return b"".join(views(data))
