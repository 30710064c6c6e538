"""What the engine below Kubeflow Pipelines tries again by itself, as its controller is configured.

What Holdfast emits for Argo says that itself, in every template, and takes no default of the controller's.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.pipelines.backends.kubeflow.engine import CONFIG_MAP, engine_retries
from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding

NAME = "controller"
PLACE = "kubeflow"


def check(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each controller's ConfigMap where Kubeflow Pipelines is installed."""
    for place in dict.fromkeys([PLACE, cluster.namespace]):
        settings = cluster.api.read(f"/api/v1/namespaces/{place}/configmaps/{CONFIG_MAP}")
        if settings is None:
            continue
        try:
            retries = engine_retries(settings.get("data") or {})
        except ValueError as error:
            yield Finding(NAME, "warn", f"{place}: {error}", f"kubectl edit -n {place} configmap {CONFIG_MAP}")
            continue
        whole = retries.failures and retries.errors
        remedy = "" if whole else f"kubectl edit -n {place} configmap {CONFIG_MAP}: retryPolicy: Always"
        yield Finding(NAME, "ok" if whole else "warn", f"{place}: {retries.text}", remedy)
