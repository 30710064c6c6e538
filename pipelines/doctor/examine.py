"""The order of the checks: the API server first, for without it there is no other of the cluster's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.components.runtime.environment import store_url, tracking_uri
from holdfast.components.spec import Spec
from holdfast.components.spec.errors import AccessDeniedError, HoldfastError
from holdfast.pipelines.doctor import (
    custom_resources,
    gang_scheduling,
    kueue_queue,
    mlflow,
    permissions,
    priority_class,
    service_accounts,
    volcano_actions,
    volcano_queue,
)
from holdfast.pipelines.doctor import store as object_store
from holdfast.pipelines.doctor.api_server import reach
from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding

# What is served must be known before what it serves is looked for.
CHECKS: dict[str, Callable[[Cluster], Iterator[Finding]]] = {
    "custom resources": custom_resources.check,
    "gang scheduling": gang_scheduling.check,
    "volcano actions": volcano_actions.check,
    "volcano queue": volcano_queue.check,
    "kueue queue": kueue_queue.check,
    "permissions": permissions.check,
    "service accounts": service_accounts.check,
    "priority class": priority_class.check,
}


def examine(spec: Spec | None = None, namespace: str = "", store: str = "") -> Iterator[Finding]:
    """Look at everything, one finding after another. With a spec, what it asks for must be there; without one, what is
    optional is only mentioned. `namespace` and `store` default to the spec's, then to the surroundings'."""
    finding, api = reach(namespace or (spec.cluster.namespace if spec else None))
    yield finding
    if api is not None:
        cluster = Cluster(api, spec)
        for name, check in CHECKS.items():
            yield from _looked(name, check, cluster)
    yield from object_store.check(store or store_url(spec), on_cluster=api is not None)
    yield from mlflow.check(tracking_uri(), on_cluster=api is not None)


def _looked(name: str, check: Callable[[Cluster], Iterator[Finding]], cluster: Cluster) -> Iterator[Finding]:
    """The findings of a check; one that may not look, or gets no answer, is a warning."""
    try:
        yield from check(cluster)
    except AccessDeniedError as error:
        yield Finding(name, "warn", f"could not look: {error}", "ask an administrator to run this command")
    except HoldfastError as error:
        yield Finding(name, "warn", f"could not look: {error}", "run this command again")
