"""`holdfast doctor` against an API server that speaks HTTP: everything in order, and each thing missing."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from holdfast.components.launch.kubernetes.client import Api
from holdfast.components.spec import Spec
from holdfast.pipelines import doctor
from tests.s3_server import S3Server

SERVED = {
    "kubeflow.org/v1": ["pytorchjobs", "pytorchjobs/status"],
    "argoproj.io/v1alpha1": ["workflows"],
    "trainer.kubeflow.org/v1alpha1": ["trainjobs"],
    "batch.volcano.sh/v1alpha1": ["jobs"],
    "scheduling.volcano.sh/v1beta1": ["queues"],
    "kueue.x-k8s.io/v1beta2": ["localqueues"],
}
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


class Cluster:
    """A Kubernetes API over HTTP: what lies at which path, and what the caller may not do."""

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
        for name in ("holdfast-step", "holdfast-launcher", "holdfast-train"):
            self.objects[f"{ACCOUNT}/{name}"] = {}
        self.denied: set[str] = set()  # "verb resource"
        self.forbidden: set[str] = set()  # paths that answer 403
        self.status = 200  # of everything
        self.asked: list[str] = []

        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path.rstrip("/")
                cluster.asked.append(f"GET {path}")
                if cluster.status != 200:
                    self.answer(cluster.status, {})
                elif path in cluster.forbidden:
                    self.answer(403, {"kind": "Status"})
                elif path in cluster.objects:
                    self.answer(200, cluster.objects[path])
                else:
                    self.answer(404, {"kind": "Status"})

            def do_POST(self) -> None:
                cluster.asked.append(f"POST {self.path}")
                review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked = review["spec"]["resourceAttributes"]
                assert asked["namespace"] == "team"
                resource = "/".join(part for part in (asked["resource"], asked.get("subresource")) if part)
                review["status"] = {"allowed": f"{asked['verb']} {resource}" not in cluster.denied}
                self.answer(201, review)

            def answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def _kubeconfig(folder: Path, url: str) -> Path:
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


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster()
    monkeypatch.setenv("KUBECONFIG", str(_kubeconfig(tmp_path, made.url)))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", os.environ["KUBECONFIG"])
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    yield made
    made.server.shutdown()
    made.server.server_close()


def _spec(**cluster: Any) -> Spec:
    return Spec.model_validate({"name": "small", "data": {"sources": [{"uri": "corpus/*.txt"}]}, "cluster": cluster})


def _found(spec: Spec | None = None) -> dict[str, list[doctor.Finding]]:
    """The findings about the cluster that are not fine, by their check."""
    found: dict[str, list[doctor.Finding]] = {}
    for finding in doctor.examine(spec):
        if finding.outcome != "ok" and finding.check not in ("store", "mlflow"):
            assert finding.remedy, finding
            found.setdefault(finding.check, []).append(finding)
    return found


def _only(found: dict[str, list[doctor.Finding]], check: str) -> doctor.Finding:
    assert list(found) == [check], found
    (finding,) = found[check]
    return finding


def test_a_cluster_in_order_has_nothing_to_mend(cluster: Cluster) -> None:
    findings = list(doctor.examine())
    assert [finding for finding in findings if finding.outcome == "fail"] == []
    assert _found() == {}
    assert {finding.check for finding in findings} >= {
        "api server", "pytorchjobs.kubeflow.org", "workflows.argoproj.io", "localqueues.kueue.x-k8s.io",
        "gang scheduling", "volcano actions", "volcano queue", "kueue queue", "permissions", "service accounts",
        "priority class", "store", "mlflow",
    }  # fmt: skip
    assert all(asked.startswith("GET") or asked.endswith("/selfsubjectaccessreviews") for asked in cluster.asked)


@pytest.mark.parametrize(
    ("missing", "resource", "outcome"),
    [
        ("/apis/kubeflow.org/v1", "pytorchjobs.kubeflow.org", "fail"),
        ("/apis/argoproj.io/v1alpha1", "workflows.argoproj.io", "fail"),
        ("/apis/trainer.kubeflow.org/v1alpha1", "trainjobs.trainer.kubeflow.org", "warn"),
        ("/apis/batch.volcano.sh/v1alpha1", "jobs.batch.volcano.sh", "warn"),
        ("/apis/scheduling.volcano.sh/v1beta1", "queues.scheduling.volcano.sh", "warn"),
        ("/apis/kueue.x-k8s.io/v1beta2", "localqueues.kueue.x-k8s.io", "warn"),
    ],
)
def test_an_api_that_is_not_served_is_named(cluster: Cluster, missing: str, resource: str, outcome: str) -> None:
    del cluster.objects[missing]
    finding = _only(_found(), resource)
    assert finding.outcome == outcome


def test_a_version_that_is_too_old_is_named_with_what_is_there(cluster: Cluster) -> None:
    del cluster.objects["/apis/kueue.x-k8s.io/v1beta2"]
    cluster.objects["/apis/kueue.x-k8s.io"] = {"versions": [{"version": "v1alpha2"}]}
    assert "only v1alpha2" in _only(_found(), "localqueues.kueue.x-k8s.io").message


def test_what_the_spec_asks_for_must_be_there(cluster: Cluster) -> None:
    del cluster.objects["/apis/scheduling.volcano.sh/v1beta1"]
    del cluster.objects["/apis/kueue.x-k8s.io/v1beta2"]
    found = _found(_spec(scheduler="volcano", queue="holdfast"))
    assert found["queues.scheduling.volcano.sh"][0].outcome == "fail"
    assert found["localqueues.kueue.x-k8s.io"][0].outcome == "warn"
    assert _found(_spec(scheduler="kueue", queue="holdfast"))["localqueues.kueue.x-k8s.io"][0].outcome == "fail"


@pytest.mark.parametrize("arguments", [[], ["--gang-scheduler-name=none"], ["--v=1"]])
def test_an_operator_without_gang_scheduling_is_named(cluster: Cluster, arguments: list[str]) -> None:
    cluster.objects[DEPLOYMENTS]["items"][0]["spec"]["template"]["spec"]["containers"][0]["args"] = arguments
    assert _only(_found(), "gang scheduling").outcome == "warn"
    finding = _only(_found(_spec(scheduler="volcano", queue="holdfast")), "gang scheduling")
    assert finding.outcome == "fail"
    assert "-n kubeflow deployment/training-operator" in finding.remedy
    (patch,) = json.loads(re.findall(r"-p '(.*)'", finding.remedy)[0])  # it must be JSON that kubectl takes
    assert patch["value"] in ("--gang-scheduler-name=volcano", ["--gang-scheduler-name=volcano"])


def test_an_operator_that_is_away_is_named(cluster: Cluster) -> None:
    cluster.objects[DEPLOYMENTS] = {"items": []}
    assert "training operator" in _only(_found(), "gang scheduling").remedy


@pytest.mark.parametrize(
    ("actions", "missing"),
    [("enqueue, allocate, backfill", "preempt and reclaim"), ("enqueue, allocate, preempt, backfill", "reclaim")],
)
def test_actions_that_cannot_preempt_are_named(cluster: Cluster, actions: str, missing: str) -> None:
    cluster.objects[ACTIONS]["data"]["volcano-scheduler.conf"] = f'actions: "{actions}"\ntiers: []'
    finding = _only(_found(), "volcano actions")
    assert f"without {missing}" in finding.message
    for action in ("enqueue", "allocate", "preempt", "reclaim", "backfill"):
        assert finding.remedy.count(action) == 1


@pytest.mark.parametrize(
    ("path", "check"),
    [(QUEUE, "volcano queue"), (LOCAL_QUEUE, "kueue queue"), (PRIORITY, "priority class"), (ACTIONS, "volcano actions"),
     (f"{ACCOUNT}/holdfast-launcher", "service accounts")],
)  # fmt: skip
def test_an_object_that_is_missing_is_named(cluster: Cluster, path: str, check: str) -> None:
    del cluster.objects[path]
    assert _only(_found(), check).outcome == "warn"


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"scheduler": "volcano", "queue": "mine"}, "volcano queue"),
        ({"scheduler": "kueue", "queue": "mine"}, "kueue queue"),
        ({"priority_class": "mine"}, "priority class"),
    ],
)
def test_an_object_that_the_spec_names_must_be_there(cluster: Cluster, fields: dict[str, str], check: str) -> None:
    cluster.objects["/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses/holdfast-standard"] = {"value": 1}
    finding = _only(_found(_spec(**fields)), check)
    assert finding.outcome == "fail"
    assert "'mine'" in finding.message


def test_a_queue_that_admits_nothing_is_named_with_its_reason(cluster: Cluster) -> None:
    (condition,) = cluster.objects[LOCAL_QUEUE]["status"]["conditions"]
    condition |= {"status": "False", "message": "Can't submit new workloads to clusterQueue"}
    assert "Can't submit" in _only(_found(), "kueue queue").message
    cluster.objects[LOCAL_QUEUE]["status"] = {}
    cluster.objects[QUEUE]["status"]["state"] = "Closed"
    assert "Closed" in _only(_found(), "volcano queue").message


@pytest.mark.parametrize("right", ["create pytorchjobs", "delete pytorchjobs", "get pods/log", "watch events"])
def test_a_permission_that_the_launcher_needs_is_named(cluster: Cluster, right: str) -> None:
    cluster.denied.add(right)
    finding = _only(_found(), "permissions")
    assert finding.outcome == "fail"
    assert right in finding.message
    assert int(finding.code) == 16
    assert "holdfast-launcher" in finding.remedy


def test_a_permission_for_a_kind_of_job_that_is_not_used_is_only_mentioned(cluster: Cluster) -> None:
    cluster.denied.add("create trainjobs")
    assert _only(_found(), "permissions").outcome == "warn"


def test_what_one_may_not_look_at_is_a_warning_and_the_rest_is_checked(cluster: Cluster) -> None:
    cluster.forbidden |= {DEPLOYMENTS, ACTIONS, QUEUE}
    found = _found()
    assert set(found) == {"gang scheduling", "volcano actions", "volcano queue"}
    assert all(finding.outcome == "warn" and "could not look" in finding.message for (finding,) in found.values())


def test_refused_credentials_are_named(cluster: Cluster) -> None:
    cluster.status = 401
    finding = _only(_found(), "api server")
    assert (finding.outcome, int(finding.code)) == ("fail", 16)


def test_an_api_server_that_is_away_is_named(cluster: Cluster) -> None:
    cluster.server.shutdown()
    cluster.server.server_close()
    finding = _only(_found(), "api server")
    assert (finding.outcome, int(finding.code)) == ("fail", 207)
    assert cluster.url in finding.message


def test_the_doctor_looks_at_the_cluster_that_a_launcher_here_would_use(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (("TOKEN", "a-token"), ("CERT", "not read before the first answer")):
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(f"kubernetes.config.incluster_config.SERVICE_{name}_FILENAME", str(tmp_path / name))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")  # a pod, in which somebody has set KUBECONFIG too
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "9")
    finding = next(iter(doctor.examine()))
    assert Api.of_this_process().host == "https://127.0.0.1:9"
    assert "https://127.0.0.1:9" in finding.message
    assert cluster.asked == []


def _command(tmp_path: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST", "MLFLOW", "AWS_"))}
    environment = {**kept, "HOLDFAST_HOME": str(tmp_path / "home"), "KUBECONFIG": str(tmp_path / "none"), **more}
    return subprocess.run(
        [sys.executable, "-m", "holdfast.pipelines.cli", "doctor", *arguments],
        check=False, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_without_a_cluster_the_rest_is_checked_and_said(tmp_path: Path) -> None:
    done = _command(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARN  api server: no cluster is configured" in done.stdout
    assert "OK    store:" in done.stdout
    assert not list((tmp_path / "home/store").rglob("doctor/*"))


def test_the_command_ends_with_the_code_of_the_first_failure_and_prints_json(tmp_path: Path, cluster: Cluster) -> None:
    cluster.denied.add("create pytorchjobs")
    done = _command(tmp_path, "--json", KUBECONFIG=os.environ["KUBECONFIG"])
    assert done.returncode == 16, done.stderr
    findings = json.loads(done.stdout)
    failed = [finding for finding in findings if finding["outcome"] == "fail"]
    assert [finding["check"] for finding in failed] == ["permissions"]
    local = {finding["check"]: finding["outcome"] for finding in findings if finding["check"] in ("store", "mlflow")}
    assert local == {"store": "warn", "mlflow": "warn"}  # a pod sees neither


class _Forgetful(S3Server):
    """An S3 that does not know a condition, as older servers of other makers."""

    def __init__(self, condition: str) -> None:
        super().__init__()
        self._condition = condition

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Any:
        environ.pop(self._condition, None)
        return super()._serve(environ, start_response)


def _store_finding(endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> doctor.Finding:
    import boto3

    made = f"bucket-{uuid.uuid4().hex}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for name, value in {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine", "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3")
    client.create_bucket(Bucket=made)
    (finding,) = (each for each in doctor.examine(store=f"s3://{bucket or made}/prefix") if each.check == "store")
    left = [each["Key"] for each in client.list_objects_v2(Bucket=made).get("Contents", [])]
    assert [key for key in left if "doctor" in key] == []
    return finding


def test_a_store_that_honours_conditional_writes_is_fine(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as endpoint:
        assert _store_finding(endpoint, "", monkeypatch).outcome == "ok"


@pytest.mark.parametrize("condition", ["HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"])
def test_a_store_that_ignores_conditional_writes_is_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    with _Forgetful(condition) as endpoint:
        finding = _store_finding(endpoint, "", monkeypatch)
    assert finding.outcome == "fail"
    assert "does not hold conditional writes" in finding.message


def test_a_bucket_that_does_not_exist_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as endpoint:
        finding = _store_finding(endpoint, "another", monkeypatch)
    assert (finding.outcome, int(finding.code)) == ("fail", 15)
    assert "another" in finding.message


def test_a_tracking_server_that_is_away_is_named_without_its_password(tmp_path: Path) -> None:
    uri = "http://me:hidden@127.0.0.1:9"
    done = _command(tmp_path, MLFLOW_TRACKING_URI=uri, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    assert done.returncode == 203, done.stderr
    assert "FAIL  mlflow: http://127.0.0.1:9" in done.stdout
    assert "hidden" not in done.stdout + done.stderr
