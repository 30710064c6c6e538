"""Backends that run a DAG: this machine, machines behind sshd, Kubeflow, Argo, Slurm, Ray. See `interface`.

Importing this package imports none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.pipelines.backends import capabilities
from holdfast.pipelines.backends.capabilities import Capabilities
from holdfast.spec.errors import UsageError

if TYPE_CHECKING:
    from holdfast.pipelines.backends.interface import Backend

VARIABLE = "HOLDFAST_BACKEND"  # the default backend


def open_backend(name: str, *, store: str = "", endpoint: str = "", namespace: str = "") -> Backend:
    """The backend `name`.

    - `store`: URL of the store of local runs.
    - `endpoint`: URL of Kubeflow, or of Ray's Jobs API; for ssh the file of the machines; for Argo a context of the
      kubeconfig.
    - `namespace`: of Kubeflow's users, or of Kubernetes.

    Raises UsageError.
    """
    require_known(name)
    return BACKENDS[name].open(store, endpoint, namespace)


def require_known(name: str) -> None:
    """Raise UsageError if no backend has this name."""
    if name not in BACKENDS:
        field = VARIABLE if os.environ.get(VARIABLE) == name else "backend"
        raise UsageError(f"{name!r} is not a backend", field, f"use one of {', '.join(BACKENDS)}")


def _local(store: str, _endpoint: str, _namespace: str) -> Backend:
    from holdfast.pipelines.backends.local.backend import Local

    return Local(store)


def _ssh(store: str, endpoint: str, _namespace: str) -> Backend:
    from holdfast.pipelines.backends.ssh.backend import Ssh

    return Ssh(store, endpoint)


def _kubeflow(store: str, endpoint: str, namespace: str) -> Backend:
    from holdfast.pipelines.backends.kubeflow.backend import Kubeflow
    from holdfast.pipelines.backends.kubeflow.connection import Access

    return Kubeflow(Access.from_environment(endpoint, namespace), store)


def _argo(_store: str, endpoint: str, namespace: str) -> Backend:
    from holdfast.pipelines.backends.argo.backend import Argo

    return Argo(namespace, context=endpoint)


def _slurm(store: str, _endpoint: str, _namespace: str) -> Backend:
    from holdfast.pipelines.backends.slurm.backend import Slurm

    return Slurm(store)


def _ray(store: str, endpoint: str, _namespace: str) -> Backend:
    from holdfast.pipelines.backends.ray.backend import Ray

    return Ray(store, endpoint)


def _address_of_kubeflow(endpoint: str) -> str:
    return endpoint or os.environ.get("KFP_ENDPOINT", "")


def _hosts_of_ssh(endpoint: str) -> str:
    from holdfast.launch.ssh.hosts import hosts_file

    return str(hosts_file(endpoint))


def _address_of_ray(endpoint: str) -> str:
    from holdfast.pipelines.backends.ray.client import address_of

    return address_of(endpoint)


@dataclass(frozen=True)
class Entry:
    """A backend in the table."""

    open: Callable[[str, str, str], Backend]  # from store, endpoint and namespace
    capabilities: Capabilities
    address: Callable[[str], str] = str  # where the backend of a request with this endpoint is, for its record


BACKENDS: dict[str, Entry] = {
    "local": Entry(_local, capabilities.LOCAL),
    "kubeflow": Entry(_kubeflow, capabilities.KUBEFLOW, _address_of_kubeflow),
    "argo": Entry(_argo, capabilities.ARGO),
    "slurm": Entry(_slurm, capabilities.SLURM),
    "ssh": Entry(_ssh, capabilities.SSH, _hosts_of_ssh),
    "ray": Entry(_ray, capabilities.RAY, _address_of_ray),
}
DEFAULT = "local"  # where nothing names a backend
WITH_ENDPOINT = "kubeflow"  # the backend of a run of which only an endpoint is known


def capabilities_of(name: str) -> Capabilities:
    """What the backend `name` can do. Raises UsageError."""
    require_known(name)
    return BACKENDS[name].capabilities


def backends_with(capability: str) -> list[str]:
    """The names of the backends that have a capability."""
    return [name for name, entry in BACKENDS.items() if getattr(entry.capabilities, capability)]
