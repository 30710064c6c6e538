"""vLLM as a Deployment and in an InferenceService: fields that the API knows, and a download that checks its bytes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiException

from holdfast.launch.kubernetes.api_errors import refused
from holdfast.launch.kubernetes.schemas import validate
from holdfast.serving import deployment, inference_service
from holdfast.serving.deployment import apply
from holdfast.serving.fetch import fetch, main
from holdfast.spec import Spec, SpecError, parse_spec
from holdfast.spec.errors import AccessDeniedError, DataError
from holdfast.store import open_store
from tests.exports import write_export
from tests.manifests.rendering import MANIFESTS
from tests.manifests.validation import problems

IMAGE = "docker.io/vllm/vllm-openai@sha256:" + "0" * 64
EXPORT, DIGEST = "runs/fedcba9876543210/export/step-000000008-00/", "d1"
SETTINGS = (
    f"{{vllm: {{image: '{IMAGE}', startup_minutes: 10}}, namespace: models, accelerators: 2, memory: 40Gi, "
    "service_account: reader, arguments: [--dtype=bfloat16, --port=9000, '$(HOME)']"
)


def spec(*overrides: str) -> Spec:
    text = (
        "{name: story, store: 's3://bucket/prefix', data: {sources: [{uri: x}]}, "
        "cluster: {accelerator: nvidia, image: h}}"
    )
    return parse_spec(text, overrides)


def objects(*overrides: str, digest: str = DIGEST) -> tuple[dict[str, Any], dict[str, Any]]:
    wanted = spec(f"serving.deployment={SETTINGS}, secret: s3, key_secret: keys}}", *overrides)
    return deployment(wanted, "s3://bucket/prefix", EXPORT, digest, {"version": "3"})


def test_the_objects_have_only_fields_that_kubernetes_knows() -> None:
    for thing in objects():
        assert problems(thing) == []
    served, service = objects()
    served["spec"]["template"]["spec"]["containers"][0]["livenessProbes"] = {}
    assert problems(served)
    assert service["spec"]["selector"] == served["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"].items() <= served["spec"]["template"]["metadata"]["labels"].items()


def test_vllm_serves_the_downloaded_model_on_accelerators() -> None:
    served, _ = objects()
    pod = served["spec"]["template"]["spec"]
    (server,), (download,) = pod["containers"], pod["initContainers"]
    assert server["image"] == IMAGE
    assert server["args"] == [
        "--model=/mnt/models", "--served-model-name=story", "--tensor-parallel-size=2", "--dtype=bfloat16",
        "--port=9000", "$$(HOME)",
    ]  # fmt: skip
    assert server["resources"]["limits"] == {"cpu": "2", "memory": "40Gi", "nvidia.com/gpu": "2"}
    assert [taint["key"] for taint in pod["tolerations"]] == ["nvidia.com/gpu"]
    assert pod["serviceAccountName"] == "reader"
    assert server["startupProbe"]["failureThreshold"] * server["startupProbe"]["periodSeconds"] == 600
    assert server["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "api-key"}
    assert download["image"] == "h"
    assert download["command"][3:] == ["s3://bucket/prefix", EXPORT, DIGEST, "/mnt/models"]
    assert download["envFrom"] == [{"secretRef": {"name": "s3"}}]


def test_another_champion_changes_the_template_of_the_pods() -> None:
    (before, _), (after, _) = objects(), objects(digest="d2")
    assert before["spec"]["template"] != after["spec"]["template"]
    assert before["spec"]["selector"] == after["spec"]["selector"]
    assert "replicas" not in objects("serving.deployment.replicas=null")[0]["spec"]


def test_vllm_is_a_container_of_the_inference_service() -> None:
    service = inference_service(spec(f"serving.kserve={SETTINGS}}}"), f"s3://bucket/prefix/{EXPORT}", {})
    validate(service)
    predictor = service["spec"]["predictor"]
    (server,) = predictor["containers"]
    assert "model" not in predictor
    assert (server["name"], server["image"]) == ("kserve-container", IMAGE)
    assert server["env"] == [{"name": "STORAGE_URI", "value": f"s3://bucket/prefix/{EXPORT}"}]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "2"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["serving.kserve={runtime: mine, vllm: {image: x}}"], r"serving\.kserve\.runtime.*two servers"),
        (["serving.deployment={}"], r"serving\.deployment\.vllm"),
        (["serving.deployment={vllm: {image: x}}", "store=file:///s"], r"(?s)serving\.deployment.*store in S3"),
        (
            ["serving.deployment={vllm: {image: x}, accelerators: 1}", "cluster.accelerator=cpu"],
            r"(?s)serving\.deployment\.accelerators.*use 0",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        spec(*overrides)


def test_a_deployment_needs_an_image_of_holdfast() -> None:
    with pytest.raises(SpecError, match=r"(?s)serving\.deployment\.image.*cluster\.image"):
        objects("cluster.image=null")


class Refusing:
    """An API server that allows nothing."""

    namespace = "models"

    def __init__(self, message: str = "no") -> None:
        self.message = message

    def apply(self, *_: object) -> None:
        body = json.dumps({"kind": "Status", "message": self.message})
        raise refused(ApiException(http_resp=Response(403, body)), "deployments.apps/story")


@dataclass
class Response:
    """An answer of the API server, as its client has it."""

    status: int
    data: str
    reason: str = "Forbidden"

    def getheaders(self) -> dict[str, str]:
        return {}


def test_a_refusal_by_the_policy_of_accounts_has_the_remedy_of_the_policy_and_no_other() -> None:
    message = (
        "deployments.apps \"story\" is forbidden: ValidatingAdmissionPolicy 'holdfast-deployment-accounts' with "
        "binding 'holdfast-deployment-accounts' denied request: a step may not create or change a Deployment that "
        "runs as service account reader; to allow it: kubectl annotate --overwrite namespace models "
        'holdfast/further-service-accounts="reader"'
    )
    with pytest.raises(AccessDeniedError) as error:
        apply(objects(), Refusing(message))  # type: ignore[arg-type]
    assert str(error.value) == f"deployments.apps/story: {message}"


def test_a_missing_right_is_reported_with_the_component_that_gives_it() -> None:
    with pytest.raises(AccessDeniedError, match="manifests/components/serving-deployment"):
        apply(objects(), Refusing())  # type: ignore[arg-type]
    text = (MANIFESTS / "components/serving-deployment/rbac.yaml").read_text()
    role, binding = yaml.safe_load_all(text)
    assert problems(role) == problems(binding) == []
    assert {rule["resources"][0] for rule in role["rules"]} == {"deployments", "services"}
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"create", "patch"}


def test_the_download_writes_only_the_bytes_of_the_digest(tmp_path: Path, s3_url: str) -> None:
    (tmp_path / "a").mkdir()
    for name, size in (("a/model.safetensors", 9 * 2**20 + 5), ("config.json", 40)):
        (tmp_path / name).write_bytes(bytes(range(256)) * (size // 256 + 1))
    store, target = open_store(s3_url), tmp_path / "models"
    export, digest = write_export(store, "fedcba9876543210", 8, "00", tmp_path, ["a/model.safetensors", "config.json"])
    assert main([s3_url, export, digest, str(target)]) == 0
    for name in ("a/model.safetensors", "config.json"):
        assert (target / name).read_bytes() == (tmp_path / name).read_bytes()
    (target / "config.json").write_bytes(b"x" * (tmp_path / "config.json").stat().st_size)
    fetch(s3_url, export, digest, target)  # repaired
    assert (target / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    assert main([s3_url, export, "another", str(target)]) == 11
    data = bytearray((tmp_path / "a/model.safetensors").read_bytes())
    data[5 * 2**20] ^= 1
    store.put(f"{export}a/model.safetensors", bytes(data))
    with pytest.raises(DataError, match=r"model\.safetensors"):
        fetch(s3_url, export, digest, tmp_path / "fresh")
    assert not (tmp_path / "fresh/a/model.safetensors").exists()
