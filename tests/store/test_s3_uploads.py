"""Uploads of large objects to S3 with a faulty network or server, and the uploads of dead writers."""

import base64
import os
import threading
from collections.abc import Iterator
from itertools import pairwise, product

import boto3
import google_crc32c
import pytest

from holdfast.pipelines.chaos.proxy import (
    Act,
    FaultyProxy,
    Forward,
    Reply,
    Request,
    answer,
    deaf,
    lose_reply,
    reset,
)
from holdfast.spec.errors import (
    AccessDeniedError,
    StoreUnreachableError,
)
from holdfast.store import Store, open_store, parallel
from holdfast.store.s3 import writes
from holdfast.store.s3.writes import part_bytes
from tests.store.conftest import DEADLINE


@pytest.fixture
def store(proxied: Store) -> Store:
    """The store behind the proxy."""
    return proxied


def test_every_body_carries_a_checksum_for_the_server_to_verify(store: Store, proxy: FaultyProxy, large: bytes) -> None:
    requests: list[dict[str, str]] = []

    def look(request: Request, forward: Forward) -> Reply:
        requests.append({name.lower(): value for name, value in request.headers.items()})
        return forward(request)

    proxy.inject(look, method="PUT", times=None)
    store.put("small", [b"01234", b"56789"])
    store.put("large", large)
    part = 5 * 2**20
    bodies = [b"0123456789", *(large[start : start + part] for start in range(0, len(large), part))]
    expected = [base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode() for data in bodies]
    checksums = [headers["x-amz-checksum-crc32c"] for headers in requests]
    assert (checksums[0], sorted(checksums[1:])) == (expected[0], sorted(expected[1:]))


def test_an_upload_that_was_too_slow_for_the_server_is_sent_again(store: Store, proxy: FaultyProxy) -> None:
    proxy.inject(answer(400, "RequestTimeout"), method="PUT")
    store.put("k", b"1")
    assert store.get("k") == b"1"


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        *product(["uploads", "partNumber=2", "uploadId"], [reset(), lose_reply()]),
        ("uploads", answer(500, "InternalError")),
        ("partNumber=2", reset(after=100_000)),
        ("uploadId", answer(409, "OperationAborted")),
    ],
)
def test_a_large_object_survives_a_fault_in_any_step_of_its_upload(
    store: Store, proxy: FaultyProxy, large: bytes, fault: Act, step: str
) -> None:
    method = "PUT" if "partNumber" in step else "POST"
    injected = proxy.inject(fault, method=method, path=step)
    store.put("big", large)
    assert injected.hits == 1
    assert store.get("big") == large


def test_an_upload_that_the_server_forgot_starts_again(
    store: Store, proxy: FaultyProxy, large: bytes, s3_url: str
) -> None:
    forgotten = proxy.inject(answer(404, "NoSuchUpload"), method="POST", path="uploadId")
    store.put("big", large)
    assert forgotten.hits == 1
    assert store.get("big") == large
    proxy.inject(answer(404, "NoSuchUpload"), method="POST", path="uploadId", times=None)
    with pytest.raises(StoreUnreachableError, match="gave up 3 uploads"):
        store.put("other", large)
    assert store.stat("other") is None


def test_an_object_that_is_made_while_it_is_written_is_made_again_for_another_upload(
    store: Store, proxy: FaultyProxy, large: bytes
) -> None:
    calls: list[int] = []

    def content() -> Iterator[bytes]:
        calls.append(1)
        yield from (large[start : start + 1_000_001] for start in range(0, len(large), 1_000_001))

    proxy.inject(reset(), method="PUT", path="partNumber=2")
    forgotten = proxy.inject(answer(404, "NoSuchUpload"), method="POST", path="uploadId")
    store.put_stream("big", len(large), content)
    assert (forgotten.hits, len(calls)) == (1, 2)
    assert store.get("big") == large


def test_an_upload_that_fails_leaves_no_parts_behind(s3_url: str, proxy: FaultyProxy, large: bytes) -> None:
    store = open_store(s3_url, deadline=DEADLINE)
    proxy.inject(answer(403, "AccessDenied"), method="PUT", path="partNumber=3", times=None)
    with pytest.raises(AccessDeniedError, match="part 3"):
        store.put("big", large)
    bucket = s3_url.split("/")[2]
    client = boto3.client("s3", region_name="us-east-1")
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    assert store.stat("big") is None


def uploads(s3_url: str) -> list[str]:
    client = boto3.client("s3", region_name="us-east-1")
    return [upload["Key"] for upload in client.list_multipart_uploads(Bucket=s3_url.split("/")[2]).get("Uploads", ())]


def test_uploads_of_writers_that_died_are_ended_and_younger_ones_are_not(
    store: Store, proxy: FaultyProxy, s3_url: str
) -> None:
    client = boto3.client("s3", region_name="us-east-1")
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    others = ["another/object", f"{prefix}/runs/b/packs/alive.pack", f"{prefix}/runs/ab/packs/alive.pack"]
    for key in (*others, f"{prefix}/runs/a/packs/dead.pack"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    century = 100 * 365 * 86400.0  # this server dates every upload to 2010
    assert store.end_abandoned("runs/a/", century) == 0
    assert len(uploads(s3_url)) == 4
    denial = proxy.inject(answer(403, "AccessDenied"), path="uploads", times=1)
    assert store.end_abandoned("runs/a/", older_than=0) == 0  # best effort: a forbidden listing is no error
    assert denial.hits == 1
    assert store.end_abandoned("runs/a/", older_than=0) == 1
    assert sorted(uploads(s3_url)) == sorted(others)


def test_a_store_at_the_root_of_a_bucket_aborts_no_foreign_uploads(large: bytes, s3_url: str) -> None:
    """A store at the root of a bucket shares the bucket with other writers."""
    client = boto3.client("s3", region_name="us-east-1")
    bucket = s3_url.split("/")[2]
    store = open_store(f"s3://{bucket}")
    others = ["database/backup", "runs/b/packs/alive.pack", "runs/abroad/packs/alive.pack", "top"]
    for key in (*others, "runs/a/packs/dead.pack"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    store.put("big", large)  # this server dates every upload to 2010
    assert len(uploads(s3_url)) == 5
    for folder in ("", "runs/a", "/"):
        with pytest.raises(ValueError, match=r"folder|key"):
            store.end_abandoned(folder, older_than=0)
    store.put("runs/a/packs/new.pack", large)
    assert sorted(uploads(s3_url)) == sorted(others)


def test_uploads_of_dead_writers_are_found_on_every_page(
    store: Store, proxy: FaultyProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = boto3.client("s3", region_name="us-east-1")
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    for number in range(3):
        client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/runs/a/packs/{number}.pack")

    def first_page_only(request: Request, forward: Forward) -> Reply:
        """This server does not page uploads. The first reply has one of the three, and a marker for the next page."""
        reply = forward(request)
        uploads = reply.body.split(b"<Upload>")
        more = b"<NextKeyMarker>0</NextKeyMarker><NextUploadIdMarker>1</NextUploadIdMarker></ListMultipart"
        first_page = uploads[0] + b"<Upload>" + uploads[1] + b"</ListMultipartUploadsResult>"
        truncated = b"<IsTruncated>true</IsTruncated>"
        reply.body = first_page.replace(b"<IsTruncated>false</IsTruncated>", truncated).replace(
            b"</ListMultipart", more
        )
        reply.headers = [(name, value) for name, value in reply.headers if name.lower() != "content-length"]
        reply.headers.append(("Content-Length", str(len(reply.body))))
        return reply

    proxy.inject(first_page_only, method="GET", path="uploads")
    assert store.end_abandoned("runs/a/", older_than=0) == 3
    assert uploads(s3_url) == []
    assert any("key-marker=0" in request for request in proxy.requests)


def test_a_large_upload_aborts_abandoned_uploads_in_its_folder(store: Store, large: bytes, s3_url: str) -> None:
    client = boto3.client("s3", region_name="us-east-1")
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/packs/dead.pack")
    store.put("packs/big", large)
    assert uploads(s3_url) == []
    assert store.get("packs/big") == large


def test_a_stalled_upload_part_times_out_and_is_sent_again(s3_url: str, proxy: FaultyProxy, large: bytes) -> None:
    store = open_store(s3_url, deadline=15)
    release = threading.Event()
    fault = proxy.inject(deaf(release), method="PUT", path="partNumber=2")
    store.put("big", large)
    release.set()
    assert fault.hits == 1
    assert store.get("big") == large


def test_a_large_body_is_read_in_blocks_and_small_buffers_are_joined() -> None:
    mib = 2**20
    content = os.urandom(5 * mib)
    cuts = [0, 1, 1, 5, 100_000, mib, 3 * mib + 7, 3 * mib + 8, 5 * mib]
    pieces = [memoryview(content)[start:end] for start, end in pairwise(cuts)]
    body = writes.Body(pieces)
    assert len(body) == len(content)
    for _ in range(2):
        blocks = list(iter(lambda: bytes(body.read(16384)), b""))
        assert b"".join(blocks) == content
        assert max(map(len, blocks)) <= mib
        assert len(blocks) <= 9
        assert body.tell() == len(content)
        body.seek(0)
    body.seek(-3, 2)
    assert bytes(body.read()) == content[-3:]
    assert bytes(writes.Body([]).read()) == b""


@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("times", [1, 2, 17.3, 159])
def test_an_object_of_any_size_has_as_many_parts_as_s3_takes_and_none_that_is_too_small_or_large(
    times: float, off: int
) -> None:
    """S3 takes 10,000 parts of 5 MiB to 5 GiB. It refuses one more part only after all were sent."""
    size = int(times * parallel.PART_BYTES * parallel.MOST_PARTS) + off
    length = part_bytes(size)
    assert parallel.MOST_PARTS <= 10_000
    assert -(-size // length) <= 10_000
    assert 5 * 2**20 <= length <= 5 * 2**30
    assert length < 2 * parallel.PART_BYTES * max(1, times)  # and no larger than necessary
    assert part_bytes(1) == parallel.PART_BYTES
