"""Writing objects of a bucket: in one request, with or without a condition, or in parts that appear as one object.

Parts of failed uploads do not stay. They are ended immediately or, after the death of the writer, by `end_abandoned`.
The completion of an upload never carries a condition. Some servers honor conditions for one request but not there
(SeaweedFS 4.30 to 4.48).
"""

import base64
import contextlib
import functools
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Any

from botocore.exceptions import ClientError

from holdfast.spec.errors import HoldfastError, StoreUnreachableError
from holdfast.store import parallel as parts
from holdfast.store.interface import STALE_SECONDS
from holdfast.store.parallel import in_parallel
from holdfast.store.payload import Pieces, check_key, size_of, window
from holdfast.store.s3.errors import Meaning, reply_meaning, status_of
from holdfast.store.s3.reads import Reads
from holdfast.store.s3.requests import OutcomeError, Requests, S3Client

# Bodies of S3 requests, in blocks that suit an HTTP client, and the checksum with which the server verifies them.
#
# The checksum is CRC32C: every S3 knows it, and awscrt computes it ten times as fast as a CRC32, outside of the GIL. It
# is sent as a header, not as a trailer, so that it is signed and a server needs no chunked encoding. awscrt is imported
# at the first write: the import takes 30 ms.

BLOCK_BYTES = 2**20  # sent together: urllib3 gives each block the whole timeout, and each costs a turn of the GIL
WHOLE_BYTES = 2**20  # up to this size, a body is one block with its headers, without "Expect: 100-continue"


def crc32c(pieces: Pieces) -> str:
    """The CRC32C of the concatenated pieces, as S3 writes it."""
    from awscrt import checksums

    crc = 0
    for piece in pieces:
        crc = checksums.crc32c(piece, crc)
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def body(pieces: Pieces) -> Any:
    """The pieces as the body of a request."""
    if size_of(pieces) > WHOLE_BYTES:
        return Body(pieces)
    if len(pieces) == 1 and type(pieces[0].obj) is bytes and len(pieces[0].obj) == pieces[0].nbytes:
        return pieces[0].obj
    return b"".join(pieces)


class Body:
    """Pieces as one seekable file. A read returns whole blocks, for any requested size. urllib3 requests 16 KiB, takes
    what it gets, and would spend more time on requests than on sending. Only small pieces are joined."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(piece.nbytes for piece in pieces))
        self._size = self._ends[-1] if self._ends else 0
        self._position = 0

    def __len__(self) -> int:
        return self._size

    def read(self, size: int | None = None) -> bytes | memoryview:  # noqa: ARG002 - see above
        """The next block; empty at the end."""
        pieces: Pieces = []
        missing = BLOCK_BYTES
        number = bisect_right(self._ends, self._position)
        while missing and number < len(self._pieces):
            piece = self._pieces[number]
            part = piece[piece.nbytes - (self._ends[number] - self._position) :][:missing]
            if pieces and part.nbytes > BLOCK_BYTES // 4:
                break
            pieces.append(part)
            missing -= part.nbytes
            self._position += part.nbytes
            number += 1
            if part.nbytes > BLOCK_BYTES // 4:
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to `offset` from the start (whence 0), the position (1) or the end (2)."""
        base = (0, self._position, self._size)[whence]
        self._position = min(max(base + offset, 0), self._size)
        return self._position

    def tell(self) -> int:
        """Bytes from the start."""
        return self._position


UPLOADS = 3  # tries of a multipart upload that the store loses
UPLOAD_PAGES = 10  # limit of pages of unfinished uploads, a thousand on each
MAX_DELETED_KEYS = 1000  # S3's maximum
ALGORITHM = {"ChecksumAlgorithm": "CRC32C"}
# Refusals of a batch deletion after which objects are deleted one by one. Older servers want a Content-MD5, which
# botocore no longer sends, or do not know the request.
NO_BATCH = (Meaning.UNSUPPORTED, Meaning.CHECKSUM, Meaning.REFUSED)
WRITER = "holdfast-writer"  # metadata that names the call that wrote an object


class _NoBatchError(OutcomeError):
    """The server cannot delete several objects in one request."""


class UploadLostError(OutcomeError):
    """A multipart upload is gone and the object does not exist: it must be sent again."""


@dataclass(frozen=True)
class Write:
    """One object to write: `part(start, length)` gives its bytes."""

    operation: str
    key: str
    size: int
    part: Callable[[int, int], Pieces]
    condition: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


def part_bytes(size: int) -> int:
    """The size of the parts in which an object of `size` bytes is sent: S3 takes at most MOST_PARTS."""
    return max(parts.PART_BYTES, -(-size // parts.MOST_PARTS))


class Writes:
    """Requests that write the objects under `prefix` of a bucket."""

    def __init__(self, request: Requests, reads: Reads, bucket: str, prefix: str, url: str) -> None:
        self._request, self._reads = request, reads
        self._bucket, self._prefix, self._url = bucket, prefix, url
        self._swept: set[str] = set()  # folders

    def write(self, job: Write) -> None:
        """Write in one request or in parts; a conditional write is one request, which S3 takes up to 5 GiB. Raises
        PreconditionError."""
        if job.condition or job.size <= parts.PART_BYTES:
            self.put_whole(job)
            return
        for _ in range(UPLOADS):
            with contextlib.suppress(UploadLostError):
                self._put_parts(job)
                self._end_abandoned_near(job.key)
                return
        raise StoreUnreachableError(
            f"{job.operation} {job.key} in {self._url}: the store gave up {UPLOADS} uploads in their last step; "
            "run the same command again"
        )

    def put_whole(self, job: Write) -> str:
        """One request; returns the entity tag. Raises PreconditionError."""
        name = {"Bucket": self._bucket, "Key": self._prefix + job.key, "Metadata": job.metadata}
        pieces = job.part(0, job.size)
        checksum = self._checksum(pieces)

        def send(s3: S3Client) -> str:
            return str(s3.put_object(**name, **job.condition, **checksum, Body=body(pieces))["ETag"])

        return self._request(job.operation, job.key, send, conditional=bool(job.condition), size=job.size)

    def _put_parts(self, job: Write) -> None:
        """A multipart upload; the object appears when it is completed. Raises UploadLostError."""
        writer = uuid.uuid4().hex
        metadata = {**job.metadata, WRITER: writer}
        checksum = ALGORITHM if self._checksums() else {}
        name = {"Bucket": self._bucket, "Key": self._prefix + job.key}
        upload = self._request(
            job.operation, job.key, lambda s3: s3.create_multipart_upload(**name, Metadata=metadata, **checksum)
        )
        name["UploadId"] = upload["UploadId"]
        length = part_bytes(job.size)

        def send(start: int) -> dict[str, Any]:
            number = start // length + 1
            pieces = job.part(start, min(length, job.size - start))
            checksum = self._checksum(pieces)

            def send_part(s3: S3Client) -> Any:
                try:
                    return s3.upload_part(**name, PartNumber=number, Body=body(pieces), **checksum)
                except ClientError as error:
                    if reply_meaning(error) is Meaning.UPLOAD_LOST:
                        raise UploadLostError from None
                    raise

            reply = self._request(f"{job.operation} (part {number})", job.key, send_part, size=size_of(pieces))
            checksums = {name: value for name, value in checksum.items() if name not in ALGORITHM}
            return {"PartNumber": number, "ETag": reply["ETag"], **checksums}

        def complete(s3: S3Client) -> None:
            try:
                s3.complete_multipart_upload(**name, MultipartUpload={"Parts": parts_sent})
            except ClientError as error:
                if reply_meaning(error) is not Meaning.UPLOAD_LOST and status_of(error) not in (404, 409):
                    raise
                # Either an earlier attempt was applied and its reply lost, or the store dropped the upload.
                head = self._reads.head(job.operation, job.key)
                if head is None or head["Metadata"].get(WRITER) != writer:
                    raise UploadLostError from None

        try:
            parts_sent = in_parallel(send, range(0, job.size, length))
            self._request(f"{job.operation} (last step)", job.key, complete)
        except BaseException:
            with contextlib.suppress(HoldfastError):
                self._abort(name)
            raise

    def _checksum(self, pieces: Pieces) -> dict[str, str]:
        return {**ALGORITHM, "ChecksumCRC32C": crc32c(pieces)} if self._checksums() else {}

    def _checksums(self) -> bool:
        """Whether bodies carry a checksum: unless the AWS configuration switched them off."""
        return bool(self._request.client().meta.config.request_checksum_calculation == "when_supported")

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, a thousand in a request; one by one where the server lacks that request."""
        for start in range(0, len(keys), MAX_DELETED_KEYS):
            part = list(keys[start : start + MAX_DELETED_KEYS])
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
            if reply_meaning(error) in NO_BATCH:
                raise _NoBatchError from None
            raise
        for failure in reply.get("Errors", ()):
            if failure["Code"] != "NoSuchKey":
                denied = failure["Code"] == "AccessDenied"  # anything else may pass
                reply["ResponseMetadata"]["HTTPStatusCode"] = 403 if denied else 503
                raise ClientError({**reply, "Error": failure}, "DeleteObjects")

    def _end_abandoned_near(self, key: str) -> None:
        """End the uploads of dead writers in the folder of `key`, once for each folder that this store writes to. For
        an object at the root nothing is ended: the bucket may have many users."""
        folder = key.rpartition("/")[0]
        if folder and folder not in self._swept:
            self._swept.add(folder)
            self.end_abandoned(f"{folder}/", STALE_SECONDS)

    def end_abandoned(self, folder: str, older_than: float) -> int:
        """End multipart uploads below `folder` that were begun more than `older_than` seconds ago: their parts are
        invisible and paid for. Returns the number. Looks at a few pages; the rest, and any failure, is left for later.
        """
        oldest = datetime.now(UTC) - timedelta(seconds=older_than)
        count = 0
        place: dict[str, str] = {}
        with contextlib.suppress(HoldfastError):
            for _ in range(UPLOAD_PAGES):
                page = self._request("list uploads", folder, functools.partial(self._uploads, folder, place))
                for upload in page.get("Uploads", ()):
                    if upload["Initiated"] < oldest and upload["Key"].startswith(self._prefix + folder):
                        name = {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                        self._abort(name)
                        count += 1
                if not page.get("IsTruncated"):
                    break
                place = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
        return count

    def _uploads(self, folder: str, place: Mapping[str, str], s3: S3Client) -> Any:
        return s3.list_multipart_uploads(Bucket=self._bucket, Prefix=self._prefix + folder, **place)

    def _abort(self, name: Mapping[str, Any]) -> None:
        self._request("abort", name["Key"], lambda s3: s3.abort_multipart_upload(**name))


def write_of(
    operation: str,
    key: str,
    pieces: Pieces,
    condition: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Write:
    """The write of `pieces` under `key`. Raises ValueError for an invalid key."""

    def part(start: int, length: int) -> Pieces:
        return list(window(pieces, start, length))

    return Write(operation, check_key(key), size_of(pieces), part, condition or {}, metadata or {})
