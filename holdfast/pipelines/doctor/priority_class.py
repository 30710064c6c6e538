"""Check that the priority class of a run exists. Kueue has a separate kind of priority class."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding

NAME = "priority class"


def check(cluster: Cluster) -> Iterator[Finding]:
    """Check the spec's class; with `everything`, by default that of the manifests."""
    named = cluster.spec.cluster.priority_class if cluster.spec else None
    if not named and not cluster.everything:
        return
    wanted = named or "holdfast-standard"
    if cluster.scheduler == "kueue":
        path, kind = "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses", "WorkloadPriorityClass"
        manifest = "manifests/components/kueue/priorities.yaml"
    else:
        path, kind = "/apis/scheduling.k8s.io/v1/priorityclasses", "PriorityClass"
        manifest = "manifests/base/priority-classes.yaml"
    if cluster.api.read(f"{path}/{wanted}") is None:
        known = wanted in ("holdfast-low", "holdfast-standard", "holdfast-high")
        yield cluster.absent(
            NAME, f"there is no {kind} {wanted!r}", bool(named), manifest=manifest if known else "",
            field="cluster.priority_class",
        )  # fmt: skip
    else:
        yield Finding(NAME, "ok", f"{kind} {wanted} is there")
