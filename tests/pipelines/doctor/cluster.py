"""A cluster for `holdfast doctor`: an API server over HTTP, healthy until a test removes something."""

import copy
import json
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from holdfast.pipelines import doctor
from holdfast.spec import Spec
from tests.http_server import QuietHandler

SERVED = {
    "kubeflow.org/v1": ["pytorchjobs", "pytorchjobs/status"],
    "argoproj.io/v1alpha1": ["workflows"],
    "trainer.kubeflow.org/v1alpha1": ["trainjobs"],
    "batch.volcano.sh/v1alpha1": ["jobs"],
    "scheduling.volcano.sh/v1beta1": ["queues"],
    "kueue.x-k8s.io/v1beta2": ["localqueues"],
}
WORKFLOW, MODEL = "workflows.argoproj.io/workflow", "serving.kserve.io/inferenceservice"
OPERATOR = {
    "metadata": {"namespace": "kubeflow", "name": "training-operator"},
    "spec": {
        "template": {
            "spec": {
                "containers": [
                    {"image": "training-operator:v1.9.0", "args": ["--gang-scheduler-name=volcano"], "name": "operator"}
                ]
            }
        }
    },
}
QUEUE = "/apis/scheduling.volcano.sh/v1beta1/queues/holdfast"
LOCAL_QUEUE = "/apis/kueue.x-k8s.io/v1beta2/namespaces/team/localqueues/holdfast"
DEPLOYMENTS = "/apis/apps/v1/deployments"
ACTIONS = "/api/v1/namespaces/volcano-system/configmaps/volcano-scheduler-configmap"
PRIORITY = "/apis/scheduling.k8s.io/v1/priorityclasses/holdfast-standard"
ACCOUNT = "/api/v1/namespaces/team/serviceaccounts"
SETTINGS = "/api/v1/namespaces/team/configmaps/holdfast-settings"
SECRETS = "/api/v1/namespaces/team/secrets/holdfast-secrets"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies"
QUOTAS = "/api/v1/namespaces/team/resourcequotas"
NODES = "/api/v1/nodes"
CONTROLLER = "/api/v1/namespaces/kubeflow/configmaps/workflow-controller-configmap"
CONTROLLER_RETRIES = "spec: {{templateDefaults: {{retryStrategy: {{limit: '2', retryPolicy: {}}}}}}}"


def rendered_policies() -> list[dict[str, Any]]:
    """The traffic that manifests/overlays/profile allows."""
    file = Path(__file__).parents[3] / "manifests/components/kubeflow/network-policies.yaml"
    return list(yaml.safe_load_all(file.read_text()))


class Cluster:
    """A Kubernetes API over HTTP: the objects by path, and what the caller is not permitted."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {
            "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.4", "gitCommit": "", "gitTreeState": "",
                         "buildDate": "", "goVersion": "", "compiler": "", "platform": ""},
            DEPLOYMENTS: {"items": [copy.deepcopy(OPERATOR)]},
            ACTIONS: {"data": {"volcano-scheduler.conf": 'actions: "enqueue, allocate, preempt, reclaim, backfill"'}},
            QUEUE: {"status": {"state": "Open"}},
            LOCAL_QUEUE: {"spec": {"clusterQueue": "holdfast"}, "status": {"conditions": [
                {"type": "Active", "status": "True"}]}},
            PRIORITY: {"value": 10000},
        }  # fmt: skip
        for group_version, resources in SERVED.items():
            group, version = group_version.split("/")
            self.objects[f"/apis/{group_version}"] = {"resources": [{"name": name} for name in resources]}
            self.objects[f"/apis/{group}"] = {"versions": [{"version": version}]}
        for name in ("holdfast-step", "holdfast-notify", "holdfast-launcher", "holdfast-train"):
            self.objects[f"{ACCOUNT}/{name}"] = {}
        self.objects[SETTINGS] = {"data": {
            "HOLDFAST_STORE": "s3://b", "MLFLOW_TRACKING_URI": "http://mlflow:5000", "AWS_ENDPOINT_URL": "http://s3:8333",
        }}  # fmt: skip
        self.objects[SECRETS] = {"data": {"AWS_ACCESS_KEY_ID": "hidden", "AWS_SECRET_ACCESS_KEY": "hidden"}}
        self.objects[POLICIES] = {"items": copy.deepcopy(rendered_policies())}
        self.objects[NODES] = {
            "items": [{"metadata": {"labels": {"pool": "a"}}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}]
        }
        self.objects[CONTROLLER] = {"data": {"workflowDefaults": CONTROLLER_RETRIES.format("Always")}}
        self.refusal = ""  # why pods are not admitted
        self.limits_accounts = True  # whether the namespace has the account policy
        self.further_accounts: set[str] = set()  # those of the policy's annotation
        self.users: set[str] = set()  # users in access reviews
        self.denied: set[str] = set()  # "verb resource"
        self.forbidden: set[str] = set()  # paths that answer 403
        self.status = 200  # of every answer
        self.requests: list[str] = []

        cluster = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path.rstrip("/")
                cluster.requests.append(f"GET {path}")
                if cluster.status != 200:
                    self.answer(cluster.status, {})
                elif path in cluster.forbidden:
                    self.answer(403, {"kind": "Status"})
                elif path in cluster.objects:
                    self.answer(200, cluster.objects[path])
                else:
                    self.answer(404, {"kind": "Status"})

            def do_POST(self) -> None:
                cluster.requests.append(f"POST {self.path}")
                review = json.loads(self.body())
                if "/pods?" in self.path:
                    assert "dryRun=All" in self.path
                    assert "fieldValidation=Strict" in self.path
                    account = review["spec"].get("serviceAccountName", "default")
                    exists = account == "default" or f"{ACCOUNT}/{account}" in cluster.objects
                    refusal = cluster.refusal or ("" if exists else f'serviceaccount "{account}" not found')
                    labels = review["metadata"]["labels"]
                    is_other = (WORKFLOW in labels and account in ("holdfast-train", "default")) or (
                        MODEL in labels and account not in ("holdfast-train", "default")
                    )
                    if cluster.limits_accounts and not refusal and is_other and account not in cluster.further_accounts:
                        refusal = f"ValidatingAdmissionPolicy 'holdfast-pod-accounts' denied request: {account}"
                    if refusal:
                        self.answer(403, {"kind": "Status", "message": refusal})
                    else:
                        self.answer(201, review)
                    return
                attributes = review["spec"]["resourceAttributes"]
                cluster.users.add(review["spec"]["user"])
                assert attributes["namespace"] == "team"
                resource = "/".join(part for part in (attributes["resource"], attributes.get("subresource")) if part)
                review["status"] = {"allowed": f"{attributes['verb']} {resource}" not in cluster.denied}
                self.answer(201, review)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def kubeconfig(folder: Path, url: str) -> Path:
    path = folder / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "team"}}],
                "clusters": [{"name": "here", "cluster": {"server": url}}],
                "users": [{"name": "me", "user": {"token": "a-token"}}],
            }
        )
    )
    return path


def spec_with(**cluster: Any) -> Spec:
    return Spec.model_validate({"name": "small", "data": {"sources": [{"uri": "corpus/*.txt"}]}, "cluster": cluster})


def examined(spec: Spec | None = None, without: tuple[str, ...] = ("images",)) -> dict[str, list[doctor.Finding]]:
    """The findings about the cluster that are not ok, by check; without a spec, about everything that is possible."""
    findings: dict[str, list[doctor.Finding]] = {}
    for finding in doctor.examine(spec, everything=spec is None):
        if finding.outcome != "ok" and finding.check not in ("store", "mlflow", *without):
            assert finding.remedy, finding
            findings.setdefault(finding.check, []).append(finding)
    return findings


def only(found: dict[str, list[doctor.Finding]], check: str) -> doctor.Finding:
    assert list(found) == [check], found
    (finding,) = found[check]
    return finding
