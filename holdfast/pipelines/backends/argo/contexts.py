"""Submission to the first of several clusters that takes a run (`cluster.contexts`).

A create request may be lost, or its response. So a cluster is noted in the store before the request, and the note is
removed when the cluster refuses. A noted cluster that does not answer may have the run, and then no other one gets it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Protocol, TypeVar

from holdfast.launch.kubernetes.api_errors import OverQuotaError, WebhookAwayError
from holdfast.pipelines.backends.interface import RunStatus
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec.errors import AccessDeniedError, ClusterUnreachableError, HoldfastError, MissingError
from holdfast.store import layout, open_store
from holdfast.store.json_reading import read_json_object

PATIENCE_SECONDS = 20.0  # for a request to the server of a named context
DEADLINE = 20.0  # seconds for the note, including retries

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


class Notes:
    """The contexts that may have the run of a request, in the store."""

    def __init__(self, url: str, digest: str) -> None:
        """`url` of the store. Raises MissingError if it is empty, and the errors of a store that cannot be read:
        without the notes of earlier commands a run could be in two clusters."""
        if not url:
            raise MissingError(
                "cluster.contexts: the store notes which cluster may have the run, and none is known here; give "
                "--store, `store` in the spec, or HOLDFAST_STORE"
            )
        self._key, self._store = layout.submission(digest), open_store(url, deadline=DEADLINE)
        try:
            noted = read_json_object(self._store, self._key)
        except MissingError:
            noted = {}
        self._noted = dict.fromkeys(map(str, noted.get("contexts") or ()))  # in order

    def may_have(self, context: str) -> bool:
        """Whether a context may have the run."""
        return context in self._noted

    def add(self, context: str) -> None:
        """Note a context before the request to it."""
        self._noted[context] = None
        self._write()

    def remove(self, context: str) -> None:
        """Remove the note of a context that has refused."""
        self._noted.pop(context, None)
        self._write()

    def _write(self) -> None:
        self._store.put(self._key, json.dumps({"contexts": list(self._noted)}).encode())


def submit_in_order(places: Sequence[P], request: RunRequest, notes: Notes) -> tuple[P, tuple[RunStatus, bool]]:
    """The place that runs a request, and what its `submit` returns: the first where it runs already or has succeeded,
    else the first that takes it.

    Raises ClusterUnreachableError if a place that may have the run does not answer. If no place takes it, raises
    OverQuotaError (a quota of one is full), else ClusterUnreachableError (a server does not answer), else
    AccessDeniedError, else MissingError. The message has the reason of each place.
    """
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
