"""The doctor command: its exit code, and places that are unreachable or break their guarantees."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from holdfast.launch.kubernetes.client import Api
from holdfast.pipelines import doctor
from holdfast.pipelines.chaos.s3 import S3Server
from tests import warm
from tests.pipelines.doctor.cluster import (
    Cluster,
    examined,
    only,
)


def test_refused_credentials_are_reported(cluster: Cluster) -> None:
    cluster.status = 401
    finding = only(examined(), "api server")
    assert (finding.outcome, int(finding.code)) == ("fail", 16)


def test_an_unreachable_api_server_is_reported(cluster: Cluster) -> None:
    cluster.server.shutdown()
    cluster.server.server_close()
    finding = only(examined(), "api server")
    assert (finding.outcome, int(finding.code)) == ("fail", 207)
    assert cluster.url in finding.message


def test_the_doctor_looks_at_the_cluster_that_a_launcher_here_would_use(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (("TOKEN", "a-token"), ("CERT", "not read before the first answer")):
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(f"kubernetes.config.incluster_config.SERVICE_{name}_FILENAME", str(tmp_path / name))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")  # a pod in which KUBECONFIG is set too
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "9")
    finding = next(iter(doctor.examine()))
    assert Api.of_this_process().host == "https://127.0.0.1:9"
    assert "https://127.0.0.1:9" in finding.message
    assert cluster.requests == []


def command(tmp_path: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST", "MLFLOW", "AWS_"))
    }
    environment = {**inherited, "HOLDFAST_HOME": str(tmp_path / "home"), "KUBECONFIG": str(tmp_path / "none"), **more}
    return warm.run([sys.executable, "-m", "holdfast.pipelines.cli", "doctor", *arguments], environment)


def test_the_doctor_without_a_cluster_reports_the_remaining_checks(tmp_path: Path) -> None:
    result = command(tmp_path)
    assert result.returncode == 0, result.stderr
    assert "WARN  api server: no cluster is configured" in result.stdout
    assert "OK    store:" in result.stdout
    assert not list((tmp_path / "home/store").rglob("doctor/*"))


def test_the_command_ends_with_the_code_of_the_first_failure_and_prints_json(tmp_path: Path, cluster: Cluster) -> None:
    cluster.denied.add("create pytorchjobs")
    result = command(tmp_path, "--json", KUBECONFIG=os.environ["KUBECONFIG"])
    assert result.returncode == 16, result.stderr
    findings = json.loads(result.stdout)
    failed = [finding for finding in findings if finding["outcome"] == "fail"]
    assert [finding["check"] for finding in failed] == ["permissions"]
    local = {finding["check"]: finding["outcome"] for finding in findings if finding["check"] in ("store", "mlflow")}
    assert local == {"store": "warn", "mlflow": "warn"}  # a pod sees neither


class _Forgetful(S3Server):
    """An S3 that ignores conditional writes, as older servers of other vendors do."""

    def __init__(self, condition: str) -> None:
        super().__init__()
        self._condition = condition

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Any:
        environ.pop(self._condition, None)
        return super()._serve(environ, start_response)


def _store_finding(endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> doctor.Finding:
    import boto3

    new_bucket = f"bucket-{uuid.uuid4().hex}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for name, value in {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine", "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3")
    client.create_bucket(Bucket=new_bucket)
    (finding,) = (
        candidate
        for candidate in doctor.examine(store=f"s3://{bucket or new_bucket}/prefix")
        if candidate.check == "store"
    )
    leftovers = [content["Key"] for content in client.list_objects_v2(Bucket=new_bucket).get("Contents", [])]
    assert [key for key in leftovers if "doctor" in key] == []
    return finding


def test_a_store_that_honours_conditional_writes_is_fine(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as endpoint:
        assert _store_finding(endpoint, "", monkeypatch).outcome == "ok"


@pytest.mark.parametrize("condition", ["HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"])
def test_a_store_that_ignores_conditional_writes_is_reported(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    with _Forgetful(condition) as endpoint:
        finding = _store_finding(endpoint, "", monkeypatch)
    assert finding.outcome == "fail"
    assert "does not hold conditional writes" in finding.message


def test_a_missing_bucket_is_reported(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as endpoint:
        finding = _store_finding(endpoint, "another", monkeypatch)
    assert (finding.outcome, int(finding.code)) == ("fail", 15)
    assert "another" in finding.message


def test_an_unreachable_tracking_server_is_reported_without_its_password(tmp_path: Path) -> None:
    uri = "http://me:hidden@127.0.0.1:9"
    result = command(tmp_path, MLFLOW_TRACKING_URI=uri, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    assert result.returncode == 203, result.stderr
    assert "FAIL  mlflow: http://127.0.0.1:9" in result.stdout
    assert "hidden" not in result.stdout + result.stderr
