"""Writing objects of a bucket: in one request, or in parts that appear as one object, under a condition or none.

Promises that a condition has one winner even when replies are lost, and that parts of uploads that failed do not stay:
they are ended at once, or, after the death of the writer, by `end_abandoned`.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import ClientError

from holdfast.components.spec.errors import HoldfastError, StoreUnreachableError
from holdfast.components.store import s3_parts as parts
from holdfast.components.store.interface import STALE_SECONDS
from holdfast.components.store.payload import PieceReader, Pieces, check_key, size_of, window
from holdfast.components.store.s3_errors import code_of, status_of
from holdfast.components.store.s3_parts import in_parallel
from holdfast.components.store.s3_reads import Reads
from holdfast.components.store.s3_requests import Requests, S3Client

UPLOADS = 3  # a multipart upload that the store loses is sent so often
DELETED_AT_ONCE = 1000  # the most that S3 takes
WRITER = "holdfast-writer"  # metadata that says which call wrote an object


class _NoBatchError(Exception):
    """The server cannot delete several objects in one request."""


class UploadLostError(Exception):
    """A multipart upload is gone and the object is not there: it must be sent again."""


@dataclass(frozen=True)
class Write:
    """One object to write: `part(start, length)` gives its bytes."""

    operation: str
    key: str
    size: int
    part: Callable[[int, int], Pieces]
    condition: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


class Writes:
    """Requests that write the objects under `prefix` of a bucket."""

    def __init__(self, request: Requests, reads: Reads, bucket: str, prefix: str, url: str) -> None:
        self._request, self._reads = request, reads
        self._bucket, self._prefix, self._url = bucket, prefix, url
        self._swept = False

    def write(self, job: Write) -> None:
        """Write at once or in parts. Raises PreconditionError."""
        if job.size <= parts.PART_BYTES:
            self.put_whole(job)
            return
        for _ in range(UPLOADS):
            with contextlib.suppress(UploadLostError):
                self.put_parts(job)
                if not self._swept:  # once in the life of this object
                    self._swept = True
                    self.end_abandoned(STALE_SECONDS)
                return
        raise StoreUnreachableError(
            f"{job.operation} {job.key} in {self._url}: the store gave up {UPLOADS} uploads in their last step; "
            "run the same command again"
        )

    def put_whole(self, job: Write) -> str:
        """One request; returns the entity tag. Raises PreconditionError."""
        name = {"Bucket": self._bucket, "Key": self._prefix + job.key, "Metadata": job.metadata}
        pieces = job.part(0, job.size)

        def send(s3: S3Client) -> str:
            return str(s3.put_object(**name, **job.condition, Body=_body(pieces))["ETag"])

        return self._request(job.operation, job.key, send, conditional=bool(job.condition))

    def put_parts(self, job: Write, before_last: Callable[[], object] = lambda: None) -> None:
        """A multipart upload; the object appears when it is completed. `before_last` is called just before that.
        Raises PreconditionError, UploadLostError."""
        writer = uuid.uuid4().hex
        metadata = {**job.metadata, WRITER: writer}
        checksum = self._checksum()
        name = {"Bucket": self._bucket, "Key": self._prefix + job.key}
        upload = self._request(
            job.operation, job.key, lambda s3: s3.create_multipart_upload(**name, Metadata=metadata, **checksum)
        )
        name["UploadId"] = upload["UploadId"]
        length = max(parts.PART_BYTES, -(-job.size // parts.MOST_PARTS))

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
            try:
                s3.complete_multipart_upload(**name, **job.condition, MultipartUpload={"Parts": sent})
            except ClientError as error:
                if status_of(error) not in (404, 409):
                    raise
                # Either an earlier attempt was applied and its reply lost, or the store gave the upload up.
                head = self._reads.head(job.operation, job.key)
                if head is None or head["Metadata"].get(WRITER) != writer:
                    raise UploadLostError from None

        try:
            sent = in_parallel(send, range(0, job.size, length))
            before_last()
            self._request(f"{job.operation} (last step)", job.key, complete, conditional=bool(job.condition))
        except BaseException:
            with contextlib.suppress(HoldfastError):
                self._abort(name)
            raise

    def _checksum(self) -> dict[str, str]:
        """A checksum of every part, unless the AWS configuration switched them off."""
        wanted = self._request.client().meta.config.request_checksum_calculation == "when_supported"
        return {"ChecksumAlgorithm": "CRC32"} if wanted else {}

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, a thousand in a request; one by one where the server knows no such request."""
        for start in range(0, len(keys), DELETED_AT_ONCE):
            part = list(keys[start : start + DELETED_AT_ONCE])
            try:
                self._request("delete", part[0], functools.partial(self._delete_all, part))
            except _NoBatchError:
                for key in part:
                    self._request("delete", key, functools.partial(self._delete_one, key))

    def _delete_one(self, key: str, s3: S3Client) -> None:
        s3.delete_object(Bucket=self._bucket, Key=self._prefix + key)

    def _delete_all(self, keys: list[str], s3: S3Client) -> None:
        if len(keys) == 1:
            self._delete_one(keys[0], s3)
            return
        names = [{"Key": self._prefix + key} for key in keys]
        try:
            reply = s3.delete_objects(Bucket=self._bucket, Delete={"Objects": names, "Quiet": True})
        except ClientError as error:
            if status_of(error) in (405, 501) or code_of(error) in ("NotImplemented", "MethodNotAllowed"):
                raise _NoBatchError from None
            raise
        for failure in reply.get("Errors", ()):
            if failure["Code"] != "NoSuchKey":
                denied = failure["Code"] == "AccessDenied"  # anything else may pass
                reply["ResponseMetadata"]["HTTPStatusCode"] = 403 if denied else 503
                raise ClientError({**reply, "Error": failure}, "DeleteObjects")

    def end_abandoned(self, older_than: float) -> int:
        """End multipart uploads that were begun longer ago, in seconds, and never completed: their parts are invisible
        and paid for. Returns how many. One page of them; what is left, or fails, is for the next call."""
        oldest = datetime.now(UTC) - timedelta(seconds=older_than)
        ended = 0
        with contextlib.suppress(HoldfastError):
            found = self._request(
                "list uploads",
                self._prefix or "(everything)",
                lambda s3: s3.list_multipart_uploads(Bucket=self._bucket, Prefix=self._prefix),
            )
            for upload in found.get("Uploads", ()):
                if upload["Initiated"] < oldest:
                    name = {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self._abort(name)
                    ended += 1
        return ended

    def _abort(self, name: Mapping[str, Any]) -> None:
        self._request("abort", name["Key"], lambda s3: s3.abort_multipart_upload(**name))


def write_of(
    operation: str,
    key: str,
    pieces: Pieces,
    condition: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Write:
    """The write of `pieces` under `key`. Raises ValueError for a key that cannot be one."""

    def part(start: int, length: int) -> Pieces:
        return list(window(pieces, start, length))

    return Write(operation, check_key(key), size_of(pieces), part, condition or {}, metadata or {})


def _body(pieces: Pieces) -> Any:
    if len(pieces) == 1 and isinstance(pieces[0].obj, bytes) and pieces[0].nbytes == len(pieces[0].obj):
        return pieces[0].obj
    return PieceReader(pieces)
