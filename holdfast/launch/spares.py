"""Spare nodes of a job: the number of its pods, and where spares are impossible. `spare_rendezvous` assigns slots."""

from __future__ import annotations

from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import Problem, SpecError


def pods_of(cluster: Cluster) -> int:
    """The largest number of nodes of a job: those that train, and the spares."""
    return cluster.nodes.max + cluster.spares


def changes_members(cluster: Cluster) -> bool:
    """Whether a gang that lost a node continues within its launch: with fewer nodes, or with a spare."""
    return cluster.nodes.min < cluster.nodes.max or bool(cluster.spares)


def spares_refused(cluster: Cluster, where: str) -> list[Problem]:
    """The problems with spares on `where`, whose nodes meet once for each launch."""
    if not cluster.spares:
        return []
    remedy = "remove it, or run on Kubernetes with cluster.job: pytorchjob"
    return [Problem("cluster.spares", cluster.spares, f"cannot be on {where}, whose nodes meet once a launch", remedy)]


def require_no_spares(cluster: Cluster, where: str) -> None:
    """Raises SpecError if `cluster` has spares, which `where` does not support."""
    if found := spares_refused(cluster, where):
        raise SpecError(found, where)
