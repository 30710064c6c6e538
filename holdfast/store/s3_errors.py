"""Classification of S3 failures: retryable, or an error that names the object and the remedy.

No credential reaches a message: only the error's code, its kind and a redacted text are shown. Every exception of a
request is classified here, also those that botocore does not declare. `s3_codes` has the codes.
"""

from __future__ import annotations

import ssl
from http.client import HTTPException
from urllib.parse import urlsplit

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from holdfast.runtime.secrets import redact
from holdfast.spec.errors import (
    AccessDeniedError,
    HoldfastError,
    MissingError,
    NoSpaceError,
    StoreRefusedError,
)
from holdfast.store.retry import RetryableError
from holdfast.store.s3_codes import Meaning, meaning_of

# Failures of the connection, or of bytes in transit: the next attempt may not meet them.
PASSING = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    boto.FlexibleChecksumError,
    ResponseParserError,
    HTTPException,
    HTTPError,
    OSError,
)
NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.MetadataRetrievalError,
    boto.NoAuthTokenError,
    boto.TokenRetrievalError,
    boto.ProfileNotFound,
    boto.SSOError,
    boto.RefreshWithMFAUnsupportedError,
)
# Files of the AWS configuration, for which botocore repeats only the system's message.
UNUSABLE_FILE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
# Permanent failures; some of urllib3's errors of a wrong address are ValueErrors.
PERMANENT = (*UNUSABLE_FILE, ValueError, TypeError, LookupError, RecursionError)
# TLS reasons that mean a wrong configuration, and not a failed connection.
UNTRUSTED = ("CERTIFICATE", "CERTIFICATE_OR_CRL", "WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_CA")
CREDENTIALS_REMEDY = (
    "give credentials the usual AWS way (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role) "
    "and allow them the operation on this bucket"
)
EXPIRED_REMEDY = (
    "renew them where they come from (a credentials file is read again while a run continues; environment variables "
    "are not), then run the same command again"
)
CONFIGURATION_REMEDY = "check AWS_ENDPOINT_URL, AWS_REGION and the AWS configuration file"
CHECKSUM_REMEDY = "if this S3 does not know checksums, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
REMEDIES: dict[Meaning, tuple[type[HoldfastError], str]] = {
    Meaning.FULL: (NoSpaceError, "free some space in the store, or name another one"),
    Meaning.DENIED: (AccessDeniedError, CREDENTIALS_REMEDY),
    Meaning.UNKNOWN_KEY: (AccessDeniedError, CREDENTIALS_REMEDY),
    Meaning.CLOCK: (
        AccessDeniedError,
        "the clocks of this machine and of the server differ too much: set the clock (NTP); the credentials are fine",
    ),
    Meaning.REGION: (StoreRefusedError, "the bucket is in another region: set AWS_REGION to it"),
    Meaning.UNSUPPORTED: (StoreRefusedError, "this S3 lacks the operation: upgrade it, or name another store"),
    Meaning.CHECKSUM: (
        StoreRefusedError,
        "this S3 wants a checksum: unset AWS_REQUEST_CHECKSUM_CALCULATION, upgrade the server, or name another store",
    ),
    Meaning.ARCHIVED: (StoreRefusedError, "the object is archived: restore it first"),
    Meaning.REFUSED: (StoreRefusedError, "check the endpoint, the bucket and the key"),
}
WRITES = ("PutObject", "UploadPart", "CreateMultipartUpload", "CompleteMultipartUpload")


class RedirectedError(Exception):
    """The endpoint answers with a redirection that names no region of a bucket, so the bucket has not moved."""

    def __init__(self, status: int, location: str) -> None:
        super().__init__(f"redirected by {status}")
        self.status, self.location = status, location


def status_of(error: boto.ClientError) -> int:
    """The HTTP status of a reply."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: boto.ClientError) -> str:
    """S3's code of a reply, such as NoSuchKey; a HEAD has only the status."""
    return str(error.response.get("Error", {}).get("Code", ""))


def reply_meaning(error: boto.ClientError) -> Meaning:
    """The action that the reply calls for."""
    return meaning_of(status_of(error), code_of(error), str(error.response.get("Error", {}).get("Message", "")))


def explain(error: Exception, what: str, bucket: str) -> HoldfastError | RetryableError:
    """The error to raise for `error` of the operation `what` (which names the key) on `bucket`."""
    if isinstance(error, boto.ClientError):
        return _explain_reply(error, what, bucket)
    if isinstance(error, RedirectedError):
        return _explain_redirect(error, what)
    cause = error
    if type(error) is boto.HTTPClientError:  # botocore's wrapper around any error of its HTTP client
        cause = error.kwargs.get("error") or error
    if isinstance(cause, ssl.SSLError | boto.SSLError):
        return _explain_tls(cause, what)
    if isinstance(error, PASSING) and not isinstance(cause, PERMANENT):
        return RetryableError(f"{type(error).__name__}: {redact(str(error))}")
    return explain_setup(cause, what)


def explain_setup(error: Exception, what: str) -> HoldfastError:
    """The error for a failure that comes from the configuration, and not from the server. Never a RetryableError."""
    if isinstance(error, NO_CREDENTIALS):
        return AccessDeniedError(f"{what}: {redact(str(error))}; {CREDENTIALS_REMEDY}")
    if isinstance(error, ValueError) and "header" in str(error).lower():
        # Its text would repeat the header, which may hold a credential.
        return AccessDeniedError(
            f"{what}: a header cannot be sent; look for a line break or a space in the credentials"
        )
    remedy = CONFIGURATION_REMEDY
    if "Invalid endpoint" in str(error):
        remedy = "give AWS_ENDPOINT_URL with its scheme, such as http://127.0.0.1:9000"
    return StoreRefusedError(f"{what}: {type(error).__name__}: {redact(str(error))}; {remedy}")


def _explain_tls(error: Exception, what: str) -> HoldfastError | RetryableError:
    said = redact(str(error))
    if not any(word in said.upper() for word in UNTRUSTED) and "Could not find a suitable" not in said:
        return RetryableError(f"{type(error).__name__}: {said}")
    remedy = "set AWS_CA_BUNDLE to a file with the certificate of its authority"
    if "WRONG_VERSION_NUMBER" in said.upper() or "HTTP_REQUEST" in said.upper():
        remedy = "the endpoint does not speak TLS at this port: set AWS_ENDPOINT_URL to its http:// address"
    return StoreRefusedError(f"{what}: {said}; {remedy}")


def _explain_redirect(error: RedirectedError, what: str) -> HoldfastError:
    to = urlsplit(error.location)
    address = f"{to.scheme}://{redact(f'x://{to.netloc}').removeprefix('x://')}" if to.scheme and to.netloc else ""
    where = (
        f"redirects to {address}: set AWS_ENDPOINT_URL to that address"
        if address
        else ("redirects and does not say where: set AWS_ENDPOINT_URL to the address that answers itself")
    )
    return StoreRefusedError(
        f"{what}: {error.status}: the endpoint {where}; if it is the bucket that is in another region, set AWS_REGION"
    )


def _explain_reply(error: boto.ClientError, what: str, bucket: str) -> HoldfastError | RetryableError:
    status, meaning, reply = status_of(error), reply_meaning(error), _reply(error)
    if meaning in (Meaning.TRANSIENT, Meaning.DAMAGED):
        return RetryableError(reply, _retry_after(error))
    if meaning is Meaning.EXPIRED:
        return expired(reply)
    if meaning is Meaning.NO_BUCKET:
        return no_such_bucket(what, bucket)
    if meaning is Meaning.MISSING or (meaning is Meaning.UPLOAD_LOST and status == 404):
        return MissingError(f"{what}: no such object in bucket {bucket!r}")
    kind, remedy = REMEDIES.get(meaning, REMEDIES[Meaning.REFUSED])
    if meaning is Meaning.UNSUPPORTED and error.operation_name in WRITES:
        remedy = f"{remedy}; {CHECKSUM_REMEDY}"
    return kind(f"{what}: {reply}; {remedy}")


def _reply(error: boto.ClientError) -> str:
    message = redact(str(error.response.get("Error", {}).get("Message", "")))
    return f"{status_of(error)} {code_of(error)}: {message}"


def expired(said: str) -> RetryableError:
    """The error for expired credentials: new ones may come before the deadline."""
    return RetryableError(f"the credentials have expired ({said})", remedy=EXPIRED_REMEDY)


def damaged_again(error: boto.ClientError, what: str, times: int) -> HoldfastError:
    """The error for a body that arrived damaged each time it was sent."""
    return StoreRefusedError(
        f"{what}: {_reply(error)}; the body arrived damaged {times} times: check the memory and the network of this "
        f"machine and every proxy before the store; {CHECKSUM_REMEDY}"
    )


def _retry_after(error: boto.ClientError) -> float:
    """The delay in seconds that a reply requests; 0 if it has none, or a date."""
    said = str(error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", ""))
    return float(said) if said.isdecimal() else 0.0


def no_such_bucket(what: str, bucket: str) -> MissingError:
    """The error for a missing bucket."""
    return MissingError(f"{what}: bucket {bucket!r} does not exist at this endpoint; create it, or name another store")
