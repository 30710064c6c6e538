"""Events that explain why the pods of a job do not appear: a quota, an admission policy, a missing account or volume.

Only events show this, because a refused pod does not exist.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from holdfast.launch.kubernetes.client import Api, Object
from holdfast.spec.errors import AccessDeniedError, ExitCode, HoldfastError

log = logging.getLogger("holdfast.launch")

ASK_SECONDS = 3.0  # between two queries
LONGEST_WORDS = 400

# Words of an event -> the exit code of a job that waits too long because of it, and the remedy.
_REMEDIES: tuple[tuple[str, ExitCode, str], ...] = (
    (
        "exceeded quota",
        ExitCode.UNSCHEDULABLE,
        "ask for less in cluster.resources, or raise it: kubectl describe quota",
    ),
    ("violates podsecurity", ExitCode.ACCESS_DENIED, "the namespace enforces it: kubectl get namespace --show-labels"),
    ("serviceaccount", ExitCode.NOT_FOUND, "check cluster.service_account"),
    ("service account", ExitCode.NOT_FOUND, "check cluster.service_account"),
    ("persistentvolumeclaim", ExitCode.NOT_FOUND, "check cluster.volumes"),
    ("admission webhook", ExitCode.ACCESS_DENIED, "ask who runs the webhook"),
    ("is forbidden", ExitCode.ACCESS_DENIED, "ask who runs the cluster"),
)


class PodEvents:
    """The newest warning about some objects, queried at intervals. While the server is unavailable, it adds nothing."""

    def __init__(self, api: Api) -> None:
        self._api = api.within(api.namespace, patience=ASK_SECONDS)
        self._polled_at: float | None = None
        self._allowed = True
        self.words = ""

    def ask(self, names: Sequence[str]) -> None:
        """Query the events of the objects `names`, unless that was just done."""
        now = time.monotonic()
        if not self._allowed or (self._polled_at is not None and now - self._polled_at < ASK_SECONDS):
            return
        self._polled_at = now
        warnings: list[Object] = []
        try:
            for name in names:
                warnings += [event for event in self._api.events(name) if _explains_missing_pods(event)]
        except AccessDeniedError as error:
            log.warning("why pods do not come is unknown: %s", error)
            self._allowed = False
        except HoldfastError as error:
            log.debug("events cannot be read: %s", error)
        if warnings:
            newest = max(warnings, key=_when)
            self.words = " ".join(f"{newest.get('reason', '')}: {newest.get('message', '')}".split())[:LONGEST_WORDS]


def classify_message(words: str) -> tuple[ExitCode, str]:
    """The exit code of a job that has waited too long with these words of an event, and the remedy."""
    for word, code, remedy in _REMEDIES:
        if word in words.lower():
            return code, remedy
    return ExitCode.UNSCHEDULABLE, "see kubectl get events"


def _explains_missing_pods(event: Object) -> bool:
    reason = str(event.get("reason", ""))
    if reason == "Unschedulable":  # Volcano reports a full queue as a normal event
        return True
    return event.get("type") == "Warning" and (reason.startswith("Failed") or "schedul" in reason.lower())


def _when(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp", ""))
