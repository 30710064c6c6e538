"""Check the retries of the engine below Kubeflow Pipelines in its controller's configuration.

Holdfast's Argo templates set their retries explicitly and use no default of the controller.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.pipelines.backends.kubeflow.engine import CONFIG_MAP, engine_retries
from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding

NAME = "controller"
PLACE = "kubeflow"


def check(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each controller ConfigMap that exists."""
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
