"""Whether the priority class of a run is there: Kueue has a kind of its own for it."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding

NAME = "priority class"


def check(cluster: Cluster) -> Iterator[Finding]:
    """The spec's, else the one of the manifests."""
    named = cluster.spec.cluster.priority_class if cluster.spec else None
    wanted = named or "holdfast-standard"
    if cluster.scheduler == "kueue":
        path, kind = "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses", "WorkloadPriorityClass"
    else:
        path, kind = "/apis/scheduling.k8s.io/v1/priorityclasses", "PriorityClass"
    if cluster.api.read(f"{path}/{wanted}") is None:
        yield cluster.absent(NAME, f"there is no {kind} {wanted!r}", bool(named))
    else:
        yield Finding(NAME, "ok", f"{kind} {wanted} is there")
