"""Backends that run a DAG: this machine, Kubeflow Pipelines, Argo Workflows, Slurm, Ray. See `interface`.

Importing this package imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.spec.errors import MissingError

if TYPE_CHECKING:
    from holdfast.pipelines.backends.interface import Backend

VARIABLE = "HOLDFAST_BACKEND"  # the default backend


def open_backend(name: str, *, store: str = "", endpoint: str = "", namespace: str = "") -> Backend:
    """The backend `name`.

    - `store`: URL of the store of local runs.
    - `endpoint`: URL of Kubeflow, or of Ray's Jobs API.
    - `namespace`: of Kubeflow's users, or of Kubernetes.

    Raises MissingError.
    """
    require_known(name)
    return BACKENDS[name](store, endpoint, namespace)


def require_known(name: str) -> None:
    """Raise MissingError if no backend has this name."""
    if name not in BACKENDS:
        raise MissingError(f"{name!r}: is no backend; write one of {', '.join(BACKENDS)}")


def _local(store: str, _endpoint: str, _namespace: str) -> Backend:
    from holdfast.pipelines.backends.local.backend import Local

    return Local(store)


def _kubeflow(store: str, endpoint: str, namespace: str) -> Backend:
    from holdfast.pipelines.backends.kubeflow.backend import Kubeflow
    from holdfast.pipelines.backends.kubeflow.connection import Access

    return Kubeflow(Access.from_environment(endpoint, namespace), store)


def _argo(_store: str, _endpoint: str, namespace: str) -> Backend:
    from holdfast.pipelines.backends.argo.backend import Argo

    return Argo(namespace)


def _slurm(store: str, _endpoint: str, _namespace: str) -> Backend:
    from holdfast.pipelines.backends.slurm.backend import Slurm

    return Slurm(store)


def _ray(store: str, endpoint: str, _namespace: str) -> Backend:
    from holdfast.pipelines.backends.ray.backend import Ray

    return Ray(store, endpoint)


BACKENDS: dict[str, Callable[[str, str, str], Backend]] = {
    "local": _local,
    "kubeflow": _kubeflow,
    "argo": _argo,
    "slurm": _slurm,
    "ray": _ray,
}
SWEEPING = ("local", "kubeflow", "argo", "slurm")  # can run the DAG of a sweep
SHARED_VOLUMES = ("ray",)  # their machines see `cluster.volumes` like the submitting machine
SHARED_FOLDERS = ("slurm",)  # their machines see the submitting machine's folders under the same paths
