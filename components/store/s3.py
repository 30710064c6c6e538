"""The store in an S3 bucket: Amazon's, or any server that speaks S3 and honours conditional writes.

Promises the same as the folder: whole objects or none, conditional writes with exactly one winner even when replies are
lost, lengths verified, bounded retries of its own (botocore's are off). Large objects move in parts, several at once,
each with its own deadline. Leaves connections, credentials and retries to `s3_requests`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from holdfast.components.spec.errors import DataError, HoldfastError, MissingError, StoreUnreachableError
from holdfast.components.store.file import whole_file
from holdfast.components.store.interface import ConflictError, Data, ObjectInfo
from holdfast.components.store.payload import (
    PieceReader,
    Pieces,
    check_key,
    check_prefix,
    check_range,
    content_digest,
    size_of,
    views,
    window,
)
from holdfast.components.store.retry import RetryableError
from holdfast.components.store.s3_requests import OutOfRangeError, PreconditionError, Requests, S3Client

PART_BYTES = 32 * 2**20  # larger objects move in parts of this size...
MOST_PARTS = 10_000  # ...or of a larger one, for S3 takes no more parts than this
PARALLEL_PARTS = 8
UPLOADS = 3  # a multipart upload that the store loses is sent so often
COMPARE_BYTES = 8 * 2**20
PAGE_KEYS = 1000  # of a listing; the most that S3 gives at once
DIGEST, WRITER = "holdfast-blake3", "holdfast-writer"  # metadata of conditional writes
PROBE = ".holdfast/conditional-writes"

Result = TypeVar("Result")


class _UploadLostError(Exception):
    """A multipart upload is gone and the object is not there: it must be sent again."""


@dataclass(frozen=True)
class _Write:
    """One object to write: `part(start, length)` gives its bytes."""

    operation: str
    key: str
    size: int
    part: Callable[[int, int], Pieces]
    condition: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


class S3Store:
    """Objects under `prefix` in `bucket`. `deadline`: seconds that one request may take, all retries included."""

    def __init__(self, bucket: str, prefix: str = "", *, deadline: float = 60.0) -> None:
        self.bucket = bucket
        self.prefix = f"{check_key(prefix.strip('/'))}/" if prefix.strip("/") else ""
        self._request = Requests(bucket, self.url, deadline)
        self._conditions_hold = False
        self._bucket_exists = False

    @property
    def url(self) -> str:
        """The root: s3://bucket/prefix."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def put(self, key: str, data: Data) -> None:
        """Write an object, replacing what was there."""
        self._write(_write_of("put", key, views(data)))

    def put_if_absent(self, key: str, data: Data) -> bool:
        """Write an object unless the key is taken; True if it now holds exactly `data`."""
        pieces = views(data)
        job = _write_of("put_if_absent", key, pieces, {"IfNoneMatch": "*"}, {DIGEST: content_digest(pieces)})
        self._require_conditional_writes()
        if job.size > PART_BYTES and self.stat(key) is not None:
            return self._holds(key, pieces)
        try:
            self._write(job)
        except PreconditionError:
            return self._holds(key, pieces)
        return True

    def compare_and_swap(self, key: str, data: Data, expected: str | None) -> str:
        """Replace an object whose version is `expected` (None: absent); the version is the entity tag."""
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        writer = uuid.uuid4().hex
        job = _write_of("compare_and_swap", key, views(data), condition, {WRITER: writer})
        self._require_conditional_writes()
        try:
            return self._put_whole(job)
        except PreconditionError:
            head = self._head("compare_and_swap", key)
            if head is not None and head["Metadata"].get(WRITER) == writer:
                return str(head["ETag"])  # an earlier attempt of this very call was applied and its reply lost
            current = head["ETag"] if head else "absent"
            raise ConflictError(
                f"{key}: version is {current}, not {expected or 'absent'}: another writer was first; "
                "read it again and decide anew"
            ) from None

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Read an object, or `length` bytes of it from `start`."""
        check_range(start, length)
        if length is not None:
            target = bytearray(length)
            self.read_into(key, start, memoryview(target))
            return bytes(target)
        return self._read_from("get", check_key(key), start)[0]

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fill `target` with the object's bytes from `start`."""
        check_range(start, None)
        self._fill("read_into", check_key(key), start, target.cast("B"))

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        """Read a whole object together with the version that `compare_and_swap` expects."""
        return self._read_from("get_versioned", check_key(key), 0)

    def stat(self, key: str) -> ObjectInfo | None:
        """What is known about an object without reading it; None if there is none."""
        head = self._head("stat", check_key(key))
        if head is None:
            return None
        return ObjectInfo(key, head["ContentLength"], head["LastModified"].timestamp(), head["ETag"])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key begins with `prefix`, in the order of their keys."""
        return self._pages(self.prefix + check_prefix(prefix), prefix)

    def delete(self, key: str) -> None:
        """Remove an object; removing what is not there is fine."""
        full = self.prefix + check_key(key)
        self._request("delete", key, lambda s3: s3.delete_object(Bucket=self.bucket, Key=full))

    def upload(self, path: Path, key: str) -> None:
        """Copy a local file into the store, streaming: at most PARALLEL_PARTS parts are in memory."""
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

            self._write(_Write("upload", check_key(key), os.fstat(descriptor).st_size, part))
        finally:
            os.close(descriptor)

    def download(self, key: str, path: Path) -> None:
        """Copy an object to a local file, streaming; the file appears only when it is whole."""
        head = self._head("download", check_key(key))
        if head is None:
            raise MissingError(f"download {key}: no such object in {self.url}")
        size, version = head["ContentLength"], head["ETag"]
        with whole_file(path, key) as descriptor:
            os.truncate(descriptor, size)

            def fetch(start: int) -> None:
                block = memoryview(bytearray(min(PART_BYTES, size - start)))
                self._fill("download", key, start, block, version)
                while block.nbytes:
                    written = os.pwrite(descriptor, block, start)
                    start, block = start + written, block[written:]

            _in_parallel(fetch, range(0, size, PART_BYTES))

    def local_path(self, key: str) -> Path | None:
        """None: an object in a bucket does not lie on this machine."""
        check_key(key)
        return None

    # --- writing ---

    def _write(self, job: _Write) -> None:
        """Write at once or in parts. Raises PreconditionError."""
        if job.size <= PART_BYTES:
            self._put_whole(job)
            return
        for _ in range(UPLOADS):
            with contextlib.suppress(_UploadLostError):
                self._put_parts(job)
                return
        raise StoreUnreachableError(
            f"{job.operation} {job.key} in {self.url}: the store gave up {UPLOADS} uploads in their last step; "
            "run the same command again"
        )

    def _put_whole(self, job: _Write) -> str:
        """One request; returns the entity tag. Raises PreconditionError."""
        name = {"Bucket": self.bucket, "Key": self.prefix + job.key, "Metadata": job.metadata}
        pieces = job.part(0, job.size)

        def send(s3: S3Client) -> str:
            return str(s3.put_object(**name, **job.condition, Body=_body(pieces))["ETag"])

        return self._request(job.operation, job.key, send, conditional=bool(job.condition))

    def _put_parts(self, job: _Write) -> None:
        """A multipart upload; the object appears when it is completed. Raises PreconditionError, _UploadLostError."""
        name = {"Bucket": self.bucket, "Key": self.prefix + job.key}
        writer = uuid.uuid4().hex
        metadata = {**job.metadata, WRITER: writer}
        checksum = self._checksum()
        upload = self._request(
            job.operation, job.key, lambda s3: s3.create_multipart_upload(**name, Metadata=metadata, **checksum)
        )
        name["UploadId"] = upload["UploadId"]
        length = max(PART_BYTES, -(-job.size // MOST_PARTS))

        def send(start: int) -> dict[str, Any]:
            number = start // length + 1
            pieces = job.part(start, min(length, job.size - start))
            reply = self._request(
                f"{job.operation} (part {number})",
                job.key,
                lambda s3: s3.upload_part(**name, PartNumber=number, Body=_body(pieces), **checksum),
            )
            return {"PartNumber": number, **{k: v for k, v in reply.items() if k in ("ETag", "ChecksumCRC32")}}

        def complete(s3: S3Client) -> None:
            from botocore.exceptions import ClientError

            from holdfast.components.store.s3_errors import status_of

            try:
                s3.complete_multipart_upload(**name, **job.condition, MultipartUpload={"Parts": parts})
            except ClientError as error:
                if status_of(error) not in (404, 409):
                    raise
                # Either an earlier attempt was applied and its reply lost, or the store gave the upload up.
                head = self._head(job.operation, job.key)
                if head is None or head["Metadata"].get(WRITER) != writer:
                    raise _UploadLostError from None

        try:
            parts = _in_parallel(send, range(0, job.size, length))
            self._request(f"{job.operation} (last step)", job.key, complete, conditional=bool(job.condition))
        except BaseException:
            with contextlib.suppress(HoldfastError):
                self._request("abort", job.key, lambda s3: s3.abort_multipart_upload(**name))
            raise

    def _checksum(self) -> dict[str, str]:
        """A checksum of every part, unless the AWS configuration switched them off."""
        wanted = self._request.client().meta.config.request_checksum_calculation == "when_supported"
        return {"ChecksumAlgorithm": "CRC32"} if wanted else {}

    def _holds(self, key: str, pieces: Pieces) -> bool:
        """Whether the object has exactly these bytes: by its recorded digest, else by reading it."""
        head = self._head("put_if_absent", key)
        if head is None or head["ContentLength"] != size_of(pieces):
            return False
        if (recorded := head["Metadata"].get(DIGEST)) is not None:
            return bool(recorded == content_digest(pieces))
        for start in range(0, size_of(pieces), COMPARE_BYTES):
            here = b"".join(window(pieces, start, COMPARE_BYTES))
            there = memoryview(bytearray(len(here)))
            self._fill("put_if_absent", key, start, there, head["ETag"])
            if there != here:
                return False
        return True

    def _require_conditional_writes(self) -> None:
        """Once: refuse a server that ignores `If-None-Match`, on which two attempts could both own a run."""
        if self._conditions_hold:
            return
        content = views(b"holdfast")
        probe = _Write("probe", PROBE, size_of(content), lambda *_: content, {"IfNoneMatch": "*"})
        for _ in range(2):  # the first finds the probe absent only when the store is new
            try:
                self._put_whole(probe)
            except PreconditionError:
                self._conditions_hold = True
                return
        raise HoldfastError(
            f"{self.url}: this S3 ignores conditional writes (If-None-Match), without which two attempts could both "
            "own a run; upgrade the server, or name another store"
        )

    # --- reading ---

    def _read_from(self, operation: str, key: str, start: int) -> tuple[bytes, str]:
        """Everything from `start`, and the entity tag. What is over one part is fetched in parallel."""
        wanted = {"Range": f"bytes={start}-"} if start else {}

        def fetch(s3: S3Client) -> tuple[bytearray, str]:
            reply = s3.get_object(Bucket=self.bucket, Key=self.prefix + key, **wanted)
            content = bytearray(reply["ContentLength"])
            _receive(reply["Body"], memoryview(content)[:PART_BYTES], whole=len(content) <= PART_BYTES)
            return content, reply["ETag"]

        try:
            content, version = self._request(operation, key, fetch)
        except OutOfRangeError:
            info = self.stat(key)
            if info is not None and info.size == start:
                return b"", info.version
            raise self._too_short(key, info.size if info else 0, start, 0) from None
        rest = memoryview(content)[PART_BYTES:]
        if rest.nbytes:
            self._fill(operation, key, start + PART_BYTES, rest, version)
        return bytes(content), version

    def _fill(self, operation: str, key: str, start: int, target: memoryview, version: str | None = None) -> None:
        """Fill `target` from `start`, in parallel parts when it is large; all of one version of the object."""
        if not target.nbytes:
            info = self.stat(key)
            if info is None:
                raise MissingError(f"{operation} {key}: no such object in {self.url}")
            if start > info.size:
                raise self._too_short(key, info.size, start, 0)
            return
        if target.nbytes > PART_BYTES:
            first = target[:PART_BYTES]
            version = self._fill_part(operation, key, start, first, version)

            def fetch(offset: int) -> None:
                self._fill_part(operation, key, start + offset, target[offset : offset + PART_BYTES], version)

            _in_parallel(fetch, range(PART_BYTES, target.nbytes, PART_BYTES))
        else:
            self._fill_part(operation, key, start, target, version)

    def _fill_part(self, operation: str, key: str, start: int, target: memoryview, version: str | None) -> str:
        """One ranged request; returns the entity tag."""
        same = {"IfMatch": version} if version else {}

        def fetch(s3: S3Client) -> str:
            reply = s3.get_object(
                Bucket=self.bucket,
                Key=self.prefix + key,
                Range=f"bytes={start}-{start + target.nbytes - 1}",
                **same,
            )
            if "ContentRange" not in reply:
                raise RetryableError("the server ignored the range")
            size = int(reply["ContentRange"].rpartition("/")[2])
            if start + target.nbytes > size:
                reply["Body"].close()
                raise self._too_short(key, size, start, target.nbytes)
            _receive(reply["Body"], target)
            return reply["ETag"]

        try:
            return self._request(operation, key, fetch, conditional=bool(same))
        except PreconditionError:
            raise ConflictError(f"{operation} {key}: was replaced while it was read; read it again") from None
        except OutOfRangeError:
            info = self.stat(key)
            raise self._too_short(key, info.size if info else 0, start, target.nbytes) from None

    def _too_short(self, key: str, size: int, start: int, length: int) -> DataError:
        return DataError(
            f"{key}: has {size} bytes, and bytes {start} to {start + length} were asked for; it is truncated or "
            "not the object that was meant"
        )

    def _head(self, operation: str, key: str) -> Any | None:
        """The reply to a HEAD; None if there is no such object."""
        full = self.prefix + key
        try:
            return self._request(operation, key, lambda s3: s3.head_object(Bucket=self.bucket, Key=full))
        except MissingError:
            self._require_bucket(operation, key)
            return None

    def _require_bucket(self, operation: str, key: str) -> None:
        """Once: a HEAD cannot say what is missing, and a wrong bucket must not pass for an absent object."""
        if self._bucket_exists:
            return
        try:
            self._request(operation, key, lambda s3: s3.head_bucket(Bucket=self.bucket))
        except MissingError:
            from holdfast.components.store.s3_errors import no_such_bucket

            raise no_such_bucket(f"{operation} {key} in {self.url}", self.bucket) from None
        self._bucket_exists = True

    def _pages(self, full: str, prefix: str) -> Iterator[ObjectInfo]:
        more: dict[str, Any] = {}
        while True:
            page = functools.partial(self._page, full, more)
            reply = self._request("list", prefix or "(everything)", page)
            for entry in reply.get("Contents", ()):
                key = entry["Key"].removeprefix(self.prefix)
                if not key.startswith("."):
                    yield ObjectInfo(key, entry["Size"], entry["LastModified"].timestamp(), entry["ETag"])
            if not reply["IsTruncated"]:
                return
            more = {"ContinuationToken": reply["NextContinuationToken"]}

    def _page(self, full: str, more: dict[str, str], s3: S3Client) -> Any:
        return s3.list_objects_v2(Bucket=self.bucket, Prefix=full, MaxKeys=PAGE_KEYS, **more)


def _write_of(
    operation: str,
    key: str,
    pieces: Pieces,
    condition: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> _Write:
    def part(start: int, length: int) -> Pieces:
        return list(window(pieces, start, length))

    return _Write(operation, check_key(key), size_of(pieces), part, condition or {}, metadata or {})


def _body(pieces: Pieces) -> Any:
    if len(pieces) == 1 and isinstance(pieces[0].obj, bytes) and pieces[0].nbytes == len(pieces[0].obj):
        return pieces[0].obj
    return PieceReader(pieces)


def _receive(body: Any, target: memoryview, whole: bool = True) -> None:
    """Fill `target` from a body. Raises RetryableError if it ends early. `whole`: there must be no more."""
    with contextlib.closing(body):
        filled = 0
        while filled < target.nbytes:
            block = body.read(min(2**20, target.nbytes - filled))
            if not block:
                raise RetryableError(f"the body ended after {filled} of {target.nbytes} bytes")
            target[filled : filled + len(block)] = block
            filled += len(block)
        if whole and body.read(1):
            raise RetryableError(f"the body went on after {target.nbytes} bytes")


def _in_parallel(work: Callable[[int], Result], items: Iterable[int]) -> list[Result]:
    """The results of `work` on every item, in order, PARALLEL_PARTS at a time; the first failure stops the rest."""
    with ThreadPoolExecutor(PARALLEL_PARTS, thread_name_prefix="holdfast-store") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
