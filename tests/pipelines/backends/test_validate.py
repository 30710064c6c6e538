"""What is held against the cluster before it is sent, and by whom."""

from __future__ import annotations

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


def test_without_a_server_heras_models_look_at_argos_objects_and_the_rest_is_named() -> None:
    found = validate([*objects(), {"request": "to KFP"}])
    assert found.by.startswith("the models of Hera")
    assert (found.problems, found.unseen) == ([], ["PyTorchJob"])


def test_every_kind_that_is_emitted_can_be_asked_of_a_server() -> None:
    spec = parse_spec(dump_spec(load_spec(SPEC)), ["serving.kserve.namespace=models"])
    service = inference_service(spec, "s3://b/export", {})
    assert validate([service]).unseen == ["InferenceService"]  # not passed over: a server would look at it


def test_a_field_of_a_wrong_type_is_named() -> None:
    template = objects()[0]
    template["spec"]["templates"][0]["container"]["args"] = "one word"
    (problem,) = validate([template]).problems
    assert problem.startswith("WorkflowTemplate holdfast-cluster-cpu: ")
    assert "container.args" in problem


@pytest.mark.parametrize(("code", "said"), [(500, AWAY), (403, ROOM)], ids=["webhook", "quota"])
def test_what_keeps_a_server_from_taking_an_object_does_not_make_it_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    monkeypatch.setattr(validating, "PATIENCE", 1.0)
    job = objects_for(training_job(load_spec(SPEC), "run", 1, "s3://b"))
    with Emulation(tmp_path / "cluster") as cluster:
        cluster.server.faults.append(lambda verb, plural: StatusError(code, said))
        kubeconfig = cluster.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
        found = validate(job, NAMESPACE)
    assert found.by == f"the API server {cluster.server.url}"
    (problem,) = found.problems
    assert said in problem
