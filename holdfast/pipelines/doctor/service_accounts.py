"""Check that the service accounts of a run's pods exist."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.pipelines.doctor.cluster import LAUNCHERS, SERVICE_ACCOUNTS, Cluster
from holdfast.pipelines.doctor.findings import Finding

NAME = "service accounts"
_NO_WORD = "a run of Kubeflow Pipelines fails there before its first step, and KFP does not say why"


def check(cluster: Cluster) -> Iterator[Finding]:
    """Check the accounts of the manifests, and the spec's account for the training pods."""
    named = cluster.spec.cluster.service_account if cluster.spec else None
    steps = ["holdfast-step", "holdfast-notify"] if cluster.launcher == LAUNCHERS[0] else []
    ranks = [named or "holdfast-train"] if named or steps else []
    for name in dict.fromkeys([*steps, cluster.launcher, *ranks]):
        if cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts/{name}") is None:
            message = f"namespace {cluster.namespace} has no service account {name!r}"
            ours = name in (LAUNCHERS[0], "holdfast-step", "holdfast-notify", "holdfast-train")
            field = "cluster.service_account" if name == named else "--service-account"
            manifest = SERVICE_ACCOUNTS if ours else ""
            needed = name == named
            if cluster.kubeflow and name == cluster.launcher:
                message, needed = f"{message}: {_NO_WORD}", True
            yield cluster.absent(NAME, message, needed, manifest=manifest, field=field)
        else:
            yield Finding(NAME, "ok", f"{cluster.namespace} has {name}")
