"""Check that the network policies of the namespace allow the traffic of ranks and steps.

A pod that no egress policy selects can reach everything. The check covers ports, and peers only among the ranks.
Whether a policy allows the address behind a port is visible only from the pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding

NAME = "network policies"
RANK = {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/component": "train"}
STEP = {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/component": "step-train"}
API = "the API server"
Policy = dict[str, Any]


def check(cluster: Cluster) -> Iterator[Finding]:
    """One finding with all blocked flows."""
    found = cluster.api.read(f"/apis/networking.k8s.io/v1/namespaces/{cluster.namespace}/networkpolicies")
    policies: list[Policy] = [one["spec"] for one in (found or {}).get("items", [])]
    labels = dict(cluster.spec.cluster.labels) if cluster.spec else {}
    blocked = []
    for who, pod in (("ranks", {**labels, **RANK}), ("steps", {**labels, **STEP})):
        egress = [rule for policy in _of(policies, pod, "Egress") for rule in policy.get("egress", [])]
        if not _of(policies, pod, "Egress"):
            continue
        for what, port, protocol in _needed(cluster):
            if what == API and who == "ranks":  # ranks never use it
                continue
            if not any(_has(rule, port, protocol) for rule in egress):
                blocked.append(f"{who} to {what} ({protocol} {port})")
    if not _among_ranks(policies, {**labels, **RANK}):
        blocked.append("ranks to ranks")
    if blocked:
        remedy = (
            f"kubectl apply -n {cluster.namespace} -f manifests/components/kubeflow/network-policies.yaml, or your own"
        )
        yield Finding(NAME, "fail", f"nothing lets through: {', '.join(blocked)}", remedy)
    else:
        yield Finding(NAME, "ok", f"{len(policies)} policies in {cluster.namespace} let through what a run needs")


def _needed(cluster: Cluster) -> Iterator[tuple[str, int, str]]:
    yield "names", 53, "UDP"
    # A policy sees the server's address and port, not those of its Service.
    slices = cluster.api.read("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes") or {}
    yield API, (slices.get("ports") or [{"port": 443}])[0]["port"], "TCP"
    name = (cluster.spec.cluster.settings if cluster.spec else None) or "holdfast-settings"
    settings = cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}/configmaps/{name}") or {}
    for what, key in (("MLflow", "MLFLOW_TRACKING_URI"), ("S3", "AWS_ENDPOINT_URL")):
        url = urlsplit((settings.get("data") or {}).get(key, ""))
        if url.scheme in ("http", "https"):
            yield what, url.port or {"http": 80, "https": 443}[url.scheme], "TCP"


def _of(policies: list[Policy], pod: dict[str, str], direction: str) -> list[Policy]:
    """The policies that select this pod."""
    found = []
    for policy in policies:
        types = policy.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in policy else [])]
        if direction in types and _selects(policy.get("podSelector") or {}, pod):
            found.append(policy)
    return found


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for rule in selector.get("matchExpressions", []):
        there, values = labels.get(rule["key"]), rule.get("values", [])
        fits = {
            "In": there in values,
            "NotIn": there not in values,
            "Exists": there is not None,
            "DoesNotExist": there is None,
        }[rule["operator"]]
        if not fits:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def _has(rule: dict[str, Any], port: int, protocol: str) -> bool:
    if not rule.get("ports"):
        return not rule.get("to")  # every port, but only to some peers
    return any(
        one.get("protocol", "TCP") == protocol
        and ("port" not in one or one["port"] == port or one["port"] < port <= one.get("endPort", 0))
        for one in rule["ports"]
        if isinstance(one.get("port", 0), int)
    )


def _among_ranks(policies: list[Policy], rank: dict[str, str]) -> bool:
    for direction, field, peer in (("Egress", "egress", "to"), ("Ingress", "ingress", "from")):
        about = _of(policies, rank, direction)
        rules = [rule for policy in about for rule in policy.get(field, []) if not rule.get("ports")]
        lets = any(
            not rule.get(peer)
            or any("podSelector" in one and _selects(one["podSelector"] or {}, rank) for one in rule[peer])
            for rule in rules
        )
        if about and not lets:
            return False
    return True
