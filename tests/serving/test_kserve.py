"""The InferenceService has the fields that KServe reads, and writing it loses no fields of other writers."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes.client import Configuration

from holdfast.launch.kubernetes.client import Api
from holdfast.serving import inference_service
from holdfast.serving.kserve import apply
from holdfast.spec import Spec, SpecError, parse_spec
from holdfast.spec.errors import AccessDeniedError, MissingError
from tests.http_server import QuietHandler, running

SOURCE = "s3://bucket/prefix/runs/fedcba9876543210/export/step-000000008/"


def spec(*overrides: str) -> Spec:
    text = "{name: story, store: 's3://bucket/prefix', data: {sources: [{uri: x}]}, serving: {kserve: {}}}"
    return parse_spec(text, overrides)


def test_the_service_reads_the_export_from_the_bucket() -> None:
    """Field names from kserve/kserve: pkg/apis/serving/v1beta1/predictor_model.go, component.go (v0.20)."""
    service = inference_service(spec("cluster.namespace=models"), SOURCE, {"version": "3"})
    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    assert service["kind"] == "InferenceService"
    assert (service["metadata"]["name"], service["metadata"]["namespace"]) == ("story", "models")
    assert service["metadata"]["annotations"] == {"holdfast/version": "3"}
    resources = {"cpu": "2", "memory": "8Gi"}
    assert service["spec"] == {
        "predictor": {
            "minReplicas": 1,
            "maxReplicas": 1,
            "model": {
                "modelFormat": {"name": "huggingface"},
                "storageUri": SOURCE,
                "resources": {"requests": resources, "limits": resources},
            },
        }
    }


def test_the_inference_service_has_the_fields_of_the_spec() -> None:
    service = inference_service(
        spec(
            "cluster.accelerator=nvidia", "cluster.namespace=training",
            "serving.kserve={name: tales, namespace: models, service_account: reader, runtime: mine, min_replicas: 0, "
            "max_replicas: 4, cpu: 6, memory: 40Gi, accelerators: 2, arguments: [--dtype=bfloat16], "
            "node_selector: {gpu: l40s}, tolerations: [{key: spot}], labels: {team: llm}, "
            "annotations: {serving.kserve.io/deploymentMode: Standard}}",
        ),
        SOURCE, {},
    )  # fmt: skip
    assert (service["metadata"]["name"], service["metadata"]["namespace"]) == ("tales", "models")
    assert service["metadata"]["labels"]["team"] == "llm"
    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "Standard"}
    predictor = service["spec"]["predictor"]
    assert (predictor["minReplicas"], predictor["maxReplicas"], predictor["serviceAccountName"]) == (0, 4, "reader")
    assert predictor["nodeSelector"] == {"gpu": "l40s"}
    assert [taint["key"] for taint in predictor["tolerations"]] == ["spot", "nvidia.com/gpu"]
    assert predictor["model"]["runtime"] == "mine"
    assert predictor["model"]["args"] == ["--dtype=bfloat16"]
    resources = {"cpu": "6", "memory": "40Gi", "nvidia.com/gpu": "2"}
    assert predictor["model"]["resources"] == {"requests": resources, "limits": resources}


def test_without_a_section_or_a_bucket_there_is_nothing_to_serve() -> None:
    with pytest.raises(SpecError, match=r"serving\.kserve.*is missing"):
        inference_service(spec("serving.kserve=null"), SOURCE, {})
    with pytest.raises(SpecError, match="is no bucket"):
        inference_service(spec(), "file:///store/runs/x/", {})


class Server:
    """An API server that records one request and answers it with a status."""

    def __init__(self) -> None:
        self.status = 200
        self.requests: list[tuple[str, str, str, Any]] = []

    def api(self) -> Api:
        def configure() -> Configuration:
            return Configuration(host=self.url)

        return Api(configure, "models", patience=5)

    url = ""


@pytest.fixture
def server() -> Iterator[Server]:
    fake = Server()

    class Handler(QuietHandler):
        def do_PATCH(self) -> None:
            body = json.loads(self.body())
            fake.requests.append((self.command, self.path, self.headers["Content-Type"], body))
            self.answer(fake.status, {"kind": "Status", "message": "no", "code": fake.status})

    with running(Handler) as fake.url:
        yield fake


def test_the_inference_service_is_written_by_server_side_apply(server: Server) -> None:
    service = inference_service(spec(), SOURCE, {})
    apply(service, server.api())
    path = "/apis/serving.kserve.io/v1beta1/namespaces/models/inferenceservices/story?fieldManager=holdfast&force=true"
    assert server.requests == [("PATCH", path, "application/apply-patch+yaml", service)]


def test_a_missing_kserve_or_permission_is_reported_with_a_remedy(server: Server) -> None:
    server.status = 404
    with pytest.raises(MissingError, match="is KServe installed"):
        apply(inference_service(spec(), SOURCE, {}), server.api())
    server.status = 403
    with pytest.raises(AccessDeniedError, match=r"create and patch on inferenceservices\.serving"):
        apply(inference_service(spec(), SOURCE, {}), server.api())
