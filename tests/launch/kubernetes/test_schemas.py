"""The validator refuses what an API server would refuse or drop: each valid object is broken in one place."""

import copy
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from holdfast.launch.emitters import objects_for, training_job
from holdfast.launch.kubernetes.schemas import closed, known_kinds, validate
from holdfast.spec import parse_spec

SPEC = "{name: a, data: {sources: [{uri: x}]}, cluster: {nodes: {min: 2, max: 2}}}"

Break = Callable[[dict[str, Any]], object]


@pytest.fixture
def right() -> dict[str, Any]:
    (manifest,) = objects_for(training_job(parse_spec(SPEC), "0123456789abcdef", 1, "s3://bucket/x"))
    return copy.deepcopy(manifest)


def pod(thing: dict[str, Any]) -> dict[str, Any]:
    return thing["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def container(thing: dict[str, Any]) -> dict[str, Any]:
    return pod(thing)["containers"][0]


BREAKS: dict[str, Break] = {
    "unknown field at the top": lambda thing: thing.update(status_={}),
    "unknown field of the spec": lambda thing: thing["spec"].update(nProcPerNode=2),
    "unknown field of the pod": lambda thing: pod(thing).update(restartPolicies="Never"),
    "unknown field of the container": lambda thing: container(thing).update(comand=[]),
    "unknown field of a list's item": lambda thing: container(thing)["env"][0].update(val="x"),
    "unknown field of metadata": lambda thing: thing["metadata"].update(lables={}),
    "number for text": lambda thing: thing["spec"].update(nprocPerNode=2),
    "text for a number": lambda thing: thing["spec"]["runPolicy"].update(backoffLimit="0"),
    "text for a flag": lambda thing: pod(thing).update(automountServiceAccountToken="no"),
    "a quantity that is none": lambda thing: container(thing)["resources"]["limits"].update(memory="16 GB"),
    "a fraction for a quantity": lambda thing: container(thing)["resources"]["limits"].update(memory=1.5),
    "no containers": lambda thing: pod(thing).pop("containers"),
    "a container without a name": lambda thing: container(thing).pop("name"),
    "no name": lambda thing: thing["metadata"].pop("name"),
    "a label that is no text": lambda thing: thing["metadata"]["labels"].update(x=1),
    "a label that is too long": lambda thing: thing["metadata"]["labels"].update(x="y" * 64),
    "an owner without a uid": lambda thing: thing["metadata"].update(
        ownerReferences=[{"apiVersion": "v1", "kind": "Pod", "name": "p"}]
    ),
    "another kind": lambda thing: thing.update(kind="PytorchJob"),
    "another version": lambda thing: thing.update(apiVersion="kubeflow.org/v2"),
}


def test_a_right_object_is_accepted(right: dict[str, Any]) -> None:
    validate(right)
    container(right)["resources"]["limits"]["memory"] = 17179869184  # int-or-string
    validate(right)


@pytest.mark.parametrize("broken", BREAKS.values(), ids=BREAKS.keys())
def test_an_object_with_one_thing_broken_is_refused(right: dict[str, Any], broken: Break) -> None:
    broken(right)
    with pytest.raises(jsonschema.ValidationError):
        validate(right)


def test_every_kind_that_is_emitted_or_shipped_has_a_schema() -> None:
    assert known_kinds() >= {
        ("kubeflow.org/v1", "PyTorchJob"),
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
        ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
        ("batch.volcano.sh/v1alpha1", "Job"),
        ("scheduling.volcano.sh/v1beta1", "Queue"),
        ("kueue.x-k8s.io/v1beta1", "LocalQueue"),
    }


def test_fields_that_a_schema_preserves_may_be_anything_and_maps_are_held_by_their_values() -> None:
    schema = closed(
        {
            "type": "object",
            "properties": {
                "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                "map": {"type": "object", "additionalProperties": {"type": "object", "properties": {"a": {}}}},
                "port": {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]},
                "maybe": {"type": "string", "nullable": True},
            },
        }
    )
    jsonschema.validate({"free": {"x": [1]}, "map": {"k": {"a": 1}}, "port": "http", "maybe": None}, schema)
    for wrong in ({"other": 1}, {"map": {"k": {"b": 1}}}, {"port": 1.5}, {"maybe": 1}, {"free": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_argo_objects_are_held_as_strictly() -> None:
    template = {"name": "a", "container": {"image": "x"}, "retryStrategy": {"limit": 3}}
    workflow: dict[str, Any] = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": "w"},
        "spec": {"entrypoint": "a", "templates": [template]},
    }
    validate(workflow)
    wrongs: list[dict[str, Any]] = [{"containr": {}}, {"retryStrategy": {"limt": 3}}, {"container": {}}, {"name": 3}]
    for wrong in wrongs:
        broken = copy.deepcopy(workflow)
        broken["spec"]["templates"][0] |= wrong
        with pytest.raises(jsonschema.ValidationError):
            validate(broken)
