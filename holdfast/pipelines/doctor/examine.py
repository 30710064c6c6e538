"""Order of the checks: the API server first, because the other checks of the cluster depend on it."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from holdfast.launch.kubernetes.client import Api
from holdfast.pipelines.backends import capabilities_of
from holdfast.pipelines.doctor import admission, cluster, permissions, pods, ray, scheduling, slurm, storage
from holdfast.pipelines.doctor.cluster import LAUNCHERS, Cluster, reach
from holdfast.pipelines.doctor.findings import Finding
from holdfast.runtime.environment import store_url, tracking_uri
from holdfast.spec import Spec
from holdfast.spec.errors import AccessDeniedError, HoldfastError

Where = TypeVar("Where")

# Served resources must be known before checks of their objects.
CHECKS: dict[str, Callable[[Cluster], Iterator[Finding]]] = {
    "custom resources": cluster.check_custom_resources,
    "gang scheduling": scheduling.check_gang_scheduling,
    "volcano actions": scheduling.check_volcano_actions,
    "volcano queue": scheduling.check_volcano_queue,
    "kueue queue": scheduling.check_kueue_queue,
    "permissions": permissions.check_permissions,
    "service accounts": permissions.check_service_accounts,
    "priority class": scheduling.check_priority_class,
    pods.CAPABILITIES: pods.capabilities,
    pods.DEVICES: pods.devices,
    pods.TOPOLOGY: pods.hypernodes,
    pods.QUOTA: pods.quota,
    "settings": cluster.check_settings,
    "pod admission": admission.check_pod_admission,
    "account policy": admission.check_account_policy,
    "quota": pods.check_quota,
    "claims": cluster.check_claims,
    "network policies": permissions.check_network_policies,
    "accelerators": pods.check_accelerators,
    "places": scheduling.check_places,
    "images": pods.check_images,
    "controller": cluster.check_controller,
}

SCHEDULERS: dict[str, Callable[[Spec | None, str], Iterator[Finding]]] = {  # without Kubernetes
    "slurm": lambda spec, store: slurm.check(spec, store or store_url(spec)),
    "ray": lambda spec, store: ray.check(spec, store, store or store_url(spec)),
}


def examine(
    spec: Spec | None = None,
    namespace: str = "",
    store: str = "",
    backend: str = "",
    service_account: str = "",
    everything: bool = False,
) -> Iterator[Finding]:
    """Check everything that a spec needs, or without a spec, that every run needs. Yields one finding after another.

    - `everything`: also check optional parts; a missing one is a warning.
    - `namespace`, `store`: default to the spec's, then to the environment's.
    - `backend`: slurm checks a Slurm, ray a Ray, all others a Kubernetes; kubeflow checks the account that KFP uses
      there.
    - `service_account`: of the train step; default: the first known one that exists.
    """
    if backend in SCHEDULERS:
        scheduler = SCHEDULERS[backend]
        yield from _looked(backend, lambda _: scheduler(spec, store), None)
        yield from storage.check_store(store or store_url(spec), on_cluster=False)
        yield from storage.check_mlflow(tracking_uri(), on_cluster=False, spec=spec)
        return
    finding, api = reach(namespace or (spec.cluster.namespace if spec else None))
    yield finding
    if api is not None:
        kubeflow = bool(backend) and capabilities_of(backend).own_account
        cluster = Cluster(api, spec, service_account or _account(api, kubeflow), kubeflow, everything)
        for name, check in CHECKS.items():
            yield from _looked(name, check, cluster)
    yield from storage.check_store(store or store_url(spec), on_cluster=api is not None)
    yield from storage.check_mlflow(tracking_uri(), on_cluster=api is not None, spec=spec)


def _account(api: Api, kubeflow: bool) -> str:
    """The first existing account for steps in the namespace. KFP uses none of Holdfast's by default."""
    names = LAUNCHERS[1:] if kubeflow else LAUNCHERS
    for name in names:
        with suppress(HoldfastError):
            if api.read(f"/api/v1/namespaces/{api.namespace}/serviceaccounts/{name}") is not None:
                return name
    return names[-1 if kubeflow else 0]


def _looked(name: str, check: Callable[[Where], Iterator[Finding]], cluster: Where) -> Iterator[Finding]:
    """The findings of a check; without the right to read, or without a response, a warning."""
    try:
        yield from check(cluster)
    except AccessDeniedError as error:
        yield Finding(name, "warn", f"could not look: {error}", "ask an administrator to run this command")
    except HoldfastError as error:
        yield Finding(name, "warn", f"could not look: {error}", "run this command again")
