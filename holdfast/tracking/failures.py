"""Classification of exceptions of MLflow, or of a plug-in that it loaded: an exit code and a remedy.

MLflow's clients raise what their plug-ins raise: botocore, google-cloud, azure, database drivers. Most of these are not
installed here, so their exceptions are recognized by class name.
"""

import errno
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from holdfast.spec.errors import ExitCode, causes

# Writes to MLflow that race with writes of other processes.
#
# MLflow checks for a row and then inserts it, without a lock over both. Of two writers of the same rows, the database
# refuses one. That is a lost race and not an outage, and the winner's rows can be read.

TRIES = 5

T = TypeVar("T")


def write_missing(missing: Callable[[], list[T]], write: Callable[[list[T]], object]) -> None:
    """Write the rows that are `missing`. After a refusal, check again and write those that are still missing.

    Another process can insert a row only once, so a race is lost at most once for each kind of row that one write
    makes. A write that is refused `TRIES` times is no race, and MLflow's own exception is raised. An outage is raised
    immediately.
    """
    from mlflow.exceptions import MlflowException

    for tries_left in reversed(range(TRIES)):
        if not (items := missing()):
            return
        try:
            write(items)
            return
        except MlflowException as error:
            if not tries_left or error.error_code == "TEMPORARILY_UNAVAILABLE":
                raise


CREDENTIALS = frozenset(
    """
    NoCredentialsError PartialCredentialsError CredentialRetrievalError ProfileNotFound TokenRetrievalError
    SSOTokenLoadError UnauthorizedSSOTokenError NoAuthTokenError DefaultCredentialsError RefreshError
    GoogleAuthError Unauthorized Forbidden Unauthenticated PermissionDenied ClientAuthenticationError
    CredentialUnavailableError InvalidPrivateKeyError AuthenticationException
    """.split()
)
ABSENT = frozenset({"NotFound", "ResourceNotFoundError", "NoSuchBucket", "BucketNotFound"})
NO_PLUGIN = frozenset(
    {
        "ModuleNotFoundError",
        "ImportError",
        "NoSuchModuleError",
        "UnsupportedModelRegistryStoreURIException",
        "UnsupportedTrackingStoreURIException",
    }
)
DENIED_CODES = frozenset(
    """
    AccessDenied AllAccessDisabled InvalidAccessKeyId SignatureDoesNotMatch ExpiredToken InvalidToken
    PERMISSION_DENIED UNAUTHENTICATED CUSTOMER_UNAUTHORIZED 401 403
    """.split()
)
ABSENT_CODES = frozenset({"NoSuchBucket", "RESOURCE_DOES_NOT_EXIST", "ENDPOINT_NOT_FOUND", "404"})
DENIED_WORDS = ("password authentication failed", "access denied for user", "login failed for user")

NEEDS_CREDENTIALS = (
    "give this process credentials that may do so (MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, \
MLFLOW_TRACKING_TOKEN; of a bucket: those of its provider)"
)

NEEDS_RIGHTS = "make the file and its folder writable for this user, or set MLFLOW_TRACKING_URI to another MLflow"


def meaning(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code of a failure, and its remedy."""
    for cause in causes(error):
        names = {kind.__name__ for kind in type(cause).__mro__}
        codes = set(_codes(cause))
        text = str(cause).lower()
        if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in text:
            return ExitCode.NO_SPACE, "free some space"
        is_file = "readonly database" in text or (isinstance(cause, PermissionError) and cause.filename is not None)
        if is_file or isinstance(cause, PermissionError) or names & CREDENTIALS or codes & DENIED_CODES:
            return ExitCode.ACCESS_DENIED, NEEDS_RIGHTS if is_file else NEEDS_CREDENTIALS
        if any(pattern in text for pattern in DENIED_WORDS):
            return ExitCode.ACCESS_DENIED, "check user and password in MLFLOW_TRACKING_URI"
        if names & NO_PLUGIN:
            return (
                ExitCode.BAD_SPEC,
                "install the package that MLflow needs for this address, or set MLFLOW_TRACKING_URI \
to an MLflow server or to sqlite:///FILE",
            )
        if names & ABSENT or codes & ABSENT_CODES:
            return ExitCode.NOT_FOUND, "restore it, or name another one"
    return ExitCode.STORE_UNREACHABLE, "check MLFLOW_TRACKING_URI and the server"


def is_bug(error: BaseException) -> bool:
    """Whether the exception comes from a mistake in Holdfast's own lines, and not from MLflow."""
    if type(error).__module__ != "builtins" or isinstance(error, OSError | ImportError):
        return False
    innermost: TracebackType | None = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and str(innermost.tb_frame.f_globals.get("__name__", "")).startswith("holdfast.")


def _codes(error: BaseException) -> Iterator[str]:
    """The codes of an exception: MLflow's, botocore's, and that of an HTTP answer."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code", ""))
    for name in ("error_code", "status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, str | int):
            yield str(value)
    if (status := getattr(response, "status_code", None)) is not None:
        yield str(status)
