"""Reading objects of a bucket: whole or by ranges, in parallel parts, all of one version; and listing them."""

import contextlib
import functools
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

from botocore.response import StreamingBody

from holdfast.runtime.deadlines import allow
from holdfast.spec.errors import MissingError
from holdfast.store import parallel as parts
from holdfast.store.interface import WHOLE_BYTES, ConflictError, ObjectInfo
from holdfast.store.parallel import in_parallel
from holdfast.store.payload import filled, too_large, too_short
from holdfast.store.s3.errors import RetryableError, no_such_bucket
from holdfast.store.s3.requests import OutOfRangeError, PreconditionError, Requests, S3Client

BLOCK_BYTES = 2**20  # received per read
PAGE_KEYS = 1000  # page size of a listing; S3's maximum


class Reads:
    """Requests that read the objects under `prefix` of a bucket."""

    def __init__(self, request: Requests, bucket: str, prefix: str, url: str) -> None:
        self._request, self._bucket, self._prefix, self._url = request, bucket, prefix, url
        self._bucket_exists = False

    def stat(self, key: str) -> ObjectInfo | None:
        """The metadata of an object, without reading it; None if it does not exist."""
        head = self.head("stat", key)
        if head is None:
            return None
        return ObjectInfo(key, head["ContentLength"], head["LastModified"].timestamp(), head["ETag"])

    def from_start(self, operation: str, key: str, start: int, most: int = WHOLE_BYTES) -> tuple[bytes, str]:
        """Everything from `start`, and the entity tag. An object over one part is fetched in parallel. Raises
        TooLargeError for more than `most` bytes."""
        options = {"Range": f"bytes={start}-"} if start else {}

        def fetch(s3: S3Client) -> tuple[bytes | None, int, str]:
            reply = s3.get_object(Bucket=self._bucket, Key=self._prefix + key, **options)
            size, version = int(reply["ContentLength"]), str(reply["ETag"])
            if size > most:
                reply["Body"].close()
                raise too_large(key, size, most)
            if size > parts.PART_BYTES:
                reply["Body"].close()
                return None, size, version
            allow(size)
            return filled(size, lambda view: _receive(reply["Body"], view)), size, version

        try:
            content, size, version = self._request(operation, key, fetch)
        except OutOfRangeError:
            info = self.stat(key)
            if info is not None and info.size == start:
                return b"", info.version
            raise too_short(key, info.size if info else 0, start, 0) from None
        if content is None:
            content = filled(size, lambda view: self.fill(operation, key, start, view, version))
        return content, version

    def fill(self, operation: str, key: str, start: int, target: memoryview, version: str | None = None) -> None:
        """Fill `target` from `start`, in parallel parts when it is large; all of one version of the object."""
        if not target.nbytes:
            info = self.stat(key)
            if info is None:
                raise MissingError(f"{operation} {key}: no such object in {self._url}")
            if start > info.size:
                raise too_short(key, info.size, start, 0)
            return
        first = version

        def fetch(offset: int) -> None:
            nonlocal first
            part = target[offset : offset + parts.PART_BYTES]
            seen = self._fill_part(operation, key, start + offset, part, first)
            first = first or seen
            if seen != first:  # parts that were in flight together
                raise self._replaced(operation, key)

        in_parallel(fetch, range(0, target.nbytes, parts.PART_BYTES))

    def _fill_part(self, operation: str, key: str, start: int, target: memoryview, version: str | None) -> str:
        """One ranged request; returns the entity tag."""
        condition = {"IfMatch": version} if version else {}

        def fetch(s3: S3Client) -> str:
            reply = s3.get_object(
                Bucket=self._bucket,
                Key=self._prefix + key,
                Range=f"bytes={start}-{start + target.nbytes - 1}",
                **condition,
            )
            if "ContentRange" not in reply:
                raise RetryableError("the server ignored the range")
            size = int(reply["ContentRange"].rpartition("/")[2])
            if start + target.nbytes > size:
                reply["Body"].close()
                raise too_short(key, size, start, target.nbytes)
            _receive(reply["Body"], target)
            return reply["ETag"]

        try:
            return self._request(operation, key, fetch, conditional=bool(condition), size=target.nbytes)
        except PreconditionError:
            raise self._replaced(operation, key) from None
        except OutOfRangeError:
            info = self.stat(key)
            raise too_short(key, info.size if info else 0, start, target.nbytes) from None

    def _replaced(self, operation: str, key: str) -> ConflictError:
        return ConflictError(f"{operation} {key}: was replaced while it was read; read it again")

    def head(self, operation: str, key: str) -> Any | None:
        """The reply to a HEAD; None if the object does not exist."""
        full = self._prefix + key
        try:
            return self._request(operation, key, lambda s3: s3.head_object(Bucket=self._bucket, Key=full))
        except MissingError:
            self._require_bucket(operation, key)
            return None

    def _require_bucket(self, operation: str, key: str) -> None:
        """Check once that the bucket exists. A HEAD does not report which is missing, and a wrong bucket must not pass
        for an absent object."""
        if self._bucket_exists:
            return
        try:
            self._request(operation, key, lambda s3: s3.head_bucket(Bucket=self._bucket))
        except MissingError:
            raise no_such_bucket(f"{operation} {key} in {self._url}", self._bucket) from None
        self._bucket_exists = True

    def pages(self, full: str, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """The objects under a prefix, page after page."""
        for reply in self._replies(full, prefix, {"StartAfter": self._prefix + after} if after else {}):
            for entry in reply.get("Contents", ()):
                key = entry["Key"].removeprefix(self._prefix)
                if not key.startswith("."):
                    yield ObjectInfo(key, entry["Size"], entry["LastModified"].timestamp(), entry["ETag"])

    def folders(self, full: str, prefix: str) -> Iterator[str]:
        """The names of the folders whose path begins with a prefix, page after page."""
        for reply in self._replies(full, prefix, {"Delimiter": "/"}):
            for entry in reply.get("CommonPrefixes", ()):
                name = entry["Prefix"].removesuffix("/").rpartition("/")[2]
                if not name.startswith("."):
                    yield name

    def _replies(self, full: str, prefix: str, how: dict[str, str]) -> Iterator[Any]:
        more: dict[str, str] = {}
        while True:
            page = functools.partial(self._page, full, {**how, **more})
            reply = self._request("list", prefix or "(everything)", page)
            yield reply
            if not reply["IsTruncated"]:
                return
            more = {"ContinuationToken": reply["NextContinuationToken"]}

    def _page(self, full: str, more: dict[str, str], s3: S3Client) -> Any:
        return s3.list_objects_v2(Bucket=self._bucket, Prefix=full, MaxKeys=PAGE_KEYS, **more)


def _receive(body: Any, target: memoryview) -> None:
    """Fill `target` from a body. Raises RetryableError if the body is shorter or longer."""
    with contextlib.closing(body):
        if _received_in_place(body, target):
            return
        received = 0
        while received < target.nbytes:
            block = body.read(min(BLOCK_BYTES, target.nbytes - received))
            if not block:
                raise _cut_short(received, target)
            target[received : received + len(block)] = block
            received += len(block)
        if body.read(1):
            raise RetryableError(f"the body continued after {target.nbytes} bytes")


def _received_in_place(body: Any, target: memoryview) -> bool:
    """Fill `target` directly from the HTTP response below botocore's body. The `readinto` of botocore and of urllib3
    allocates and copies a block per call, which takes a fifth of the speed. Returns False, and reads nothing, where
    botocore checks the bytes in transit, or has another kind of body."""
    raw = getattr(body, "_raw_stream", None)
    below = getattr(raw, "_fp", None)
    if type(body) is not StreamingBody or not isinstance(below, HTTPResponse) or below.length != target.nbytes:
        return False
    received = 0
    while received < target.nbytes:
        try:
            count = below.readinto(target[received : received + BLOCK_BYTES])
        except OSError as error:  # TLS raises much more than ConnectionError
            raise RetryableError(f"{type(error).__name__}: {error}") from None
        if not count:
            raise _cut_short(received, target)
        received += count
    raw.release_conn()  # type: ignore[union-attr] # for the next request
    return True


def _cut_short(received: int, target: memoryview) -> RetryableError:
    return RetryableError(f"the body ended after {received} of {target.nbytes} bytes")
