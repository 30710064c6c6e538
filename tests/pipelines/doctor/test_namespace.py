"""Findings about a namespace: permissions, accounts, settings, quotas, policies, images, and admission."""

from pathlib import Path

import pytest
import yaml

from holdfast.pipelines import doctor
from holdfast.pipelines.doctor import permissions
from holdfast.pipelines.doctor.cluster import CUSTOM_RESOURCES
from holdfast.spec import Spec
from tests.pipelines.doctor.cluster import (
    ACCOUNT,
    ACTIONS,
    CONTROLLER,
    CONTROLLER_RETRIES,
    DEPLOYMENTS,
    POLICIES,
    QUEUE,
    QUOTAS,
    SECRETS,
    SETTINGS,
    Cluster,
    examined,
    only,
    spec_with,
)

ROOT = Path(__file__).parents[3]


def test_capabilities_that_the_namespace_refuses_are_reported(cluster: Cluster) -> None:
    spec = spec_with(capabilities=["IPC_LOCK"])
    for level, fine in (("restricted", False), ("baseline", False), ("privileged", True)):
        labels = {"pod-security.kubernetes.io/enforce": level}
        cluster.objects["/api/v1/namespaces/team"] = {"metadata": {"labels": labels}}
        if fine:
            assert examined(spec) == {}
        else:
            finding = only(examined(spec), "capabilities")
            assert finding.outcome == "fail"
            assert f"{level}, which refuses pods with IPC_LOCK" in finding.message
            assert "LimitMEMLOCK" in finding.remedy


def test_permissions_are_checked_for_the_kubeflow_account_if_it_runs_the_steps(cluster: Cluster) -> None:
    for name in ("holdfast-launcher", "holdfast-step", "holdfast-notify", "holdfast-train"):
        del cluster.objects[f"{ACCOUNT}/{name}"]
    cluster.objects[f"{ACCOUNT}/default-editor"] = {}
    assert examined(spec_with()) == {}, "its pod, too, is created with that account"
    assert cluster.users == {"system:serviceaccount:team:default-editor"}


@pytest.mark.parametrize(("named", "missing"), [("", "pipeline-runner"), ("mine", "mine")])
def test_the_account_that_kubeflow_gives_its_runs_must_be_in_the_namespace(
    cluster: Cluster, named: str, missing: str
) -> None:
    """As in a profile without KFP's default account: the run failed before its first step, silently."""
    findings = [
        finding for finding in doctor.examine(spec_with(), backend="kubeflow", service_account=named)
        if finding.check == "service accounts" and finding.outcome == "fail"
    ]  # fmt: skip
    assert [(missing in finding.message, "before its first step" in finding.message) for finding in findings] == [
        (True, True)
    ]
    assert "--service-account" in findings[0].remedy
    cluster.objects[f"{ACCOUNT}/{missing}"] = {}
    findings = [*doctor.examine(spec_with(), backend="kubeflow", service_account=named)]
    assert not [finding for finding in findings if finding.check == "service accounts" and finding.outcome == "fail"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            'pods "x" is forbidden: violates PodSecurity "restricted:latest": unrestricted capabilities',
            "enforce=baseline",
        ),
        ('pods "x" is forbidden: exceeded quota: holdfast, requested: cpu=4', "resourcequota"),
        (
            'pods "x" is forbidden: error looking up service account team/x: serviceaccount "x" not found',
            "kubectl apply",
        ),
        (
            "pods \"x\" is forbidden: ValidatingAdmissionPolicy 'holdfast-pod-accounts' denied request: the pod of a",
            "cluster.service_account",
        ),
    ],
)
def test_an_admission_refusal_of_a_pod_is_reported_with_the_remedy(cluster: Cluster, message: str, words: str) -> None:
    assert examined(spec_with()) == {}
    cluster.refusal = message
    findings = examined(spec_with())["pod admission"]
    assert [finding.outcome for finding in findings] == ["fail", "fail"]
    assert all(message.partition(": ")[2] in finding.message and words in finding.remedy for finding in findings)


def test_a_namespace_in_which_a_workflow_takes_any_account_is_reported(cluster: Cluster) -> None:
    assert examined(spec_with()) == {}
    cluster.limits_accounts = False
    finding = only(examined(spec_with()), "account policy")
    assert finding.outcome == "warn"
    assert "team may run a pod as holdfast-train or default" in finding.message
    assert "manifests/components/account-policy" in finding.remedy
    del cluster.objects[f"{ACCOUNT}/holdfast-launcher"]
    cluster.objects[f"{ACCOUNT}/default-editor"] = {}
    assert "account policy" not in examined(spec_with()), "KFP's namespaces have no such policy"


def test_the_account_policy_is_seen_without_the_account_of_ranks_and_next_to_allowed_accounts(cluster: Cluster) -> None:
    cluster.further_accounts = {"holdfast-train"}
    assert examined(spec_with()) == {}
    cluster.further_accounts = {"default"}
    assert examined(spec_with()) == {}
    del cluster.objects[f"{ACCOUNT}/holdfast-train"]
    cluster.further_accounts = set()
    assert "account policy" not in examined(spec_with())
    cluster.refusal = 'pods "x" is forbidden: exceeded quota: holdfast, requested: cpu=4'
    (finding,) = examined(spec_with())["account policy"]
    assert (finding.outcome, "could not be checked" in finding.message) == ("warn", True)
    assert "exceeded quota" in finding.message


def test_an_account_of_an_inference_service_that_the_policy_refuses_is_reported(cluster: Cluster) -> None:
    spec = spec_with(accelerator="cpu")
    serving = {"kserve": {"service_account": "reader"}}
    spec = Spec.model_validate({**spec.model_dump(exclude_unset=True), "serving": serving})
    cluster.objects[f"{ACCOUNT}/reader"] = {}
    finding = only(examined(spec), "pod admission")
    assert (finding.outcome, "an InferenceService is refused" in finding.message) == ("fail", True)
    assert "serving.kserve.service_account" in finding.remedy
    cluster.further_accounts = {"reader"}
    assert examined(spec) == {}
    cluster.further_accounts = set()
    serving["kserve"]["namespace"] = "models"
    spec = Spec.model_validate({**spec.model_dump(exclude_unset=True), "serving": serving})
    assert only(examined(spec), "pod admission").outcome == "fail"
    assert any(request.startswith("POST /api/v1/namespaces/models/pods?") for request in cluster.requests)


def test_settings_and_secrets_are_looked_for_by_key_and_no_value_is_shown(cluster: Cluster) -> None:
    del cluster.objects[SETTINGS]["data"]["MLFLOW_TRACKING_URI"]
    finding = only(examined(), "settings")
    assert "lacks MLFLOW_TRACKING_URI" in finding.message
    cluster.objects[SETTINGS]["data"]["MLFLOW_TRACKING_URI"] = "sqlite:////data/mlflow.db"
    assert "is no server" in only(examined(), "settings").message
    cluster.objects[SETTINGS]["data"]["MLFLOW_TRACKING_URI"] = "http://me:hidden@mlflow:5000"
    del cluster.objects[SECRETS]
    finding = only(examined(), "secrets")
    assert (finding.outcome, "AWS_ACCESS_KEY_ID" in finding.message) == ("warn", True)
    assert examined(spec_with(secrets=["mine"], image="r.example/i:1"))["secrets"][0].outcome == "fail"
    assert not [finding for finding in doctor.examine() if "hidden" in finding.message + finding.remedy]


def test_a_quota_too_small_for_the_ranks_is_reported(cluster: Cluster) -> None:
    cluster.objects[QUOTAS] = {"items": [
        {"metadata": {"name": "q"}, "spec": {"hard": {"requests.cpu": "8", "pods": "10"}},
         "status": {"used": {"requests.cpu": "2", "pods": "1"}}}]}  # fmt: skip
    spec = {"image": "registry.example/train:1", "resources": {"cpu": 4}}
    assert "quota" not in examined(spec_with(**spec))
    waits = examined(spec_with(**spec, nodes={"min": 2, "max": 2}))["quota"][0]
    never = examined(spec_with(**spec, nodes={"min": 3, "max": 3}))["quota"]
    assert (waits.outcome, [finding.outcome for finding in never]) == ("warn", ["fail"])
    assert "8 of requests.cpu, 2 of it are in use" in waits.message


@pytest.mark.parametrize(("used", "fits"), [("3", True), ("4", True), ("4001m", False), ("5", False)])
def test_a_quota_has_room_for_what_is_exactly_left_of_it(cluster: Cluster, used: str, fits: bool) -> None:
    cluster.objects[QUOTAS] = {"items": [
        {"metadata": {"name": "q"}, "spec": {"hard": {"requests.cpu": "8"}}, "status": {"used": {"requests.cpu": used}}}
    ]}  # fmt: skip
    checks = examined(spec_with(image="registry.example/train:1", resources={"cpu": 4}))
    assert ("quota" not in checks) is fits


def test_a_claim_must_be_there_and_fit_many_pods(cluster: Cluster) -> None:
    path = "/api/v1/namespaces/team/persistentvolumeclaims/corpus"
    spec = spec_with(volumes=[{"claim": "corpus", "path": "/corpus"}], image="registry.example/train:1")
    assert examined(spec)["claims"][0].outcome == "fail"
    cluster.objects[path] = {"spec": {"accessModes": ["ReadWriteOnce"]}, "status": {"phase": "Bound"}}
    assert "two nodes" in examined(spec)["claims"][0].message
    cluster.objects[path]["spec"]["accessModes"] = ["ReadWriteMany"]
    assert "claims" not in examined(spec)


@pytest.mark.parametrize(
    ("port", "blocked"), [(5000, "MLflow (TCP 5000)"), (8333, "S3 (TCP 8333)"), (53, "names (UDP 53)")]
)
def test_a_flow_that_no_policy_lets_through_is_reported(cluster: Cluster, port: int, blocked: str) -> None:
    for policy in cluster.objects[POLICIES]["items"]:
        for rule in policy["spec"].get("egress", []):
            if "ports" in rule:
                rule["ports"] = [entry for entry in rule["ports"] if entry["port"] != port]
        policy["spec"]["egress"] = [rule for rule in policy["spec"].get("egress", []) if rule.get("ports") != []]
    finding = only(examined(), "network policies")
    assert blocked in finding.message
    assert "API" not in finding.message


def test_ranks_that_cannot_reach_each_other_are_reported(cluster: Cluster) -> None:
    cluster.objects[POLICIES]["items"] = [
        policy for policy in cluster.objects[POLICIES]["items"] if policy["metadata"]["name"] != "holdfast-ranks"
    ]
    assert "ranks to ranks" in only(examined(), "network policies").message


@pytest.mark.parametrize(("policy", "missing"), [("OnError", "failed"), ("OnFailure", "deleted")])
def test_failures_that_the_kubeflow_engine_does_not_retry_are_reported(
    cluster: Cluster, policy: str, missing: str
) -> None:
    cluster.objects[CONTROLLER] = {"data": {"workflowDefaults": CONTROLLER_RETRIES.format(policy)}}
    assert missing in only(examined(), "controller").message


def test_images_without_a_registry_and_missing_pull_secrets_are_reported(cluster: Cluster) -> None:
    findings = examined(spec_with(image="registry.example/train:latest", pull_secrets=["pull"]), without=())["images"]
    messages = " ".join(finding.message for finding in findings)
    assert "names no registry" in messages
    assert "changes under its name" in messages
    assert "pull secret pull in team is not there" in messages


@pytest.mark.parametrize("right", ["create pytorchjobs", "delete pytorchjobs", "get pods/log", "list events"])
def test_a_missing_permission_of_the_launcher_is_reported(cluster: Cluster, right: str) -> None:
    cluster.denied.add(right)
    finding = only(examined(), "permissions")
    assert finding.outcome == "fail"
    assert right in finding.message
    assert int(finding.code) == 16
    assert "holdfast-launcher" in finding.remedy


def test_each_missing_permission_of_the_launcher_role_is_reported(cluster: Cluster) -> None:
    """The role is what a launcher needs: a permission that the doctor does not check fails in the middle of a run."""
    role = yaml.safe_load((ROOT / "manifests/components/launcher/role.yaml").read_text())
    granted = {
        (group, resource): tuple(rule["verbs"])
        for rule in role["rules"] for group in rule["apiGroups"] for resource in rule["resources"]
    }  # fmt: skip
    verbs_of = {(group, resource): verbs for group, resource, verbs in permissions.LAUNCHER}
    jobs = {(kind.group, kind.plural): permissions.JOB_VERBS for kind in CUSTOM_RESOURCES if kind.job}
    assert {kind: set(verbs) for kind, verbs in {**verbs_of, **jobs}.items()} == {
        kind: set(verbs) for kind, verbs in granted.items() if kind != ("trainer.kubeflow.org", "trainingruntimes")
    }
    for (_, resource), verbs in {**verbs_of, ("", "pytorchjobs"): permissions.JOB_VERBS}.items():
        for verb in verbs:
            cluster.denied.add(f"{verb} {resource}")
            assert f"{verb} {resource}" in only(examined(), "permissions").message
            cluster.denied.clear()
    assert "permissions" not in examined()


def test_a_permission_for_a_kind_of_job_that_is_not_used_is_only_mentioned(cluster: Cluster) -> None:
    cluster.denied.add("create trainjobs")
    assert only(examined(), "permissions").outcome == "warn"


def test_a_forbidden_check_is_a_warning_and_the_rest_is_checked(cluster: Cluster) -> None:
    cluster.forbidden |= {DEPLOYMENTS, ACTIONS, QUEUE}
    checks = examined()
    assert set(checks) == {"gang scheduling", "volcano actions", "volcano queue"}
    assert all(finding.outcome == "warn" and "could not look" in finding.message for (finding,) in checks.values())
