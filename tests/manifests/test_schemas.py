"""Every overlay renders, and the API knows every object in it."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.launch.kubernetes.schemas import known_kinds
from holdfast.pipelines.backends.argo.pods import SERVING_ACCOUNT
from holdfast.pipelines.backends.pods import labels_of
from holdfast.steps import STEPS
from tests.manifests.rendering import MANIFESTS, OVERLAYS, name_of, render, render_folder
from tests.manifests.validation import is_custom, problems


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_built_in_object_has_only_fields_that_kubernetes_knows(overlay: str) -> None:
    objects = [document for document in render(overlay) if not is_custom(document)]
    assert len(objects) > 20
    assert [problem for document in objects for problem in problems(document)] == []


def test_every_custom_object_fits_its_official_schema() -> None:
    objects = [document for overlay in OVERLAYS for document in render(overlay) if is_custom(document)]
    kinds = {document["kind"] for document in objects}
    assert kinds >= {"Queue", "ClusterQueue", "LocalQueue", "Topology", "ResourceFlavor", "Sensor", "EventSource"}
    assert [problem for document in objects for problem in problems(document)] == []


def _deployment() -> dict[str, Any]:
    return copy.deepcopy(next(document for document in render("kind") if name_of(document) == "Deployment/mlflow"))


def test_a_misspelt_field_a_wrong_type_and_a_missing_field_are_found() -> None:
    misspelt, wrong, missing = _deployment(), _deployment(), _deployment()
    misspelt["spec"]["template"]["spec"]["containers"][0]["comand"] = ["true"]
    wrong["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"] = 9000
    del missing["spec"]["selector"]
    assert problems(misspelt) == [
        "Deployment.spec.template.spec.containers[0]: comand is not a field of V1Container",
    ]
    assert problems(wrong) == ["Deployment.spec.template.spec.containers[0].env[0].value: 9000 is not of type str"]
    assert any("selector" in problem for problem in problems(missing))


@pytest.mark.parametrize("kind", ["Queue", "ClusterQueue", "Sensor", "EventSource"])
def test_an_unknown_field_of_a_custom_object_is_found(kind: str) -> None:
    document = copy.deepcopy(next(document for document in render("production") if document["kind"] == kind))
    document["spec"]["wieght"] = 1
    assert any("wieght" in problem for problem in problems(document))


def test_an_overlay_with_kueue_provisioning_requests_nodes(tmp_path: Path) -> None:
    """The component needs an autoscaler, so no overlay has it."""
    copy = tmp_path / "manifests"
    shutil.copytree(MANIFESTS / "components", copy / "components")
    overlay = {
        "namespace": "llm",
        "components": [f"../../components/{name}" for name in ("kueue", "kueue-provisioning")],
    }
    (copy / "overlays" / "mine").mkdir(parents=True)
    (copy / "overlays" / "mine" / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    documents = {document["kind"]: document for document in render_folder(copy / "overlays" / "mine")}
    known_documents = [
        document for document in documents.values() if (document["apiVersion"], document["kind"]) in known_kinds()
    ]
    assert [problem for document in known_documents for problem in problems(document)] == []
    (rule,) = documents["ClusterQueue"]["spec"]["admissionChecksStrategy"]["admissionChecks"]
    check = documents["AdmissionCheck"]
    assert (rule["name"], rule["onFlavors"]) == (check["metadata"]["name"], ["holdfast-nvidia"])
    assert check["spec"]["parameters"]["name"] == documents["ProvisioningRequestConfig"]["metadata"]["name"]


def test_the_example_of_a_network_topology_fits_its_schema() -> None:
    """Users copy and change it, so no overlay has it."""
    file = MANIFESTS / "components" / "volcano-topology" / "hypernodes.yaml"
    documents = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    assert [problem for document in documents for problem in problems(document)] == []
    assert {document["kind"] for document in documents} == {"HyperNode"}
    names = {document["metadata"]["name"] for document in documents}
    for document in documents:
        for member in document["spec"]["members"]:
            (match,) = member["selector"].values()
            assert member["type"] == "Node" or match["name"] in names


def test_the_serving_account_may_write_inference_services_and_nothing_else() -> None:
    """The component is in no overlay, because not every cluster has KServe."""
    folder = MANIFESTS / "components" / "kserve"
    files = (folder / "service-account.yaml", folder / "rbac.yaml")
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))]
    assert [problem for document in documents for problem in problems(document)] == []
    (role,) = (document for document in documents if document["kind"] == "Role")
    assert role["rules"] == [
        {"apiGroups": ["serving.kserve.io"], "resources": ["inferenceservices"], "verbs": ["create", "patch"]}
    ]
    (account,) = (document for document in documents if document["kind"] == "ServiceAccount")
    bound = {
        (document["roleRef"]["name"], subject["name"])
        for document in documents if document["kind"] == "RoleBinding"
        for subject in document["subjects"]
    }  # fmt: skip
    name = account["metadata"]["name"]
    assert name == SERVING_ACCOUNT
    assert bound == {(name, name), (name, "pipeline-runner"), ("holdfast-executor", name)}


def test_the_way_to_the_model_registry_is_for_the_step_that_writes_there() -> None:
    file = MANIFESTS / "components" / "model-registry" / "network-policy.yaml"
    policy = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert problems(policy) == []
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert labels == labels_of(STEPS["register"])
