"""Check that the service account of the train step has the rights of a launcher in the namespace.

The check is for the account, not for its caller: an administrator may have all rights, and the launcher none.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.custom_resources import CUSTOM_RESOURCES
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec.errors import ExitCode

NAME = "permissions"
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


def check(cluster: Cluster) -> Iterator[Finding]:
    """One finding with everything that is not allowed."""
    account = cluster.launcher
    user = f"system:serviceaccount:{cluster.namespace}:{account}"
    kinds = [one for one in CUSTOM_RESOURCES if one.job and one.name in cluster.served]
    wanted = [(one.group, one.plural, JOB_VERBS) for one in kinds]
    denied = [
        (f"{resource}.{group}".rstrip("."), verb)
        for group, resource, verbs in [*wanted, *LAUNCHER]
        for verb in verbs
        if not _allowed(cluster, user, group, resource, verb)
    ]
    if not denied:
        yield Finding(NAME, "ok", f"{account} may do in {cluster.namespace} what a launcher has to")
        return
    optional = {one.name for one in CUSTOM_RESOURCES if one.job and not one.needed(cluster)}
    listed = ", ".join(f"{verb} {resource}" for resource, verb in denied)
    yield Finding(
        NAME, "warn" if all(resource in optional for resource, _ in denied) else "fail",
        f"service account {account} may not, in {cluster.namespace}: {listed}",
        f"apply the role and bind it: kubectl apply -n {cluster.namespace} -f manifests/components/launcher/role.yaml; "
        f"kubectl create rolebinding -n {cluster.namespace} {account}-launches --role holdfast-launcher "
        f"--serviceaccount {cluster.namespace}:{account}",
        ExitCode.ACCESS_DENIED,
    )  # fmt: skip


def _allowed(cluster: Cluster, user: str, group: str, resource: str, verb: str) -> bool:
    name, _, part = resource.partition("/")
    asked = {"namespace": cluster.namespace, "group": group, "resource": name, "subresource": part, "verb": verb}
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{cluster.namespace}", "system:authenticated"]
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": asked},
    }
    return bool(cluster.api.ask(REVIEWS, review)["status"]["allowed"])
