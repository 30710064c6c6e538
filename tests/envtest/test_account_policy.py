"""The component account-policy on a real API server: as which service accounts the pods of a namespace may run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.launch.kubernetes.kinds import KINDS
from holdfast.launch.kubernetes.owner import WORKFLOW_LABEL
from holdfast.pipelines.backends.argo import argo_objects
from holdfast.pipelines.doctor.admission import rank_pod, step_pod
from holdfast.spec import load_spec
from tests.envtest.control_plane import MANIFESTS, ControlPlane, assets, needs_assets, until

SPEC = load_spec(Path(__file__).parents[2] / "examples/cluster-cpu.yaml")
STEPS = ("holdfast-step", "holdfast-launcher", "holdfast-notify", "holdfast-serving")
ACCOUNT = "system:serviceaccount:"
ARGO, OPERATOR = f"{ACCOUNT}argo:argo", f"{ACCOUNT}kubeflow:training-operator"
REPLICA_SETS = f"{ACCOUNT}kube-system:replicaset-controller"
LAUNCHER, SERVING = f"{ACCOUNT}holdfast:holdfast-launcher", f"{ACCOUNT}holdfast:holdfast-serving"
CONTROLLERS = """
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: controllers}
rules:
  - {apiGroups: [""], resources: [pods], verbs: [create]}
  - {apiGroups: [apps], resources: [deployments], verbs: [get]} # kubectl reads what it patches
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: controllers}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: controllers}
subjects:
  - {kind: ServiceAccount, name: argo, namespace: argo}
  - {kind: ServiceAccount, name: training-operator, namespace: kubeflow}
  - {kind: ServiceAccount, name: replicaset-controller, namespace: kube-system}
  - {kind: ServiceAccount, name: holdfast-serving, namespace: holdfast}
"""
TOKEN_SECRET = {
    "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token",
    "metadata": {"name": "a-token", "annotations": {"kubernetes.io/service-account.name": "holdfast-mlflow"}},
}  # fmt: skip
ANNOTATION = "holdfast/further-service-accounts"
ELSEWHERE = "kubeflow"  # a namespace without the label, such as KFP's

pytestmark = [pytest.mark.slow, needs_assets]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server with the kind overlay, the components of serving, and the rights of the controllers."""
    binaries = assets()
    assert binaries is not None
    with ControlPlane(binaries, tmp_path_factory.mktemp("accounts"), accounts=True) as running:
        running.kubectl("apply", "--server-side", "--validate=strict", "-k", str(MANIFESTS / "overlays/kind"))
        running.kubectl("create", "namespace", ELSEWHERE)
        for file in ("kserve/service-account.yaml", "kserve/rbac.yaml", "serving-deployment/rbac.yaml"):
            running.kubectl("apply", "-n", "holdfast", "-f", str(MANIFESTS / "components" / file))
        running.kubectl("apply", "-f", "-", text=CONTROLLERS)
        for namespace, account in (("holdfast", "default"), ("holdfast", "trainer"), (ELSEWHERE, "pipeline-runner")):
            running.kubectl("create", "serviceaccount", account, "-n", namespace)
        # The server reads policies slightly later.
        until(running, lambda: refused(running, ARGO, workflow_pod("holdfast-mlflow")))
        until(running, lambda: refused(running, SERVING, deployment("holdfast-mlflow")))
        until(running, lambda: refused(running, LAUNCHER, TOKEN_SECRET))
        yield running


def labelled(pod: dict[str, Any], label: str, value: str) -> dict[str, Any]:
    metadata = {**pod["metadata"], "labels": {**pod["metadata"].get("labels", {}), label: value}}
    return {**pod, "metadata": metadata}


def workflow_pod(account: str, value: str = "a-run") -> dict[str, Any]:
    """The pod of a step as Argo's controller creates it, with an account that a user chose."""
    return labelled(step_pod(SPEC, account), WORKFLOW_LABEL, value)


def rank(account: str, label: str) -> dict[str, Any]:
    """The pod of a rank as the controller of its job creates it."""
    pod = labelled(rank_pod(SPEC), label, "a-run")
    return {**pod, "spec": {**pod["spec"], "serviceAccountName": account}}


def deployment(account: str) -> dict[str, Any]:
    pod = labelled(step_pod(SPEC, account), "app", "a-model")
    pod["spec"]["restartPolicy"] = "Always"
    template = {"metadata": {"labels": {"app": "a-model"}}, "spec": pod["spec"]}
    spec = {"selector": {"matchLabels": {"app": "a-model"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a-model"}, "spec": spec}


def refused(plane: ControlPlane, user: str, thing: dict[str, Any], namespace: str = "holdfast") -> str:
    """The server's answer to a user who creates an object, in a dry run; empty if it admits the object."""
    command = ["create", f"--as={user}", "-n", namespace, "--dry-run=server", "-f", "-"]
    return plane.refusal(*command, text=json.dumps(thing))


def test_every_account_of_an_emitted_workflow_is_admitted(plane: ControlPlane) -> None:
    (template, *_) = argo_objects(SPEC)
    named = {step["serviceAccountName"] for step in template["spec"]["templates"] if "container" in step}
    assert {"holdfast-step", "holdfast-launcher", "holdfast-notify"} <= named <= set(STEPS)
    for account in STEPS:
        assert refused(plane, ARGO, workflow_pod(account)) == "", account


@pytest.mark.parametrize("account", ["holdfast-mlflow", "holdfast-s3", "holdfast-train", "trainer", "default", ""])
def test_a_workflow_runs_no_pod_as_another_account_of_the_namespace(plane: ControlPlane, account: str) -> None:
    for value in ("a-run", "", "of-the-user"):  # the labels of a template can replace the value, and not remove the key
        answer = refused(plane, ARGO, workflow_pod(account, value))
        assert f"may not run as service account {account or 'default'}, only as {' '.join(STEPS)}" in answer
        assert "kubectl annotate --overwrite namespace holdfast" in answer


@pytest.mark.parametrize("label", [*(kind.label for kind in KINDS.values()), "serving.kserve.io/inferenceservice"])
def test_ranks_run_as_their_account_or_the_default_one_and_not_as_a_step(plane: ControlPlane, label: str) -> None:
    for account in ("holdfast-train", "default", ""):
        assert refused(plane, OPERATOR, rank(account, label)) == "", account
    for account in ("holdfast-launcher", "holdfast-mlflow", "trainer"):
        answer = refused(plane, OPERATOR, rank(account, label))
        assert f"may not run as service account {account}, only as holdfast-train default" in answer


def test_a_step_gets_no_account_by_a_deployment_and_no_token_by_a_secret(plane: ControlPlane) -> None:
    assert refused(plane, SERVING, deployment("default")) == ""
    assert refused(plane, SERVING, deployment("")) == ""
    assert "runs as service account holdfast-mlflow" in refused(plane, SERVING, deployment("holdfast-mlflow"))
    command = ["patch", "deployment", "mlflow", "-n", "holdfast", f"--as={SERVING}", "--dry-run=server"]
    image = [{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "mine"}]
    answer = plane.refusal(*command, "--type=json", f"--patch={json.dumps(image)}")
    assert "change a Deployment that runs as service account holdfast-mlflow" in answer
    key = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a-key"}, "stringData": {"key": "hidden"}}
    assert refused(plane, LAUNCHER, key) == ""
    assert "no Secret with a token" in refused(plane, LAUNCHER, TOKEN_SECRET)


def test_other_pods_other_people_and_other_namespaces_are_not_affected(plane: ControlPlane) -> None:
    assert refused(plane, REPLICA_SETS, labelled(step_pod(SPEC, "holdfast-mlflow"), "app", "mlflow")) == ""
    assert refused(plane, ARGO, workflow_pod("pipeline-runner"), ELSEWHERE) == ""
    as_admin = ("create", "-n", "holdfast", "--dry-run=server", "-f", "-")
    for thing in (deployment("holdfast-mlflow"), TOKEN_SECRET):
        plane.kubectl(*as_admin, text=json.dumps(thing))


def test_the_command_in_the_message_allows_the_account(plane: ControlPlane) -> None:
    try:
        for account in ("trainer", "default"):  # the second command keeps the account of the first one
            (command,) = re.findall(r"kubectl (annotate .*)", refused(plane, ARGO, workflow_pod(account)))
            plane.kubectl(*shlex.split(command))
            until(plane, lambda: not refused(plane, ARGO, workflow_pod(account)))  # noqa: B023
        assert refused(plane, ARGO, workflow_pod("trainer")) == ""
        assert refused(plane, OPERATOR, rank("trainer", KINDS["pytorchjob"].label)) == ""
        assert refused(plane, SERVING, deployment("trainer")) == ""
        plane.kubectl("annotate", "--overwrite", "namespace", "holdfast", f"{ANNOTATION}=trainer,analysis, default")
        until(plane, lambda: refused(plane, ARGO, workflow_pod("analysis")).count("may not run") == 0)
        for name in ("trainer", "default"):
            assert refused(plane, ARGO, workflow_pod(name)) == "", name
        assert "service account holdfast-mlflow, only as" in refused(plane, ARGO, workflow_pod("holdfast-mlflow"))
    finally:
        plane.kubectl("annotate", "namespace", "holdfast", f"{ANNOTATION}-")
    until(plane, lambda: refused(plane, ARGO, workflow_pod("trainer")))
