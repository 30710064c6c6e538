"""The store in an S3 bucket: Amazon's, or any server that speaks S3 and honors conditional writes.

The guarantees equal those of the folder: whole objects or none, and conditional writes with exactly one winner even
when replies are lost. Lengths are verified. Retries are bounded and replace botocore's, which are off. Large objects
move in concurrent parts, each with its own deadline. `requests` handles connections, credentials and retries.
"""

import contextlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from holdfast.spec.errors import DataError, MissingError, StoreRefusedError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.store import parallel as parts
from holdfast.store.durable import Content, Stream
from holdfast.store.interface import STALE_SECONDS, WHOLE_BYTES, Data, ObjectInfo, Read
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
    views,
    window,
)
from holdfast.store.s3.reads import Reads
from holdfast.store.s3.requests import PreconditionError, Requests
from holdfast.store.s3.writes import WRITER, Write, Writes, write_of

COMPARE_BYTES = 8 * 2**20
DIGEST = "holdfast-blake3"  # metadata of conditional writes


class S3Store:
    """Objects under `prefix` in `bucket`. `deadline`: seconds that one request may take, all retries included."""

    def __init__(self, bucket: str, prefix: str = "", *, deadline: float = 60.0) -> None:
        self.bucket = bucket
        self.prefix = f"{check_key(prefix.strip('/'))}/" if prefix.strip("/") else ""
        self._request = Requests(bucket, self.url, deadline)
        self._reads = Reads(self._request, bucket, self.prefix, self.url)
        self._writes = Writes(self._request, self._reads, bucket, self.prefix, self.url)
        self._conditions = Conditions(self._reads, self._writes, self.url, self._request.server)

    @property
    def url(self) -> str:
        """The root: s3://bucket/prefix."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def put(self, key: str, data: Data) -> None:
        """Write an object, replacing any former one."""
        self._writes.write(write_of("put", key, views(data)))

    def put_if_absent(self, key: str, data: Data) -> bool:
        """Write an object unless the key is taken; True if it now holds exactly `data`."""
        pieces = views(data)
        writer = uuid.uuid4().hex
        # The digest of a large object would cost as much as sending it. Reading the object when the key is taken costs
        # no more.
        digest = {DIGEST: content_digest(pieces)} if size_of(pieces) <= COMPARE_BYTES else {}
        job = write_of("put_if_absent", key, pieces, {"IfNoneMatch": "*"}, {WRITER: writer, **digest})
        self._conditions.require()
        if job.size > parts.PART_BYTES and self.stat(key) is not None:
            return self._holds(key, pieces, writer)
        try:
            self._writes.write(job)
        except PreconditionError:
            return self._holds(key, pieces, writer)
        return True

    def compare_and_swap(self, key: str, data: Data, expected: str | None) -> str:
        """Replace an object whose version is `expected` (None: absent); the version is the entity tag."""
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        writer = uuid.uuid4().hex
        job = write_of("compare_and_swap", key, views(data), condition, {WRITER: writer})
        self._conditions.require()
        try:
            return self._writes.put_whole(job)
        except PreconditionError:
            head = self._reads.head("compare_and_swap", key)
            if head is not None and head["Metadata"].get(WRITER) == writer:
                return str(head["ETag"])  # an earlier attempt of this very call was applied and its reply lost
            raise conflict(key, head["ETag"] if head else None, expected) from None

    def get(self, key: str, start: int = 0, length: int | None = None, *, most: int = WHOLE_BYTES) -> bytes:
        """Read an object, or `length` bytes of it from `start`."""
        check_range(start, length)
        if length is not None:
            return filled(length, lambda view: self.read_into(key, start, view))
        return self._reads.from_start("get", check_key(key), start, most)[0]

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fill `target` with the object's bytes from `start`."""
        check_range(start, None)
        self._reads.fill("read_into", check_key(key), start, target.cast("B"))

    def read_many(self, reads: Iterable[Read]) -> None:
        """Carry out many reads concurrently."""
        read_many(self.read_into, reads)

    def get_versioned(self, key: str, *, most: int = WHOLE_BYTES) -> tuple[bytes, str]:
        """Read a whole object together with the version that `compare_and_swap` expects."""
        return self._reads.from_start("get_versioned", check_key(key), 0, most)

    def stat(self, key: str) -> ObjectInfo | None:
        """The metadata of an object, without reading it; None if it does not exist."""
        return self._reads.stat(check_key(key))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key begins with `prefix` and comes after `after`, in the order of their keys."""
        return self._reads.pages(self.prefix + check_prefix(prefix), prefix, after)

    def folders(self, prefix: str) -> Iterator[str]:
        """The names of the folders whose path begins with `prefix`, in order."""
        return self._reads.folders(self.prefix + check_prefix(prefix), prefix)

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is fine."""
        self._writes.delete([check_key(key)])

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove several objects, a thousand in a request."""
        self._writes.delete([check_key(key) for key in keys])

    def end_abandoned(self, folder: str, older_than: float = STALE_SECONDS) -> int:
        """End multipart uploads below `folder` whose writer died."""
        return self._writes.end_abandoned(check_folder(folder), older_than)

    def put_stream(self, key: str, size: int, content: Content) -> None:
        """Write an object while its bytes are produced, with only a few parts in memory."""
        self._writes.write(Write("put_stream", check_key(key), size, Stream(key, size, content).part))

    def upload(self, path: Path, key: str) -> None:
        """Copy a local file into the store, streaming, with only a few parts in memory."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MissingError(f"upload {key}: {path}: no such file") from None
        try:

            def part(start: int, length: int) -> Pieces:
                data = os.pread(descriptor, length, start)
                if len(data) != length:
                    raise DataError(f"upload {key}: {path} became shorter while it was read; let nothing else write it")
                return views(data)

            self._writes.write(Write("upload", check_key(key), os.fstat(descriptor).st_size, part))
        finally:
            os.close(descriptor)

    def download(self, key: str, path: Path) -> None:
        """Copy an object to a local file, streaming; the file appears only when it is whole."""
        head = self._reads.head("download", check_key(key))
        if head is None:
            raise MissingError(f"download {key}: no such object in {self.url}")
        fill = partial(self._reads.fill, "download", key, version=head["ETag"])
        parts.download(path, key, head["ContentLength"], fill)

    def local_path(self, key: str) -> Path | None:
        """None: an object in a bucket has no file on this machine."""
        check_key(key)
        return None

    def _holds(self, key: str, pieces: Pieces, writer: str) -> bool:
        """Whether the object has exactly these bytes: by its writer or its recorded digest, else by reading it."""
        head = self._reads.head("put_if_absent", key)
        if head is None or head["ContentLength"] != size_of(pieces):
            return False
        if head["Metadata"].get(WRITER) == writer:
            return True  # the reply was lost
        if (recorded := head["Metadata"].get(DIGEST)) is not None:
            return bool(recorded == content_digest(pieces))
        for start in range(0, size_of(pieces), COMPARE_BYTES):
            expected = b"".join(window(pieces, start, COMPARE_BYTES))
            stored = memoryview(bytearray(len(expected)))
            self._reads.fill("put_if_absent", key, start, stored, head["ETag"])
            if stored != expected:
                return False
        return True


# A test that a server honors conditional writes, on which the single ownership of a run rests.
#
# Some servers ignore the conditions. Others honor them for one writer and lose them when several write concurrently. So
# sixteen writers race for each kind of conditional write that a commit uses, and exactly one may win. The result is
# remembered in the store, by the server's name and version, and in this process.

WRITERS = 16
TOGETHER_SECONDS = 10.0  # how long the writers wait for each other
PROBES = ".holdfast/probes"
ANSWER = ".holdfast/conditional-writes.json"

Condition = Mapping[str, str]

_known: set[str] = set()  # servers that passed, of this process


class Conditions:
    """The conditional writes of one store."""

    def __init__(self, reads: Reads, writes: Writes, url: str, server: Callable[[], tuple[str, str]]) -> None:
        """`server` gives the server's address and its name."""
        self._reads, self._writes, self._url, self._server = reads, writes, url, server
        self._hold = False

    def require(self) -> None:
        """Refuse a server on which two writers could both win, before the first conditional write of this process.
        Raises StoreRefusedError."""
        if self._hold:
            return
        place, name = self._server()
        server = f"{place} {name}"
        if server not in _known and self._remembered() != name:
            self._race("put if absent (If-None-Match)", {"IfNoneMatch": "*"})
            self._race("replace if unchanged (If-Match)", None)
            self._writes.put_whole(_write(ANSWER, json.dumps({"server": name, "writers": WRITERS}).encode()))
        _known.add(server)
        self._hold = True

    def _remembered(self) -> str | None:
        """The name of the server when it passed."""
        try:
            answer = parse_json_object(self._reads.from_start("probe", ANSWER, 0)[0], ANSWER)
            return str(answer["server"])
        except (MissingError, DataError, KeyError):
            return None

    def _race(self, kind: str, condition: Condition | None) -> None:
        """Write one key sixteen times concurrently. `condition` of each; None: the object must be the previous one."""
        key = f"{PROBES}/{uuid.uuid4().hex}"
        before = None
        if condition is None:
            before = self._writes.put_whole(_write(key, b"before"))
            condition = {"IfMatch": before}
        start = threading.Barrier(WRITERS)

        def write(number: int) -> bool:
            with contextlib.suppress(threading.BrokenBarrierError):
                start.wait(TOGETHER_SECONDS)
            try:
                self._writes.put_whole(_write(key, b"writer %d" % number, condition))
            except PreconditionError:
                return False
            return True

        with ThreadPoolExecutor(WRITERS, thread_name_prefix="holdfast-probe") as pool:
            winners = sum(pool.map(write, range(WRITERS)))
        head = self._reads.head("probe", key)
        self._writes.delete([key])
        if winners == 0 and head is not None and head["ETag"] != before:
            winners = 1  # its reply was lost, but its write was applied
        if winners != 1:
            raise StoreRefusedError(
                f"{self._url}: this S3 does not hold conditional writes: of {WRITERS} writers that {kind} "
                f"concurrently, {winners} won instead of one, so two attempts could both own a run; upgrade the "
                "server, or name another store"
            )


def _write(key: str, content: bytes, condition: Condition | None = None) -> Write:
    return Write("probe", key, len(content), lambda *_: views(content), condition or {})
