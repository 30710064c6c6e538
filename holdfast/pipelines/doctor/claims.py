"""Check that the volume claims of a spec exist, are bound, and can be mounted by all pods of a run concurrently."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding

NAME = "claims"


def check(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each claim."""
    volumes = cluster.spec.cluster.volumes if cluster.spec else ()
    for name in dict.fromkeys(volume.claim for volume in volumes):
        found = cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}/persistentvolumeclaims/{name}")
        look = f"kubectl describe -n {cluster.namespace} pvc {name}"
        if found is None:
            message = f"namespace {cluster.namespace} has no PersistentVolumeClaim {name!r}"
            yield Finding(NAME, "fail", message, "make it, or name another in cluster.volumes")
            continue
        phase, modes = found.get("status", {}).get("phase", "Pending"), found["spec"].get("accessModes", [])
        if phase == "Lost":
            yield Finding(NAME, "fail", f"{name} is Lost", look)
        elif not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
            message = f"{name} is {' and '.join(modes)}: pods on two nodes cannot mount it at once"
            yield Finding(NAME, "warn", message, "use a claim with ReadWriteMany, or S3")
        elif phase != "Bound":
            yield Finding(NAME, "warn", f"{name} is {phase}: it may wait for its first pod, or for ever", look)
        else:
            yield Finding(NAME, "ok", f"{name} is bound")
