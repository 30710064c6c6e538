"""Error codes of S3 servers: each code has one meaning, and each meaning has one consequence."""

import pytest
from botocore.exceptions import ClientError

from holdfast.pipelines.chaos.proxy import FaultyProxy, Forward, Reply, Request, answer
from holdfast.spec.errors import (
    AccessDeniedError,
    HoldfastError,
    MissingError,
    NoSpaceError,
    StoreRefusedError,
)
from holdfast.store import Store
from holdfast.store.s3.errors import CODES, MEANINGS, Meaning, RetryableError, explain, meaning_of

TRANSIENT, REFUSED, DENIED = RetryableError, StoreRefusedError, AccessDeniedError
REPLIES = [
    (500, "InternalError", "AWS", TRANSIENT, ""),
    (200, "InternalError", "in the body of a completion", TRANSIENT, ""),
    (503, "ServiceUnavailable", "AWS", TRANSIENT, ""),
    (503, "SlowDown", "AWS", TRANSIENT, ""),
    (400, "RequestTimeout", "AWS", TRANSIENT, ""),
    (409, "OperationAborted", "AWS", TRANSIENT, ""),
    (409, "ConditionalRequestConflict", "AWS", TRANSIENT, ""),
    (400, "Throttling", "AWS", TRANSIENT, ""),
    (503, "SlowDownRead", "MinIO", TRANSIENT, ""),
    (503, "XMinioServerNotInitialized", "MinIO", TRANSIENT, ""),
    (499, "ClientDisconnected", "MinIO", TRANSIENT, ""),
    (409, "ConcurrentModification", "Ceph", TRANSIENT, ""),
    (429, "rateLimitExceeded", "GCS", TRANSIENT, ""),
    (429, "", "R2", TRANSIENT, ""),
    (520, "", "a proxy before R2", TRANSIENT, ""),
    (504, "", "a proxy", TRANSIENT, ""),
    (400, "BadDigest", "AWS", TRANSIENT, ""),
    (400, "XAmzContentChecksumMismatch", "MinIO", TRANSIENT, ""),
    (400, "InvalidRequest", "Value for x-amz-checksum-crc32c header: content checksum mismatch", TRANSIENT, ""),
    (400, "IncompleteBody", "AWS", TRANSIENT, ""),
    (400, "ExpiredToken", "AWS", TRANSIENT, "expired"),
    (403, "ExpiredToken", "MinIO", TRANSIENT, "expired"),
    (400, "InvalidToken", "AWS", DENIED, "AWS_PROFILE"),
    (403, "InvalidAccessKeyId", "AWS", DENIED, "AWS_PROFILE"),
    (403, "SignatureDoesNotMatch", "AWS", DENIED, "AWS_PROFILE"),
    (403, "UserSuspended", "Ceph", DENIED, ""),
    (401, "Unauthorized", "R2", DENIED, ""),
    (403, "", "a HEAD", DENIED, ""),
    (403, "RequestTimeTooSkewed", "AWS", DENIED, "set the clock"),
    (507, "XMinioStorageFull", "MinIO", NoSpaceError, "free some space"),
    (507, "", "a proxy", NoSpaceError, ""),
    (403, "QuotaExceeded", "Ceph", NoSpaceError, ""),
    (400, "XMinioAdminBucketQuotaExceeded", "MinIO", NoSpaceError, ""),
    (404, "NoSuchKey", "AWS", MissingError, "no such object"),
    (404, "NoSuchBucket", "AWS", MissingError, "does not exist"),
    (404, "NoSuchUpload", "AWS", MissingError, ""),
    (501, "NotImplemented", "A header implies functionality that is not implemented", REFUSED, "REQUEST_CHECKSUM_CALC"),
    (400, "InvalidArgument", "x-amz-checksum-crc32c is not supported", REFUSED, "REQUEST_CHECKSUM_CALCULATION"),
    (400, "MissingContentMD5", "older MinIO", REFUSED, "wants a checksum"),
    (301, "PermanentRedirect", "AWS", REFUSED, "AWS_REGION"),
    (400, "AuthorizationHeaderMalformed", "AWS", REFUSED, "AWS_REGION"),
    (405, "MethodNotAllowed", "AWS", REFUSED, "upgrade"),
    (403, "InvalidObjectState", "AWS", REFUSED, "restore"),
    (400, "EntityTooLarge", "AWS", REFUSED, "check"),
    (400, "KeyTooLongError", "AWS", REFUSED, "check"),
    (400, "InvalidRequest", "AWS", REFUSED, "check"),
    (400, "SomethingNew", "", REFUSED, "check"),
]


@pytest.mark.parametrize(("status", "code", "text", "error", "says"), REPLIES)
def test_a_reply_has_the_outcome_of_its_code(
    status: int, code: str, text: str, error: type[Exception], says: str
) -> None:
    reply = {"Error": {"Code": code, "Message": text}, "ResponseMetadata": {"HTTPStatusCode": status}}
    failure = explain(ClientError(reply, "PutObject"), "put k", "bucket")  # type: ignore[arg-type]
    assert type(failure) is error
    assert says in str(failure)


def test_each_s3_code_is_listed_once_and_each_meaning_has_codes() -> None:
    assert set(CODES) == set(Meaning)
    assert sum(len(codes.split()) for codes in CODES.values()) == len(MEANINGS)


def test_an_unknown_code_is_classified_by_its_status() -> None:
    for status in range(500, 600):
        permanent = {501: Meaning.UNSUPPORTED, 505: Meaning.REFUSED, 507: Meaning.FULL}
        assert meaning_of(status, "New") is permanent.get(status, Meaning.TRANSIENT)


def test_a_body_that_arrived_damaged_is_sent_again_a_few_times(proxied: Store, proxy: FaultyProxy) -> None:
    proxy.inject(answer(400, "BadDigest"), method="PUT", times=3)
    proxied.put("k", b"1")
    assert proxied.get("k") == b"1"
    fault = proxy.inject(answer(400, "BadDigest"), method="PUT", times=None)
    with pytest.raises(StoreRefusedError, match=r"damaged 4 times.*AWS_REQUEST_CHECKSUM_CALCULATION"):
        proxied.put("k", b"2")
    assert fault.hits == 4


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (400, "MissingContentMD5", "Missing required header for this request: Content-Md5."),
        (405, "MethodNotAllowed", ""),
        (501, "NotImplemented", ""),
    ],
)
def test_objects_are_deleted_one_by_one_where_the_request_for_several_is_refused(
    proxied: Store, proxy: FaultyProxy, status: int, code: str, text: str
) -> None:
    def refuse(request: Request, forward: Forward) -> Reply:
        body = f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()
        return Reply(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))], body)

    for key in ("a", "b"):
        proxied.put(key, b"1")
    proxy.inject(refuse, method="POST", path="delete", times=None)
    proxied.delete_many(["a", "b"])
    assert [info.key for info in proxied.list("")] == ["warm"]


@pytest.mark.parametrize(
    ("path", "status", "code"), [("partNumber=2", 404, "NoSuchUpload"), ("uploadId", 400, "InvalidPart")]
)
def test_an_upload_that_the_server_lost_is_sent_again(
    proxied: Store, proxy: FaultyProxy, large: bytes, status: int, code: str, path: str
) -> None:
    fault = proxy.inject(answer(status, code), method="PUT" if "part" in path else "POST", path=path)
    proxied.put("big", large)
    assert fault.hits == 1
    assert proxied.get("big") == large


def test_a_server_without_checksums_is_reported_with_the_setting(proxied: Store, proxy: FaultyProxy) -> None:
    proxy.inject(answer(501, "NotImplemented"), method="PUT", times=None)
    for operation in (lambda: proxied.put("k", b"1"), lambda: proxied.put_if_absent("k", b"1")):
        with pytest.raises(HoldfastError, match="AWS_REQUEST_CHECKSUM_CALCULATION=when_required"):
            operation()
