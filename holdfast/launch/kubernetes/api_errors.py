"""Classification of API server failures: an error with an exit code, or a failure that may pass.

The error names the cause: the server itself, a webhook, a quota, a missing right, or a field.
"""

import re
from dataclasses import dataclass

from kubernetes.client import ApiException

from holdfast.spec.errors import (
    AccessDeniedError,
    ClusterUnreachableError,
    DataError,
    ExitCode,
    HoldfastError,
    MissingError,
    Problem,
    SpecError,
)
from holdfast.spec.json_parsing import parse_json_object

_RETRYABLE = frozenset({401, 408, 429, 500, 502, 503, 504})
_WEBHOOK = re.compile(r'failed calling webhook "([^"]+)"')
# Of manifests/components/account-policy. Their messages have the remedy.
POD_ACCOUNTS, DEPLOYMENT_ACCOUNTS = "holdfast-pod-accounts", "holdfast-deployment-accounts"
_UNKNOWN_FIELDS = ("field not declared in schema", "failed to create typed patch object")  # of a 500


class ConflictError(HoldfastError):
    """The object exists already, or has changed since it was read."""


class GoneError(HoldfastError):
    """The server no longer has the version from which a watch was to start."""


class WebhookAwayError(ClusterUnreachableError):
    """A webhook that the API server must call does not answer."""


class OverQuotaError(HoldfastError):
    """A quota of the namespace has no room for the object."""

    exit_code = ExitCode.UNSCHEDULABLE


@dataclass(frozen=True)
class Blocker:
    """What blocks a request, and the error that it becomes when it lasts."""

    words: str = "the API server is away"
    lasting: type[HoldfastError] = ClusterUnreachableError
    remedy: str = "run the same command again when the API server answers"


SERVER = Blocker()
QUOTA = Blocker("a quota of the namespace has no room", OverQuotaError, "raise it: kubectl describe quota")


class TransientError(Exception):
    """A failure of a request that may pass. `retry_after` is in seconds; `by` is the cause."""

    def __init__(self, message: str, status: int = 0, retry_after: float = 0.0, by: Blocker = SERVER) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.by = by


def refused(error: ApiException, what: str) -> Exception:  # noqa: PLR0911
    """The error that the server's response to the request `what` means: a TransientError, or an error with an exit
    code."""
    try:
        reason = str(parse_json_object(error.body, what)["message"])
    except (DataError, KeyError):
        reason = str(error.reason)
    message = f"{what}: {reason}"
    if error.status in _RETRYABLE and not any(words in reason for words in _UNKNOWN_FIELDS):
        return TransientError(
            message, error.status, _seconds((error.headers or {}).get("Retry-After")), _blocker_of(reason)
        )
    if error.status == 404:
        return MissingError(message)
    if error.status == 409:
        return ConflictError(message)
    if error.status == 410:
        return GoneError(message)
    if error.status == 403:
        if "exceeded quota" in message:
            return TransientError(message, 403, 5.0, QUOTA)
        if POD_ACCOUNTS in reason or DEPLOYMENT_ACCOUNTS in reason:
            return AccessDeniedError(message)
        missing = 'is forbidden: User "' in message  # a right is missing; otherwise an admission controller refused it
        remedy = "give the service account the right: manifests/components/launcher has what a launcher needs"
        return AccessDeniedError(f"{message}; {remedy if missing else 'ask who runs the cluster'}")
    return SpecError([Problem("cluster", reason, "is refused by the API server", "change the field it names")], what)


def _blocker_of(message: str) -> Blocker:
    if (match := _WEBHOOK.search(message)) is None:
        return SERVER
    remedy = "ask who runs it: kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations"
    return Blocker(f"the admission webhook {match[1]} does not answer", WebhookAwayError, remedy)


def _seconds(value: str | None) -> float:
    return float(value) if value is not None and value.isdigit() else 0.0
