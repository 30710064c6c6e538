"""Submission to the first of several clusters that takes a run (`cluster.contexts`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, TypeVar

from holdfast.launch.kubernetes.api_errors import OverQuotaError, WebhookAwayError
from holdfast.pipelines.backends.interface import RunStatus
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec.errors import AccessDeniedError, ClusterUnreachableError, HoldfastError, MissingError

PATIENCE_SECONDS = 20.0  # for a request to the server of a named context

# The server has taken nothing. After any other failure the Workflow may exist, so no second cluster is asked.
_REFUSALS = (AccessDeniedError, MissingError, OverQuotaError, WebhookAwayError)

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


def submit_in_order(places: Sequence[P], request: RunRequest) -> tuple[P, tuple[RunStatus, bool]]:
    """The place that runs a request, and what its `submit` returns: the first where it runs already or has succeeded,
    else the first that takes it.

    If no place takes it, raises OverQuotaError (a quota of one is full), else ClusterUnreachableError (a server does
    not answer), else AccessDeniedError. The message has the reason of each place.
    """
    refused: dict[str, HoldfastError] = {}
    open_places: list[P] = []
    for place in places:
        try:
            found = place.submitted(request)
        except HoldfastError as error:
            refused[place.context] = error
            log.warning("context %s is left out: %s", place.context, error)
            continue
        if found is not None:
            return place, (found, False)
        open_places.append(place)
    for place in open_places:
        try:
            return place, place.submit(request)
        except _REFUSALS as error:
            refused[place.context] = error
            log.warning("context %s does not take the run: %s", place.context, error)
    kinds = (OverQuotaError, ClusterUnreachableError, AccessDeniedError)
    kind = next((each for each in kinds if any(isinstance(one, each) for one in refused.values())), AccessDeniedError)
    reasons = "; ".join(f"{context}: {error}" for context, error in refused.items())
    raise kind(f"no context of cluster.contexts takes the run: {reasons}")
