"""Check that the Kueue LocalQueue of a run exists and admits workloads."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.custom_resources import KUEUE_QUEUES
from holdfast.pipelines.doctor.findings import Finding

NAME = "kueue queue"


def check(cluster: Cluster) -> Iterator[Finding]:
    """Check the spec's queue, otherwise that of the manifests."""
    if KUEUE_QUEUES not in cluster.served or cluster.scheduler not in ("", "kueue"):
        return
    wanted, needed = cluster.queue or "holdfast", cluster.scheduler == "kueue"
    queue = cluster.api.read(f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{cluster.namespace}/localqueues/{wanted}")
    if queue is None:
        manifest = "manifests/components/kueue/queues.yaml" if wanted == "holdfast" else ""
        yield cluster.absent(
            NAME,
            f"namespace {cluster.namespace} has no LocalQueue {wanted!r}",
            needed,
            manifest=manifest,
            field="cluster.queue",
        )
        return
    conditions = {each["type"]: each for each in queue.get("status", {}).get("conditions", [])}
    active = conditions.get("Active", {"status": "True"})
    if active["status"] != "True":
        message = f"{wanted} admits nothing: {active.get('message', 'inactive')}"
        look = f"kubectl describe -n {cluster.namespace} localqueue {wanted}"
        yield Finding(NAME, "fail" if needed else "warn", message, look)
    else:
        yield Finding(NAME, "ok", f"{wanted} leads to ClusterQueue {queue['spec']['clusterQueue']}")
