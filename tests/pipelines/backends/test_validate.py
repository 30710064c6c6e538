"""Validation of objects before they are sent: which checks run, and against which server or schemas."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.launch.emitters import objects_for, training_job
from holdfast.pipelines.backends import validate as validating
from holdfast.pipelines.backends.argo import argo_objects
from holdfast.pipelines.backends.validate import validate
from holdfast.serving import inference_service
from holdfast.spec import dump_spec, load_spec, parse_spec
from tests.cluster.emulation import Emulation
from tests.cluster.objects import NAMESPACE, StatusError
from tests.cluster.test_answers import AWAY, ROOM

SPEC = Path(__file__).parents[3] / "examples/cluster-cpu.yaml"


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster is configured."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))


def objects() -> list[dict[str, Any]]:
    spec = load_spec(SPEC)
    return [*argo_objects(spec), *objects_for(training_job(spec, "run", 1, "s3://b"))]


def test_without_a_server_the_schemas_that_come_with_holdfast_check_every_custom_resource() -> None:
    spec = parse_spec(dump_spec(load_spec(SPEC)), ["serving.kserve.namespace=models"])
    manifests = [*objects(), inference_service(spec, "s3://b/export", {})]
    validation = validate(
        [*manifests, {"request": "to KFP"}, {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}}]
    )
    assert validation.by.startswith("the schemas that come with Holdfast")
    assert (validation.problems, validation.unseen, validation.checked) == ([], ["Job"], len(manifests))


@pytest.mark.parametrize(
    ("kind", "path", "value", "named"),
    [
        ("WorkflowTemplate", "spec.templates.0.container.args", "one word", "spec.templates.0.container.args"),
        ("PyTorchJob", "spec.runPolicies", {}, "runPolicies"),
        ("InferenceService", "spec.predictor.model.storageUrl", "s3://b", "storageUrl"),
    ],
)
def test_a_field_of_a_wrong_type_or_without_a_schema_is_reported(kind: str, path: str, value: Any, named: str) -> None:
    spec = parse_spec(dump_spec(load_spec(SPEC)), ["serving.kserve.namespace=models"])
    manifests = [*objects(), inference_service(spec, "s3://b/export", {})]
    manifest = next(candidate for candidate in manifests if candidate["kind"] == kind)
    node: Any = manifest
    *parents, last = path.split(".")
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    node[last] = value
    (problem,) = validate([manifest]).problems
    assert problem.startswith(f"{kind} {manifest['metadata']['name']}: ")
    assert named in problem


@pytest.mark.parametrize(("code", "message"), [(500, AWAY), (403, ROOM)], ids=["webhook", "quota"])
def test_a_server_that_refuses_an_object_counts_as_reachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    monkeypatch.setattr(validating, "PATIENCE", 1.0)
    job = objects_for(training_job(load_spec(SPEC), "run", 1, "s3://b"))
    with Emulation(tmp_path / "cluster") as cluster:
        cluster.server.faults.append(lambda verb, plural: StatusError(code, message))
        kubeconfig = cluster.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
        validation = validate(job, NAMESPACE)
    assert validation.by == f"the API server {cluster.server.url}"
    (problem,) = validation.problems
    assert message in problem
