"""Spare nodes of a job: how many pods it takes, and where there can be none. Seats are given out by `seats`."""

from __future__ import annotations

from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import Problem, SpecError


def pods_of(cluster: Cluster) -> int:
    """How many nodes a job asks for at most: those that train, and those that stand by."""
    return cluster.nodes.max + cluster.spares


def changes_members(cluster: Cluster) -> bool:
    """Whether a gang goes on within its launch when it has lost a node: with fewer, or with a spare."""
    return cluster.nodes.min < cluster.nodes.max or bool(cluster.spares)


def spares_refused(cluster: Cluster, where: str) -> list[Problem]:
    """What is wrong with spares on `where`, whose nodes meet once a launch."""
    if not cluster.spares:
        return []
    remedy = "remove it, or run on Kubernetes with cluster.job: pytorchjob"
    return [Problem("cluster.spares", cluster.spares, f"cannot be on {where}, whose nodes meet once a launch", remedy)]


def require_no_spares(cluster: Cluster, where: str) -> None:
    """Raises SpecError where `cluster` asks for spares on `where`."""
    if found := spares_refused(cluster, where):
        raise SpecError(found, where)
