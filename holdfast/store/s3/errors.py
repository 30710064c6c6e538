"""Classification of S3 failures: retryable, or an error that names the object and the remedy.

No credential reaches a message: only the error's code, its kind and a redacted text are shown. Every exception of a
request is classified here, also those that botocore does not declare. The codes are a table below.
"""

import logging
import re
import ssl
from collections.abc import Callable
from enum import Enum
from http.client import HTTPException
from typing import TypeVar
from urllib.parse import urlsplit

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from holdfast.runtime import retry
from holdfast.runtime.secrets import redact
from holdfast.spec.errors import (
    AccessDeniedError,
    HoldfastError,
    MissingError,
    NoSpaceError,
    StoreRefusedError,
    StoreUnreachableError,
)

# Error codes of S3 servers, by the action that a client must take.
#
# One table covers Amazon S3, MinIO, Ceph RGW, SeaweedFS, Google's XML interface and Cloudflare R2. The code takes
# precedence over the HTTP status, because servers send the same code with different statuses. A reply without a known
# code is classified by its status.


class Meaning(Enum):
    """The action that a failed reply calls for."""

    TRANSIENT = "send the request again until the deadline"
    DAMAGED = "the body arrived damaged: send it again a few times"
    EXPIRED = "read the credentials again, and wait for new ones until the deadline"
    UNKNOWN_KEY = "read the credentials again; without new ones the key or token is wrong"
    DENIED = "the credentials do not allow the operation"
    CLOCK = "set the clock"
    MISSING = "the object does not exist"
    NO_BUCKET = "the bucket does not exist"
    UPLOAD_LOST = "the multipart upload is gone: send the object again"
    FULL = "free some space"
    REGION = "use the region, or the address, of the bucket"
    UNSUPPORTED = "the server lacks the operation or a header of it"
    CHECKSUM = "the server wants another checksum"
    CONDITION = "the condition of the request does not hold"
    ARCHIVED = "restore the object first"
    REFUSED = "the request is wrong"


CODES: dict[Meaning, str] = {
    Meaning.TRANSIENT: """
        RequestTimeout RequestTimeoutException RequestTimedOut OperationTimedOut GatewayTimeout
        InternalError InternalFailure InternalServerError ServerInternalError UnknownError BackendError
        ServiceUnavailable ServiceUnavailableException Unavailable TemporarilyUnavailable BadGateway Busy ServerBusy
        SlowDown SlowDownRead SlowDownWrite TooManyRequests TooManyRequestsException TooMuchConcurrency
        Throttling ThrottlingException ThrottledException RequestThrottled RequestThrottledException
        RequestLimitExceeded BandwidthLimitExceeded LimitExceededException ProvisionedThroughputExceededException
        EC2ThrottledException PriorRequestNotComplete TransactionInProgressException RateLimitExceeded
        rateLimitExceeded ReducedRedundancyLostObject
        OperationAborted ConditionalRequestConflict ConcurrentModification ResourceConflict
        ClientDisconnected XMinioServerNotInitialized XMinioBackendDown XMinioReadQuorum XMinioWriteQuorum
        XMinioObjectReadQuorum XMinioObjectWriteQuorum
    """,
    Meaning.DAMAGED: """
        BadDigest BadDigestException XAmzContentSHA256Mismatch XAmzContentChecksumMismatch ContentChecksumMismatch
        ChecksumMismatch IncompleteBody
    """,
    Meaning.EXPIRED: "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired RequestExpiredException",
    Meaning.UNKNOWN_KEY: """
        InvalidAccessKeyId InvalidAccessKey InvalidToken InvalidTokenId InvalidClientTokenId
        UnrecognizedClientException
    """,
    Meaning.DENIED: """
        AccessDenied AccessDeniedException AccessForbidden Forbidden Unauthorized UnauthorizedAccess
        SignatureDoesNotMatch InvalidSecurity NotSignedUp AccountProblem UserSuspended AllAccessDisabled
        AuthFailure AuthorizationError MissingAuthenticationToken MissingSecurityHeader MissingSecurityElement
        CredentialsNotSupported InvalidPayer UserProjectAccountProblem UserProjectAccessDenied
    """,
    Meaning.CLOCK: "RequestTimeTooSkewed RequestInTheFuture",
    Meaning.MISSING: "NoSuchKey NoSuchVersion",
    Meaning.NO_BUCKET: "NoSuchBucket",
    Meaning.UPLOAD_LOST: "NoSuchUpload InvalidPart InvalidPartOrder",
    Meaning.FULL: """
        XMinioStorageFull XMinioAdminBucketQuotaExceeded XRustfsStorageFull InsufficientStorage QuotaExceeded
        QuotaExceededException StorageFull InsufficientCapacity EntityStorageFull
    """,
    Meaning.REGION: """
        PermanentRedirect TemporaryRedirect Redirect AuthorizationHeaderMalformed InvalidRegion
        IllegalLocationConstraintException
    """,
    Meaning.UNSUPPORTED: "NotImplemented MethodNotAllowed XNotImplemented UnsupportedOperation",
    Meaning.CHECKSUM: "MissingContentMD5 InvalidDigest MissingContentChecksum",
    Meaning.CONDITION: "PreconditionFailed ConditionNotMet",
    Meaning.ARCHIVED: "InvalidObjectState",
    Meaning.REFUSED: """
        InvalidRequest InvalidArgument InvalidRange InvalidURI InvalidBucketName InvalidObjectName KeyTooLong
        KeyTooLongError MalformedXML EntityTooLarge EntityTooSmall ObjectTooLarge MetadataTooLarge
        MissingContentLength MissingRequestBodyError MaxMessageLengthExceeded RequestHeaderSectionTooLarge
        InvalidEncryptionAlgorithmError InvalidStorageClass InvalidBucketState InvalidRetentionPeriod
        ObjectLocked WORMProtected XMinioInvalidObjectName XMinioObjectTampered XMinioParentIsObject
    """,
}
MEANINGS = {code: meaning for meaning, codes in CODES.items() for code in codes.split()}

TRANSIENT_STATUS = {408, 409, 425, 429, 499}
_CHANGED_ON_THE_WAY = re.compile(
    r"(?i)checksum.*(mismatch|(did|does) not match)|mismatch.*checksum|did not match the calc"
)
_VAGUE = {"InvalidRequest", "InvalidArgument"}  # servers use them for everything; only their text is specific


def meaning_of(status: int, code: str, message: str = "") -> Meaning:
    """The action for a reply with this status, code and text."""
    if (code in _VAGUE or (code not in MEANINGS and status == 400)) and message:
        if _CHANGED_ON_THE_WAY.search(message):
            return Meaning.DAMAGED
        if "content-md5" in message.lower():
            return Meaning.CHECKSUM
        if "checksum" in message.lower() or "x-amz-trailer" in message.lower():
            return Meaning.UNSUPPORTED
    return MEANINGS.get(code) or _by_status(status)


def _by_status(status: int) -> Meaning:
    if status in TRANSIENT_STATUS or (status >= 500 and status not in (501, 505, 507)):
        return Meaning.TRANSIENT
    if status in (401, 403):
        return Meaning.DENIED
    if status == 507:  # MinIO's and others' status for a full disk
        return Meaning.FULL
    if 300 <= status < 400:
        return Meaning.REGION
    return {404: Meaning.MISSING, 405: Meaning.UNSUPPORTED, 412: Meaning.CONDITION, 501: Meaning.UNSUPPORTED}.get(
        status, Meaning.REFUSED
    )


# Retries of store requests under a deadline.
#
# Every operation ends: with its result, with the error of a permanent failure, or with StoreUnreachableError at the
# deadline.

log = logging.getLogger("holdfast.store")

FIRST_PAUSE = 0.1  # seconds
LONGEST_PAUSE = 5.0
UNREACHABLE_REMEDY = "see whether the endpoint is up and reachable, then run the same command again"
MAX_RETRY_AFTER = 15.0  # the longest Retry-After that is respected: the deadline is ours

Result = TypeVar("Result")


class RetryableError(Exception):
    """A failure that another attempt may not meet. Never leaves this package. `at_least`: seconds to wait at the
    server's request. `remedy`: what a person does when no attempt succeeds."""

    attempt = 1  # the number of the failed attempt

    def __init__(self, message: str, at_least: float = 0.0, remedy: str = UNREACHABLE_REMEDY) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.at_least = min(at_least, MAX_RETRY_AFTER)


def retried(action: Callable[[int], Result], what: str, deadline: float) -> Result:
    """The result of `action(attempt)`, called again after every RetryableError for at most `deadline` seconds. `what`
    names the operation and the key in the error."""

    def numbered(attempt: int) -> Result:
        try:
            return action(attempt)
        except RetryableError as failure:
            failure.attempt = attempt
            raise

    def note(attempt: int, failure: BaseException) -> None:
        log.log(logging.WARNING if attempt > 3 else logging.DEBUG, "%s: attempt %d: %s", what, attempt, failure)

    try:
        return retry.retried(
            numbered,
            _passes,
            first=FIRST_PAUSE,
            longest=LONGEST_PAUSE,
            seconds=deadline,
            at_least=lambda failure: getattr(failure, "at_least", 0.0),
            note=note,
        )
    except RetryableError as failure:
        raise StoreUnreachableError(
            f"{what}: no success within {deadline:g} s, attempt {failure.attempt} failed: {failure}; {failure.remedy}"
        ) from None


def _passes(failure: BaseException) -> bool:
    return isinstance(failure, RetryableError)


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
    message = redact(str(error))
    if not any(word in message.upper() for word in UNTRUSTED) and "Could not find a suitable" not in message:
        return RetryableError(f"{type(error).__name__}: {message}")
    remedy = "set AWS_CA_BUNDLE to a file with the certificate of its authority"
    if "WRONG_VERSION_NUMBER" in message.upper() or "HTTP_REQUEST" in message.upper():
        remedy = "the endpoint does not speak TLS at this port: set AWS_ENDPOINT_URL to its http:// address"
    return StoreRefusedError(f"{what}: {message}; {remedy}")


def _explain_redirect(error: RedirectedError, what: str) -> HoldfastError:
    to = urlsplit(error.location)
    address = f"{to.scheme}://{redact(f'x://{to.netloc}').removeprefix('x://')}" if to.scheme and to.netloc else ""
    problem = (
        f"redirects to {address}: set AWS_ENDPOINT_URL to that address"
        if address
        else ("redirects and does not say where: set AWS_ENDPOINT_URL to the address that answers itself")
    )
    return StoreRefusedError(
        f"{what}: {error.status}: the endpoint {problem}; if it is the bucket that is in another region, set AWS_REGION"
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


def expired(message: str) -> RetryableError:
    """The error for expired credentials: new ones may come before the deadline."""
    return RetryableError(f"the credentials have expired ({message})", remedy=EXPIRED_REMEDY)


def damaged_again(error: boto.ClientError, what: str, times: int) -> HoldfastError:
    """The error for a body that arrived damaged each time it was sent."""
    return StoreRefusedError(
        f"{what}: {_reply(error)}; the body arrived damaged {times} times: check the memory and the network of this "
        f"machine and every proxy before the store; {CHECKSUM_REMEDY}"
    )


def _retry_after(error: boto.ClientError) -> float:
    """The delay in seconds that a reply requests; 0 if it has none, or a date."""
    header = str(error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", ""))
    return float(header) if header.isdecimal() else 0.0


def no_such_bucket(what: str, bucket: str) -> MissingError:
    """The error for a missing bucket."""
    return MissingError(f"{what}: bucket {bucket!r} does not exist at this endpoint; create it, or name another store")
