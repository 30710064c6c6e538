"""Deployed accounts and pods have the rights that they need and no more."""

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.launch.kubernetes.kinds import KINDS
from holdfast.launch.kubernetes.owner import WORKFLOW_LABEL
from holdfast.pipelines.backends.argo.pods import account_of
from holdfast.pipelines.doctor.cluster import RANK_ACCOUNT
from holdfast.spec import Spec
from holdfast.steps import STEPS
from tests.manifests.rendering import MANIFESTS, OVERLAYS, PROFILE, name_of, pods, render, render_in, render_with

READ = {"get", "list", "watch"}
JOB = {*READ, "create", "delete"}
# group/resource -> verbs, for every account. Everything else is forbidden.
ALLOWED = {
    "holdfast-launcher": {
        "kubeflow.org/pytorchjobs": JOB,
        "trainer.kubeflow.org/trainjobs": JOB,
        "trainer.kubeflow.org/trainingruntimes": {"create", "get", "list", "delete"},
        "coordination.k8s.io/leases": {"create", "get", "update", "delete"},
        "batch.volcano.sh/jobs": JOB,
        "/secrets": {"create"},  # it creates the key of a launch and reads none
        "/pods": READ,
        "/pods/log": {"get"},
        "/events": {"list"},
        "argoproj.io/workflows": {"get"},
        "argoproj.io/workflowtaskresults": {"create", "patch"},
    },
    "holdfast-step": {"argoproj.io/workflowtaskresults": {"create", "patch"}},
    "holdfast-notify": {
        "kubeflow.org/pytorchjobs": {"list", "delete"},
        "trainer.kubeflow.org/trainjobs": {"list", "delete"},
        "trainer.kubeflow.org/trainingruntimes": {"list", "delete"},
        "batch.volcano.sh/jobs": {"list", "delete"},
        "coordination.k8s.io/leases": {"create", "get", "update", "delete"},
        "/pods": {"get"},
        "argoproj.io/workflowtaskresults": {"create", "patch"},
    },
    "holdfast-sensor": {"argoproj.io/workflows": {"create"}},
}


AUDITED = "kind with audits"  # with a component that is in no overlay


@pytest.fixture(params=[*OVERLAYS, AUDITED])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    return render_with("audit", "kind", tmp_path) if request.param == AUDITED else render(request.param)


def test_every_account_may_do_exactly_what_it_has_to(objects: list[dict[str, Any]]) -> None:
    assert not [document for document in objects if document["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    rules = {document["metadata"]["name"]: document["rules"] for document in objects if document["kind"] == "Role"}
    granted: dict[str, dict[str, set[str]]] = {}
    for binding in (document for document in objects if document["kind"] == "RoleBinding"):
        for subject in binding["subjects"]:
            assert subject["kind"] == "ServiceAccount"
            verbs = granted.setdefault(subject["name"], {})
            for rule in rules[binding["roleRef"]["name"]]:
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        verbs.setdefault(f"{group}/{resource}", set()).update(rule["verbs"])
    assert granted == {account: ALLOWED[account] for account in granted}
    assert {"holdfast-launcher", "holdfast-step", "holdfast-notify"} <= set(granted)
    # No binding uses it.
    submitting = {resource for rule in rules["holdfast-submitter"] for resource in rule["resources"]}
    assert submitting == {"workflows", "workflowtemplates", "cronworkflows", "pods", "pods/log", "events"}
    assert "*" not in str(rules)
    assert all(
        rule["verbs"] == ["create"]
        for role_rules in rules.values()
        for rule in role_rules
        if "secrets" in rule["resources"]
    )


def test_only_accounts_with_a_role_get_a_token(objects: list[dict[str, Any]]) -> None:
    accounts = {
        document["metadata"]["name"]: document["automountServiceAccountToken"]
        for document in objects
        if document["kind"] == "ServiceAccount"
    }
    bound = {
        subject["name"] for document in objects if document["kind"] == "RoleBinding" for subject in document["subjects"]
    }
    assert {name for name, token in accounts.items() if token} == bound
    assert "holdfast-train" in set(accounts) - bound
    used_accounts = {spec["serviceAccountName"] for _, _, spec in pods(objects) if "serviceAccountName" in spec}
    assert used_accounts <= set(accounts)


def test_there_is_no_secret_and_nothing_that_looks_like_one(objects: list[dict[str, Any]]) -> None:
    assert not [name_of(document) for document in objects if document["kind"] == "Secret"]
    for name, _, spec in pods(objects):
        for container in spec["containers"]:
            for variable in container.get("env", []):
                if re.search(r"SECRET|PASSWORD|TOKEN|ACCESS_KEY", variable["name"]):
                    assert "value" not in variable, f"{name}: {variable['name']} stands there in plain text"
    for document in objects:
        if document["kind"] == "ConfigMap":
            for key, value in document["data"].items():
                assert not re.search(r"://[^/\s]*:[^/\s]*@", value), f"{name_of(document)}: {key} carries a password"


def test_mlflow_requires_a_password_from_the_secret(objects: list[dict[str, Any]]) -> None:
    servers = [spec for name, _, spec in pods(objects) if name == "Deployment/mlflow"]
    assert servers
    for spec in servers:
        (container,) = spec["containers"]
        command = container["command"]
        assert command[command.index("--app-name") + 1] == "basic-auth"
        variables = {variable["name"]: variable for variable in container["env"]}
        for name, key in (
            ("MLFLOW_AUTH_ADMIN_USERNAME", "MLFLOW_TRACKING_USERNAME"),
            ("MLFLOW_AUTH_ADMIN_PASSWORD", "MLFLOW_TRACKING_PASSWORD"),
            ("MLFLOW_FLASK_SERVER_SECRET_KEY", "MLFLOW_FLASK_SERVER_SECRET_KEY"),
        ):
            assert variables[name]["valueFrom"]["secretKeyRef"] == {"name": "holdfast-secrets", "key": key}
        folder, _, file = variables["MLFLOW_AUTH_CONFIG_PATH"]["value"].rpartition("/")
        (mount,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == folder)
        (volume,) = (volume for volume in spec["volumes"] if volume["name"] == mount["name"])
        (settings,) = (
            document for document in objects if name_of(document) == f"ConfigMap/{volume['configMap']['name']}"
        )
        read = configparser.ConfigParser()
        read.read_string(settings["data"][file])
        assert read["mlflow"]["default_permission"] == "NO_PERMISSIONS"
        assert "admin_password" not in read["mlflow"]
        assert set(read["mlflow"]) >= {"database_uri", "authorization_function"}


def test_no_container_runs_as_root_or_without_limits(objects: list[dict[str, Any]]) -> None:
    containers = 0
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
            containers += 1
        assert not spec.get("hostNetwork"), name
        assert not spec.get("hostPID"), name
        assert not [volume for volume in spec.get("volumes", []) if "hostPath" in volume], name
    assert containers >= 2


def test_every_image_is_of_one_version(objects: list[dict[str, Any]]) -> None:
    for name, _, spec in pods(objects):
        for container in spec["containers"]:
            if "image" in container:
                tag = container["image"].partition("@")[0].rpartition(":")[2]
                assert tag != "latest", name
                assert any(letter.isdigit() for letter in tag), f"{name}: {container['image']} has no version"
            else:
                assert name.partition("/")[0] in ("Sensor", "EventSource", "EventBus")  # images of the operator


def test_every_object_is_labelled_and_in_the_namespace(objects: list[dict[str, Any]]) -> None:
    cluster_wide = {
        "Namespace", "PriorityClass", "Queue", "ClusterQueue", "ResourceFlavor", "Topology", "WorkloadPriorityClass",
        "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
    }  # fmt: skip
    for document in objects:
        assert document["metadata"]["labels"]["app.kubernetes.io/part-of"] == "holdfast", name_of(document)
        if document["kind"] not in cluster_wide:
            assert document["metadata"]["namespace"] == "holdfast", name_of(document)
    for name, metadata, _ in pods(objects):
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "holdfast", name


def test_the_namespace_enforces_the_restricted_standard(objects: list[dict[str, Any]]) -> None:
    (namespace,) = (document for document in objects if document["kind"] == "Namespace")
    for mode in ("enforce", "audit", "warn"):
        assert namespace["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] == "restricted"


def test_traffic_is_denied_unless_a_policy_names_it(objects: list[dict[str, Any]]) -> None:
    policies = {
        document["metadata"]["name"]: document["spec"] for document in objects if document["kind"] == "NetworkPolicy"
    }
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for name, policy in policies.items():
        assert {} not in policy.get("ingress", []), f"{name} lets everything in"
        assert {} not in policy.get("egress", []), f"{name} lets everything out"
    # The metadata service returns the node's credentials.
    blocks = [peer["ipBlock"] for rule in policies["https"]["egress"] for peer in rule["to"] if "ipBlock" in peer]
    assert "169.254.169.254/32" in next(block for block in blocks if block["cidr"] == "0.0.0.0/0")["except"]


def test_every_reference_to_an_object_leads_somewhere(objects: list[dict[str, Any]]) -> None:
    names = {name_of(document) for document in objects}
    documented = {"holdfast-secrets", "holdfast-mlflow"}  # docs/operations.md explains how to create them
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
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounts <= {volume["name"] for volume in spec.get("volumes", [])}, owner
        for volume in spec.get("volumes", []):
            if claim := volume.get("persistentVolumeClaim"):
                assert f"PersistentVolumeClaim/{claim['claimName']}" in names, owner
    queues = [document for document in objects if document["kind"] == "LocalQueue"]
    assert all(f"ClusterQueue/{queue['spec']['clusterQueue']}" in names for queue in queues)
    for document in (document for document in objects if document["kind"] == "ClusterQueue"):
        for group in document["spec"]["resourceGroups"]:
            assert all(f"ResourceFlavor/{flavor['name']}" in names for flavor in group["flavors"])
            gpus = [
                {item["name"]: item["nominalQuota"] for item in flavor["resources"]}["nvidia.com/gpu"]
                for flavor in group["flavors"]
            ]
            assert "cpu" in group["flavors"][0]["name"], "Kueue takes the first flavor that fits"
            assert gpus[0] == "0"
            covered = set(group["coveredResources"])
            assert all({item["name"] for item in flavor["resources"]} == covered for flavor in group["flavors"])
    for document in (document for document in objects if document["kind"] == "ResourceFlavor"):
        if topology := document["spec"].get("topologyName"):
            assert f"Topology/{topology}" in names
    for document in (document for document in objects if document["kind"] == "Sensor"):
        for dependency in document["spec"]["dependencies"]:
            assert f"EventSource/{dependency['eventSourceName']}" in names


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_and_every_step_reads_the_settings_of_one_place(overlay: str) -> None:
    (settings,) = (document for document in render(overlay) if document["metadata"]["name"] == "holdfast-settings")
    assert settings["kind"] == "ConfigMap"
    assert {"HOLDFAST_STORE", "MLFLOW_TRACKING_URI", "AWS_REGION"} <= set(settings["data"])
    secrets = {
        source["secretRef"]["name"]
        for _, _, spec in pods(render(overlay))
        for container in spec["containers"]
        for source in container.get("envFrom", [])
        if "secretRef" in source
    }
    assert secrets == {"holdfast-secrets"}


@pytest.mark.parametrize("overlay", [*OVERLAYS, PROFILE])
def test_an_overlay_moves_to_another_namespace_whole(overlay: str, tmp_path: Path) -> None:
    for document in render_in("elsewhere", overlay, tmp_path):
        if document["kind"] == "RoleBinding":
            assert {subject["namespace"] for subject in document["subjects"]} == {"elsewhere"}, name_of(document)
        if "namespace" in document["metadata"]:
            assert document["metadata"]["namespace"] == "elsewhere", name_of(document)
        if document["kind"] == "Namespace":
            assert document["metadata"]["name"] == "elsewhere"


def test_the_accounts_that_kubeflow_runs_steps_as_may_launch_jobs_in_their_namespace_and_nothing_more() -> None:
    objects = render(PROFILE)
    (role,) = (document for document in objects if document["kind"] == "Role")
    (binding,) = (document for document in objects if document["kind"] == "RoleBinding")
    assert [subject["name"] for subject in binding["subjects"]] == ["default-editor", "pipeline-runner"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (same,) = (document for document in render("kind") if name_of(document) == name_of(role))
    assert role["rules"] == same["rules"]
    assert {document["kind"] for document in objects} == {"ConfigMap", "Role", "RoleBinding", "NetworkPolicy"}


def test_the_policies_of_a_profile_choose_no_pod_that_is_not_holdfasts() -> None:
    for document in (document for document in render(PROFILE) if document["kind"] == "NetworkPolicy"):
        assert document["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "holdfast", name_of(document)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_account_policy_covers_the_namespace_and_names_the_accounts_of_every_step(overlay: str) -> None:
    objects = render(overlay)
    (namespace,) = (document for document in objects if document["kind"] == "Namespace")
    bindings = [document["spec"] for document in objects if document["kind"] == "ValidatingAdmissionPolicyBinding"]
    policies = {
        document["metadata"]["name"]: document["spec"]
        for document in objects
        if document["kind"] == "ValidatingAdmissionPolicy"
    }
    assert {binding["policyName"] for binding in bindings} == set(policies)
    for binding in bindings:
        selector = binding["matchResources"]["namespaceSelector"]["matchLabels"]
        assert selector.items() <= namespace["metadata"]["labels"].items()
    assert {policy["failurePolicy"] for policy in policies.values()} == {"Fail"}
    variables = {item["name"]: item["expression"] for item in policies["holdfast-pod-accounts"]["variables"]}
    spec = Spec.model_validate({"name": "a", "data": {"sources": [{"uri": "a"}]}, "serving": {"kserve": {}}})
    named = set(re.findall(r"'([\w-]+)'", variables["steps"]))
    assert named == {account_of(step, spec) for step in STEPS.values()}
    assert set(re.findall(r"'([\w-]+)'", variables["jobs"])) == {RANK_ACCOUNT, "default"}
    expressions = " ".join(item["expression"] for item in policies["holdfast-pod-accounts"]["validations"])
    assert {WORKFLOW_LABEL, *(kind.label for kind in KINDS.values())} <= set(re.findall(r"'(\S+/\S+)'", expressions))


def test_the_policies_of_objects_name_every_account_that_may_create_them() -> None:
    """Each policy of objects limits the accounts with the role of one component."""
    files = [file for file in MANIFESTS.rglob("*.yaml") if "overlays" not in file.parts]
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text()) if document]
    bindings = [document for document in documents if document.get("kind") in ("RoleBinding", "ClusterRoleBinding")]
    components = {"holdfast-deployment-accounts": "serving-deployment/rbac", "holdfast-token-secrets": "launcher/role"}
    policies = {
        document["metadata"]["name"]: document["spec"]
        for document in yaml.safe_load_all((MANIFESTS / "components/account-policy/objects.yaml").read_text())
        if document["kind"] == "ValidatingAdmissionPolicy"
    }
    assert set(policies) == set(components)
    for policy, component in components.items():
        (limited,) = policies[policy]["matchConstraints"]["resourceRules"][0]["resources"]
        role, *_ = yaml.safe_load_all((MANIFESTS / f"components/{component}.yaml").read_text())
        roles = {
            document["metadata"]["name"]
            for document in documents
            if document.get("kind") in ("Role", "ClusterRole")
            and any(limited in rule["resources"] and "create" in rule["verbs"] for rule in document["rules"])
        }
        assert roles == {role["metadata"]["name"]}, policy
        bound = {
            subject["name"]
            for binding in bindings
            if binding["roleRef"]["name"] in roles
            for subject in binding["subjects"]
            if subject["kind"] == "ServiceAccount"
        }
        (condition,) = policies[policy]["matchConditions"]
        named = set(re.findall(r"'([\w-]+)'", condition["expression"]))
        # serving-deployment names no account of a profile: a person binds default-editor there.
        assert named - bound <= {"default-editor"}, policy
        assert bound <= named, policy


def test_the_right_to_label_nodes_is_in_no_overlay_and_is_nothing_but_that() -> None:
    folder = MANIFESTS / "components" / "node-health"
    role, binding = yaml.safe_load_all((folder / "rbac.yaml").read_text())
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}]
    assert [subject["name"] for subject in binding["subjects"]] == ["holdfast-launcher"]
    assert {"rbac.yaml", "policy.yaml"} == set(yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"])
    kustomizations = [yaml.safe_load(path.read_text()) for path in MANIFESTS.rglob("kustomization.yaml")]
    assert not [
        path
        for kustomization in kustomizations
        for path in kustomization.get("components", [])
        if "node-health" in path
    ]
