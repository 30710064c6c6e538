"""What it means when the API server does not do what it was asked: an error of the table, or a failure that may pass.

Promises that whoever is in the way is named: the server itself, a webhook that it has to ask, a quota, a right that is
missing, a field.
"""

from __future__ import annotations

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
_UNKNOWN_FIELDS = ("field not declared in schema", "failed to create typed patch object")  # of a 500


class ConflictError(HoldfastError):
    """The object exists already, or is not what it was when it was read."""


class GoneError(HoldfastError):
    """The server has forgotten the version from which a watch was to start."""


class WebhookAwayError(ClusterUnreachableError):
    """A webhook that the API server has to ask does not answer."""


class OverQuotaError(HoldfastError):
    """A quota of the namespace has no room for the object."""

    exit_code = ExitCode.UNSCHEDULABLE


@dataclass(frozen=True)
class Blocker:
    """Who or what is in the way of a request, and what it is when that lasts."""

    words: str = "the API server is away"
    lasting: type[HoldfastError] = ClusterUnreachableError
    remedy: str = "run the same command again when the API server answers"


SERVER = Blocker()
QUOTA = Blocker("a quota of the namespace has no room", OverQuotaError, "raise it: kubectl describe quota")


class TransientError(Exception):
    """A request failed in a way that may pass."""

    def __init__(self, message: str, status: int = 0, retry_after: float = 0.0, by: Blocker = SERVER) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.by = by


def refused(error: ApiException, what: str) -> Exception:  # noqa: PLR0911
    """What the answer to `what` means: a TransientError, or an error of the table."""
    try:
        said = str(parse_json_object(error.body, what)["message"])
    except (DataError, KeyError):
        said = str(error.reason)
    message = f"{what}: {said}"
    if error.status in _RETRYABLE and not any(words in said for words in _UNKNOWN_FIELDS):
        return TransientError(
            message, error.status, _seconds((error.headers or {}).get("Retry-After")), _blocker_of(said)
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
        missing = 'is forbidden: User "' in message  # a right; all else is refused by an admission
        remedy = "give the service account the right: manifests/components/launcher has what a launcher needs"
        return AccessDeniedError(f"{message}; {remedy if missing else 'ask who runs the cluster'}")
    return SpecError([Problem("cluster", said, "is refused by the API server", "change the field it names")], what)


def _blocker_of(said: str) -> Blocker:
    if (found := _WEBHOOK.search(said)) is None:
        return SERVER
    remedy = "ask who runs it: kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations"
    return Blocker(f"the admission webhook {found[1]} does not answer", WebhookAwayError, remedy)


def _seconds(value: str | None) -> float:
    return float(value) if value is not None and value.isdigit() else 0.0
