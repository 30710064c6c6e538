"""Submission to the first of several clusters that takes a run (`cluster.contexts`).

A create request may be lost, or its response. So a cluster is noted in the store before the request, and the note is
removed when the cluster refuses. A noted cluster that does not answer may have the run, and then no other one gets it.
"""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from holdfast.launch.kubernetes.api_errors import OverQuotaError, WebhookAwayError
from holdfast.pipelines.backends.interface import RunStatus
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec.errors import AccessDeniedError, ClusterUnreachableError, HoldfastError, MissingError
from holdfast.spec.json_parsing import parse_json
from holdfast.store import ConflictError, layout, open_store
from holdfast.store.json_reading import SMALL_BYTES

PATIENCE_SECONDS = 20.0  # for a request to the server of a named context
DEADLINE = 20.0  # seconds for the note, including retries
ATTEMPTS = 20  # while other commands of the same run write their notes

_REFUSALS = (AccessDeniedError, MissingError, OverQuotaError, WebhookAwayError)  # the server has taken nothing
_OF_THE_PLACE = (ClusterUnreachableError, *_REFUSALS)  # another place may answer otherwise

log = logging.getLogger("holdfast.argo")


class Place(Protocol):
    """A cluster with Argo's controller."""

    @property
    def context(self) -> str:
        """Its context in the kubeconfig."""

    def submitted(self, request: RunRequest) -> RunStatus | None:
        """The Workflow of a request that runs or has succeeded there."""

    def submit(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """See Backend."""


P = TypeVar("P", bound=Place)


@dataclass(frozen=True)
class _Noted:
    contexts: list[str]


class Notes:
    """The contexts that may have the run of a request, in the store."""

    def __init__(self, url: str, digest: str) -> None:
        """`url` of the store. Raises MissingError if it is empty, and as `read` does: without the notes of earlier
        commands a run could be in two clusters."""
        if not url:
            raise MissingError(
                "cluster.contexts: the store notes which cluster may have the run, and none is known here; give "
                "--store, `store` in the spec, or HOLDFAST_STORE"
            )
        self._key, self._store = layout.submission(digest), open_store(url, deadline=DEADLINE)
        self.read()

    def read(self) -> None:
        """Read the notes of all commands. Raises DataError if they are damaged, and the errors of the store."""
        self._contexts: list[str] = []
        self._version: str | None = None
        with suppress(MissingError):
            raw, self._version = self._store.get_versioned(self._key, most=SMALL_BYTES)
            self._contexts = parse_json(raw, _Noted, f"{self._store.url}/{self._key}").contexts

    def may_have(self, context: str) -> bool:
        """Whether a context may have the run."""
        return context in self._contexts

    def add(self, context: str) -> None:
        """Note a context before the request to it. Raises ConflictError if another command has written."""
        if context not in self._contexts:
            self._write([*self._contexts, context])

    def remove(self, context: str) -> None:
        """Remove the note of a context that has refused. Raises ConflictError if another command has written."""
        self._write([each for each in self._contexts if each != context])

    def _write(self, contexts: list[str]) -> None:
        data = json.dumps({"contexts": contexts}).encode()
        self._version = self._store.compare_and_swap(self._key, data, self._version)
        self._contexts = contexts


def submit_in_order(places: Sequence[P], request: RunRequest, notes: Notes) -> tuple[P, tuple[RunStatus, bool]]:
    """The place that runs a request, and what its `submit` returns: the first where it runs already or has succeeded,
    else the first that takes it.

    Raises ClusterUnreachableError if a place that may have the run does not answer. If no place takes it, raises
    OverQuotaError (a quota of one is full), else ClusterUnreachableError (a server does not answer), else
    AccessDeniedError, else MissingError. The message has the reason of each place.
    """
    for _ in range(ATTEMPTS):
        try:
            return _submit_once(places, request, notes)
        except ConflictError as error:  # another command submits the same run
            conflict = error
            notes.read()
    raise ClusterUnreachableError(
        f"cluster.contexts: the store takes no note of the cluster, as if another command wrote it all the time "
        f"({conflict}); run this command again later"
    )


def _submit_once(places: Sequence[P], request: RunRequest, notes: Notes) -> tuple[P, tuple[RunStatus, bool]]:
    refused: dict[str, HoldfastError] = {}
    open_places: list[P] = []
    for place in places:
        try:
            found = place.submitted(request)
        except _OF_THE_PLACE as error:
            refused[place.context] = error
            log.warning("context %s is left out: %s", place.context, error)
            continue
        if found is not None:
            return place, (found, False)
        open_places.append(place)
    for context, reason in refused.items():
        if isinstance(reason, ClusterUnreachableError) and notes.may_have(context):
            raise ClusterUnreachableError(
                f"context {context} may have the run, and does not answer ({reason}); run the same command again when "
                "it does, or name another one with --endpoint if that cluster is lost"
            )
    for place in open_places:
        notes.add(place.context)
        try:
            return place, place.submit(request)
        except _REFUSALS as error:
            if (found := place.submitted(request)) is not None:  # created by a request whose response was lost
                return place, (found, True)
            notes.remove(place.context)
            refused[place.context] = error
            log.warning("context %s does not take the run: %s", place.context, error)
    kinds = (OverQuotaError, ClusterUnreachableError, AccessDeniedError, MissingError)
    kind = next(each for each in kinds if any(isinstance(one, each) for one in refused.values()))
    reasons = "; ".join(f"{context}: {reason}" for context, reason in refused.items())
    raise kind(f"no context of cluster.contexts takes the run: {reasons}")
