"""What is deployed can do what it has to and nothing more."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.manifests.rendering import OVERLAYS, name_of, pods, render

READ = {"get", "list", "watch"}
JOB = {*READ, "create", "delete"}
# group/resource -> verbs, for every account. What is not here is not allowed.
ALLOWED = {
    "holdfast-launcher": {
        "kubeflow.org/pytorchjobs": JOB,
        "trainer.kubeflow.org/trainjobs": JOB,
        "trainer.kubeflow.org/trainingruntimes": {"create", "get", "list", "delete"},
        "coordination.k8s.io/leases": {"create", "get", "update", "delete"},
        "batch.volcano.sh/jobs": JOB,
        "/pods": READ,
        "/pods/log": {"get"},
        "/events": READ,
        "argoproj.io/workflows": {"get"},
        "argoproj.io/workflowtaskresults": {"create", "patch"},
    },
    "holdfast-step": {"argoproj.io/workflowtaskresults": {"create", "patch"}},
    "holdfast-sensor": {"argoproj.io/workflows": {"create"}},
    "pipeline-runner": {  # KFP's own account, as a launcher
        "kubeflow.org/pytorchjobs": JOB,
        "trainer.kubeflow.org/trainjobs": JOB,
        "trainer.kubeflow.org/trainingruntimes": {"create", "get", "list", "delete"},
        "coordination.k8s.io/leases": {"create", "get", "update", "delete"},
        "batch.volcano.sh/jobs": JOB,
        "/pods": READ,
        "/pods/log": {"get"},
        "/events": READ,
        "argoproj.io/workflows": {"get"},
    },
}


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(request.param)


def test_every_account_may_do_exactly_what_it_has_to(objects: list[dict[str, Any]]) -> None:
    assert not [thing for thing in objects if thing["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    rules = {thing["metadata"]["name"]: thing["rules"] for thing in objects if thing["kind"] == "Role"}
    granted: dict[str, dict[str, set[str]]] = {}
    for binding in (thing for thing in objects if thing["kind"] == "RoleBinding"):
        for subject in binding["subjects"]:
            assert subject["kind"] == "ServiceAccount"
            verbs = granted.setdefault(subject["name"], {})
            for rule in rules[binding["roleRef"]["name"]]:
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        verbs.setdefault(f"{group}/{resource}", set()).update(rule["verbs"])
    assert granted == {account: ALLOWED[account] for account in granted}
    assert {"holdfast-launcher", "holdfast-step"} <= set(granted)
    assert "*" not in str(rules)
    assert "secrets" not in str(rules)


def test_only_accounts_with_a_role_get_a_token(objects: list[dict[str, Any]]) -> None:
    accounts = {
        thing["metadata"]["name"]: thing["automountServiceAccountToken"]
        for thing in objects
        if thing["kind"] == "ServiceAccount"
    }
    bound = {
        subject["name"] for thing in objects if thing["kind"] == "RoleBinding" for subject in thing["subjects"]
    } - {"pipeline-runner"}
    assert {name for name, token in accounts.items() if token} == bound
    assert "holdfast-train" in set(accounts) - bound
    used = {spec["serviceAccountName"] for _, _, spec in pods(objects) if "serviceAccountName" in spec}
    assert used <= set(accounts)


def test_there_is_no_secret_and_nothing_that_looks_like_one(objects: list[dict[str, Any]]) -> None:
    assert not [name_of(thing) for thing in objects if thing["kind"] == "Secret"]
    for name, _, spec in pods(objects):
        for container in spec["containers"]:
            for variable in container.get("env", []):
                if re.search(r"SECRET|PASSWORD|TOKEN|ACCESS_KEY", variable["name"]):
                    assert "value" not in variable, f"{name}: {variable['name']} stands there in plain text"
    for thing in objects:
        if thing["kind"] == "ConfigMap":
            for key, value in thing["data"].items():
                assert not re.search(r"://[^/\s]*:[^/\s]*@", value), f"{name_of(thing)}: {key} carries a password"


def test_no_container_runs_as_root_or_without_limits(objects: list[dict[str, Any]]) -> None:
    seen = 0
    for name, _, spec in pods(objects):
        pod_context = spec["securityContext"]
        assert pod_context["runAsNonRoot"] is True, name
        assert pod_context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"] + spec.get("initContainers", []):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert context.get("runAsUser", 1) != 0, name
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
            assert {"cpu", "memory"} <= set(container["resources"]["limits"]), name
            seen += 1
        assert not spec.get("hostNetwork"), name
        assert not spec.get("hostPID"), name
        assert not [volume for volume in spec.get("volumes", []) if "hostPath" in volume], name
    assert seen >= 2


def test_every_image_is_of_one_version(objects: list[dict[str, Any]]) -> None:
    for name, _, spec in pods(objects):
        for container in spec["containers"]:
            if "image" in container:
                tag = container["image"].partition("@")[0].rpartition(":")[2]
                assert tag != "latest", name
                assert any(letter.isdigit() for letter in tag), f"{name}: {container['image']} has no version"
            else:
                assert name.partition("/")[0] in ("Sensor", "EventSource", "EventBus")  # the operator's own images


def test_every_object_is_labelled_and_in_the_namespace(objects: list[dict[str, Any]]) -> None:
    cluster_wide = {
        "Namespace", "PriorityClass", "Queue", "ClusterQueue", "ResourceFlavor", "Topology", "WorkloadPriorityClass",
    }  # fmt: skip
    for thing in objects:
        assert thing["metadata"]["labels"]["app.kubernetes.io/part-of"] == "holdfast", name_of(thing)
        if thing["kind"] not in cluster_wide:
            assert thing["metadata"]["namespace"] == "holdfast", name_of(thing)
    for name, metadata, _ in pods(objects):
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "holdfast", name


def test_the_namespace_enforces_the_restricted_standard(objects: list[dict[str, Any]]) -> None:
    (namespace,) = (thing for thing in objects if thing["kind"] == "Namespace")
    for mode in ("enforce", "audit", "warn"):
        assert namespace["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] == "restricted"


def test_traffic_is_denied_unless_a_policy_names_it(objects: list[dict[str, Any]]) -> None:
    policies = {thing["metadata"]["name"]: thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy"}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for name, policy in policies.items():
        assert {} not in policy.get("ingress", []), f"{name} lets everything in"
        assert {} not in policy.get("egress", []), f"{name} lets everything out"
    blocks = [
        peer["ipBlock"] for rule in policies["https"]["egress"] for peer in rule["to"] if "ipBlock" in peer
    ]  # the metadata service hands out the node's credentials
    assert "169.254.169.254/32" in next(block for block in blocks if block["cidr"] == "0.0.0.0/0")["except"]


def test_every_reference_to_an_object_leads_somewhere(objects: list[dict[str, Any]]) -> None:
    names = {name_of(thing) for thing in objects}
    documented = {"holdfast-s3", "holdfast-mlflow"}  # docs/operations.md says how to make them
    for owner, _, spec in pods(objects):
        for container in spec["containers"]:
            for source in container.get("envFrom", []):
                if "configMapRef" in source:
                    assert f"ConfigMap/{source['configMapRef']['name']}" in names, owner
                else:
                    assert source["secretRef"]["name"] in documented, owner
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert reference["name"] in documented, owner
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted <= {volume["name"] for volume in spec.get("volumes", [])}, owner
        for volume in spec.get("volumes", []):
            if claim := volume.get("persistentVolumeClaim"):
                assert f"PersistentVolumeClaim/{claim['claimName']}" in names, owner
    queues = [thing for thing in objects if thing["kind"] == "LocalQueue"]
    assert all(f"ClusterQueue/{queue['spec']['clusterQueue']}" in names for queue in queues)
    for thing in (thing for thing in objects if thing["kind"] == "ClusterQueue"):
        for group in thing["spec"]["resourceGroups"]:
            assert all(f"ResourceFlavor/{flavor['name']}" in names for flavor in group["flavors"])
            covered = set(group["coveredResources"])
            assert all({item["name"] for item in flavor["resources"]} == covered for flavor in group["flavors"])
    for thing in (thing for thing in objects if thing["kind"] == "ResourceFlavor"):
        if topology := thing["spec"].get("topologyName"):
            assert f"Topology/{topology}" in names
    for thing in (thing for thing in objects if thing["kind"] == "Sensor"):
        for dependency in thing["spec"]["dependencies"]:
            assert f"EventSource/{dependency['eventSourceName']}" in names
