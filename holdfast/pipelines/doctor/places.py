"""Check that Kueue, or node labels, define the topology levels of a spec's placement.

`pod_placement` checks Volcano's.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding

NAME = "places"
TOPOLOGIES = "/apis/kueue.x-k8s.io/v1beta2/topologies"


def check(cluster: Cluster) -> Iterator[Finding]:
    """One finding if the spec prefers or requires a placement."""
    if cluster.spec is None or cluster.scheduler == "volcano" or cluster.spec.cluster.topology.placement == "any":
        return
    wish = cluster.spec.cluster.topology
    needed = wish.placement == "require"
    if cluster.scheduler == "kueue":
        found = (cluster.api.read(TOPOLOGIES) or {"items": []})["items"]
        levels = {level["nodeLabel"] for one in found for level in one["spec"].get("levels", [])}
        there, what = (
            wish.level in levels,
            f"{len(found)} Topologies, with the levels {', '.join(sorted(levels)) or 'none'}",
        )
        remedy = f"add {wish.level} to a Topology of Kueue (manifests/components/kueue), or name another level"
    else:
        nodes = (cluster.api.read("/api/v1/nodes") or {"items": []})["items"]
        labelled = [node for node in nodes if wish.level in (node.get("metadata", {}).get("labels") or {})]
        there, what = bool(labelled), f"{len(labelled)} of {len(nodes)} nodes carry the label {wish.level}"
        remedy = f"label the nodes, or name another cluster.topology.level: kubectl get nodes -L {wish.level}"
    yield Finding(NAME, "ok" if there else "fail" if needed else "warn", what, "" if there else remedy)
