"""Error codes of S3 servers, by the action that a client must take.

One table covers Amazon S3, MinIO, Ceph RGW, SeaweedFS, Google's XML interface and Cloudflare R2. The code takes
precedence over the HTTP status, because servers send the same code with different statuses. A reply without a known
code is classified by its status.
"""

from __future__ import annotations

import re
from enum import Enum


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
