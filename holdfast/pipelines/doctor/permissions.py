"""Checks of rights: the service accounts of the steps, what they may do, and network policies."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from holdfast.pipelines.doctor.cluster import CUSTOM_RESOURCES, LAUNCHERS, RANK_ACCOUNT, SERVICE_ACCOUNTS, Cluster
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec.errors import ExitCode

PERMISSIONS_CHECK = "permissions"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
# (group, resource, verbs), as in manifests/components/launcher/role.yaml.
JOB_VERBS = ("create", "get", "list", "watch", "delete")
WATCH = ("get", "list", "watch")
LAUNCHER: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("", "pods", WATCH),
    ("", "pods/log", ("get",)),
    ("coordination.k8s.io", "leases", ("create", "get", "update", "delete")),
    ("", "events", ("list",)),
    ("", "secrets", ("create",)),  # the key of a launch
    ("argoproj.io", "workflows", ("get",)),
)


def check_permissions(cluster: Cluster) -> Iterator[Finding]:
    """One finding with everything that is not allowed."""
    account = cluster.launcher
    user = f"system:serviceaccount:{cluster.namespace}:{account}"
    job_resources = [
        custom_resource
        for custom_resource in CUSTOM_RESOURCES
        if custom_resource.job and custom_resource.name in cluster.served
    ]
    rights = [(custom_resource.group, custom_resource.plural, JOB_VERBS) for custom_resource in job_resources]
    denied = [
        (f"{resource}.{group}".rstrip("."), verb)
        for group, resource, verbs in [*rights, *LAUNCHER]
        for verb in verbs
        if not _allowed(cluster, user, group, resource, verb)
    ]
    if not denied:
        yield Finding(PERMISSIONS_CHECK, "ok", f"{account} may do in {cluster.namespace} what a launcher has to")
        return
    optional = {
        custom_resource.name
        for custom_resource in CUSTOM_RESOURCES
        if custom_resource.job and not custom_resource.needed(cluster)
    }
    rights_text = ", ".join(f"{verb} {resource}" for resource, verb in denied)
    yield Finding(
        PERMISSIONS_CHECK,
        "warn" if all(resource in optional for resource, _ in denied) else "fail",
        f"service account {account} may not, in {cluster.namespace}: {rights_text}",
        f"apply the role and bind it: kubectl apply -n {cluster.namespace} -f manifests/components/launcher/role.yaml; "
        f"kubectl create rolebinding -n {cluster.namespace} {account}-launches --role holdfast-launcher "
        f"--serviceaccount {cluster.namespace}:{account}",
        ExitCode.ACCESS_DENIED,
    )


def _allowed(cluster: Cluster, user: str, group: str, resource: str, verb: str) -> bool:
    name, _, part = resource.partition("/")
    attributes = {"namespace": cluster.namespace, "group": group, "resource": name, "subresource": part, "verb": verb}
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{cluster.namespace}", "system:authenticated"]
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
    }
    return bool(cluster.api.ask(REVIEWS, review)["status"]["allowed"])


# Check that the service accounts of a run's pods exist.

SERVICE_ACCOUNTS_CHECK = "service accounts"
_NO_WORD = "a run of Kubeflow Pipelines fails there before its first step, and KFP does not say why"


def check_service_accounts(cluster: Cluster) -> Iterator[Finding]:
    """Check the accounts of the manifests, and the spec's account for the training pods."""
    spec_account = cluster.spec.cluster.service_account if cluster.spec else None
    steps = ["holdfast-step", "holdfast-notify"] if cluster.launcher == LAUNCHERS[0] else []
    ranks = [spec_account or RANK_ACCOUNT] if spec_account or steps else []
    for name in dict.fromkeys([*steps, cluster.launcher, *ranks]):
        if cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts/{name}") is None:
            message = f"namespace {cluster.namespace} has no service account {name!r}"
            is_ours = name in (LAUNCHERS[0], "holdfast-step", "holdfast-notify", RANK_ACCOUNT)
            field = "cluster.service_account" if name == spec_account else "--service-account"
            manifest = SERVICE_ACCOUNTS if is_ours else ""
            is_needed = name == spec_account
            if cluster.kubeflow and name == cluster.launcher:
                message, is_needed = f"{message}: {_NO_WORD}", True
            yield cluster.absent(SERVICE_ACCOUNTS_CHECK, message, is_needed, manifest=manifest, field=field)
        else:
            yield Finding(SERVICE_ACCOUNTS_CHECK, "ok", f"{cluster.namespace} has {name}")


# Check that the network policies of the namespace allow the traffic of ranks and steps.
#
# A pod that no egress policy selects can reach everything. The check covers ports, and peers only among the ranks.
# Whether a policy allows the address behind a port is visible only from the pod.

NETWORK_POLICIES_CHECK = "network policies"
RANK = {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/component": "train"}
STEP = {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/component": "step-train"}
API = "the API server"
Policy = dict[str, Any]


def check_network_policies(cluster: Cluster) -> Iterator[Finding]:
    """One finding with all blocked flows."""
    reply = cluster.api.read(f"/apis/networking.k8s.io/v1/namespaces/{cluster.namespace}/networkpolicies")
    policies: list[Policy] = [item["spec"] for item in (reply or {}).get("items", [])]
    labels = dict(cluster.spec.cluster.labels) if cluster.spec else {}
    blocked = []
    for origin, pod in (("ranks", {**labels, **RANK}), ("steps", {**labels, **STEP})):
        egress = [rule for policy in _of(policies, pod, "Egress") for rule in policy.get("egress", [])]
        if not _of(policies, pod, "Egress"):
            continue
        for destination, port, protocol in _needed(cluster):
            if destination == API and origin == "ranks":  # ranks never use it
                continue
            if not any(_has(rule, port, protocol) for rule in egress):
                blocked.append(f"{origin} to {destination} ({protocol} {port})")
    if not _among_ranks(policies, {**labels, **RANK}):
        blocked.append("ranks to ranks")
    if blocked:
        remedy = (
            f"kubectl apply -n {cluster.namespace} -f manifests/components/kubeflow/network-policies.yaml, or your own"
        )
        yield Finding(NETWORK_POLICIES_CHECK, "fail", f"nothing lets through: {', '.join(blocked)}", remedy)
    else:
        yield Finding(
            NETWORK_POLICIES_CHECK,
            "ok",
            f"{len(policies)} policies in {cluster.namespace} let through what a run needs",
        )


def _needed(cluster: Cluster) -> Iterator[tuple[str, int, str]]:
    yield "names", 53, "UDP"
    # A policy sees the server's address and port, not those of its Service.
    slices = cluster.api.read("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes") or {}
    yield API, (slices.get("ports") or [{"port": 443}])[0]["port"], "TCP"
    name = (cluster.spec.cluster.settings if cluster.spec else None) or "holdfast-settings"
    settings = cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}/configmaps/{name}") or {}
    for destination, key in (("MLflow", "MLFLOW_TRACKING_URI"), ("S3", "AWS_ENDPOINT_URL")):
        url = urlsplit((settings.get("data") or {}).get(key, ""))
        if url.scheme in ("http", "https"):
            yield destination, url.port or {"http": 80, "https": 443}[url.scheme], "TCP"


def _of(policies: list[Policy], pod: dict[str, str], direction: str) -> list[Policy]:
    """The policies that select this pod."""
    selecting = []
    for policy in policies:
        types = policy.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in policy else [])]
        if direction in types and _selects(policy.get("podSelector") or {}, pod):
            selecting.append(policy)
    return selecting


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for rule in selector.get("matchExpressions", []):
        actual, values = labels.get(rule["key"]), rule.get("values", [])
        fits = {
            "In": actual in values,
            "NotIn": actual not in values,
            "Exists": actual is not None,
            "DoesNotExist": actual is None,
        }[rule["operator"]]
        if not fits:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def _has(rule: dict[str, Any], port: int, protocol: str) -> bool:
    if not rule.get("ports"):
        return not rule.get("to")  # every port, but only to some peers
    return any(
        port_rule.get("protocol", "TCP") == protocol
        and (
            "port" not in port_rule
            or port_rule["port"] == port
            or port_rule["port"] < port <= port_rule.get("endPort", 0)
        )
        for port_rule in rule["ports"]
        if isinstance(port_rule.get("port", 0), int)
    )


def _among_ranks(policies: list[Policy], rank: dict[str, str]) -> bool:
    for direction, field, peer in (("Egress", "egress", "to"), ("Ingress", "ingress", "from")):
        selecting = _of(policies, rank, direction)
        rules = [rule for policy in selecting for rule in policy.get(field, []) if not rule.get("ports")]
        is_allowed = any(
            not rule.get(peer)
            or any(
                "podSelector" in peer_rule and _selects(peer_rule["podSelector"] or {}, rank)
                for peer_rule in rule[peer]
            )
            for rule in rules
        )
        if selecting and not is_allowed:
            return False
    return True
