"""What an S3 failure means: worth another attempt, or an error that names the thing and the remedy.

Promises that no credential reaches a message: only the error's code, its kind and a cleaned text are shown.
"""

from __future__ import annotations

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from holdfast.components.runtime.secrets import redact
from holdfast.components.spec.errors import (
    AccessDeniedError,
    HoldfastError,
    MissingError,
    NoSpaceError,
    StoreRefusedError,
)
from holdfast.components.store.retry import RetryableError

# Failures of the connection, or of the bytes on their way: the next attempt may not meet them.
PASSING = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    boto.FlexibleChecksumError,
    ResponseParserError,
    ConnectionError,
    TimeoutError,
)
NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.NoAuthTokenError,
    boto.TokenRetrievalError,
    boto.ProfileNotFound,
    boto.UnauthorizedSSOTokenError,
)
RETRYABLE_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
RETRYABLE_CODES = {"RequestTimeout", "RequestTimeoutException", "SlowDown", "Throttling", "ThrottlingException"}
CREDENTIALS_REMEDY = (
    "give credentials the usual AWS way (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role) "
    "and allow them the operation on this bucket"
)


def status_of(error: boto.ClientError) -> int:
    """The HTTP status of a reply."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: boto.ClientError) -> str:
    """S3's code of a reply, such as NoSuchKey; a HEAD has only the status."""
    return str(error.response.get("Error", {}).get("Code", ""))


def explain(error: Exception, what: str, bucket: str) -> HoldfastError | RetryableError:
    """The error to raise for `error` of the operation `what` (which names the key) on `bucket`."""
    if isinstance(error, NO_CREDENTIALS):
        return AccessDeniedError(f"{what}: {redact(str(error))}; {CREDENTIALS_REMEDY}")
    if isinstance(error, boto.ClientError):
        return _explain_reply(error, what, bucket)
    if isinstance(error, PASSING):
        return RetryableError(f"{type(error).__name__}: {redact(str(error))}")
    return StoreRefusedError(
        f"{what}: {type(error).__name__}: {redact(str(error))}; "
        "check AWS_ENDPOINT_URL, AWS_REGION and the AWS configuration file"
    )


def _explain_reply(error: boto.ClientError, what: str, bucket: str) -> HoldfastError | RetryableError:
    status, code = status_of(error), code_of(error)
    reply = f"{status} {code}: {redact(str(error.response.get('Error', {}).get('Message', '')))}"
    if status in RETRYABLE_STATUS or code in RETRYABLE_CODES:
        return RetryableError(reply, _retry_after(error))
    if status == 507:  # what MinIO and others say of a full disk
        return NoSpaceError(f"{what}: {reply}; free some space in the store, or name another one")
    if code == "NoSuchBucket":
        return no_such_bucket(what, bucket)
    if status == 404:
        return MissingError(f"{what}: no such object in bucket {bucket!r}")
    if status in (401, 403):
        return AccessDeniedError(f"{what}: {reply}; {CREDENTIALS_REMEDY}")
    remedy = "check the endpoint, the bucket and the key"
    if status in (301, 307) or code in ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException"):
        remedy = "the bucket is in another region: set AWS_REGION to it"
    elif status == 501 or code == "NotImplemented":
        remedy = "this S3 lacks the operation: upgrade it, or name another store"
    return StoreRefusedError(f"{what}: {reply}; {remedy}")


def _retry_after(error: boto.ClientError) -> float:
    """Seconds for which a reply asks to be left alone; 0 where it does not say, or gives a date."""
    said = str(error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", ""))
    return float(said) if said.isdecimal() else 0.0


def no_such_bucket(what: str, bucket: str) -> MissingError:
    """The error for a bucket that is not there."""
    return MissingError(f"{what}: bucket {bucket!r} does not exist at this endpoint; create it, or name another store")
