"""Check that the namespace's quotas allow the whole gang: a pod that quota refuses never becomes visible."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding
from holdfast.pipelines.doctor.pod_admission import rank_pod
from holdfast.spec.cluster import amount

NAME = "quota"


def check(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each quota that is too small for all ranks together."""
    if cluster.spec is None:
        return
    asked = cluster.spec.cluster
    wanted = _wanted(rank_pod(cluster.spec), asked.nodes.min + asked.spares)
    found = cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}/resourcequotas") or {"items": []}
    short = False
    for quota in found["items"]:
        hard, used = quota.get("spec", {}).get("hard", {}), quota.get("status", {}).get("used", {})
        for resource, needed in wanted.items():
            if resource not in hard or needed <= amount(str(hard[resource])) - amount(str(used.get(resource, "0"))):
                continue
            short = True
            never = needed > amount(str(hard[resource]))
            message = (
                f"{quota['metadata']['name']} allows {hard[resource]} of {resource}, {used.get(resource, '0')} of it "
                f"are in use, and the ranks ask for {_text(needed)}"
            )
            remedy = f"kubectl edit -n {cluster.namespace} resourcequota {quota['metadata']['name']}, or ask for less"
            yield Finding(NAME, "fail" if never else "warn", message, remedy)
    if not short:
        yield Finding(NAME, "ok", f"{len(found['items'])} quotas in {cluster.namespace}, with room for the ranks")


def _wanted(pod: dict[str, Any], nodes: int) -> dict[str, Decimal]:
    """The total requests of the ranks, by the names in quotas."""
    found = {"pods": Decimal(nodes)}
    for kind in ("requests", "limits"):
        for name, value in pod["spec"]["containers"][0]["resources"].get(kind, {}).items():
            found[f"{kind}.{name}"] = amount(str(value)) * nodes
            if kind == "requests" and name in ("cpu", "memory"):
                found[name] = found[f"{kind}.{name}"]
    return found


def _text(value: Decimal) -> str:
    return f"{value:f}" if value < 2**20 else f"{value / 2**30:.1f}Gi"
