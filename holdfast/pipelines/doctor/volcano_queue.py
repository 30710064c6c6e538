"""Check that the Volcano queue of a run exists and is open."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.custom_resources import VOLCANO_QUEUES
from holdfast.pipelines.doctor.findings import Finding

NAME = "volcano queue"


def check(cluster: Cluster) -> Iterator[Finding]:
    """Check the spec's queue, otherwise Volcano's default; without a spec, the one of the manifests."""
    if VOLCANO_QUEUES not in cluster.served or cluster.scheduler not in ("", "volcano"):
        return
    wanted = cluster.queue or ("default" if cluster.spec else "holdfast")
    queue = cluster.api.read(f"/apis/scheduling.volcano.sh/v1beta1/queues/{wanted}")
    if queue is None:
        manifest = "manifests/components/volcano/queues.yaml" if wanted in ("holdfast", "holdfast-idle") else ""
        yield cluster.absent(
            NAME, f"there is no Volcano queue {wanted!r}", cluster.scheduler == "volcano", manifest=manifest,
            field="cluster.queue",
        )  # fmt: skip
    elif (state := queue.get("status", {}).get("state", "Open")) != "Open":
        yield Finding(NAME, "warn", f"{wanted} is {state}", f"vcctl queue operate -a open -n {wanted}")
    else:
        yield Finding(NAME, "ok", f"{wanted} is open")
