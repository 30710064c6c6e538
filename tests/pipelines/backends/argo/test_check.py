"""The check finds every dangling reference: valid objects are broken in one place each."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.pipelines.backends.argo import argo_objects, check, emit
from holdfast.spec import parse_spec

Objects = list[dict[str, Any]]
RIGHT = argo_objects(parse_spec("{name: a, data: {sources: [{uri: x}]}, schedule: {every_minutes: 5}}"))


def template(objects: Objects, name: str) -> dict[str, Any]:
    (match,) = [template for template in objects[0]["spec"]["templates"] if template["name"] == name]
    return match


def task(objects: Objects, name: str, dag: str = "train-and-register") -> dict[str, Any]:
    (match,) = [task for task in template(objects, dag)["dag"]["tasks"] if task["name"] == name]
    return match


def argument(objects: Objects, name: str, value: str) -> None:
    container = template(objects, name)["container"]
    container["args"] = [*container["args"], value]


BREAKS: dict[str, tuple[Callable[[Objects], object], str]] = {
    "entrypoint": (lambda o: o[0]["spec"].update(entrypoint="x"), "entrypoint names the template 'x'"),
    "no entrypoint": (lambda o: o[0]["spec"].pop("entrypoint"), "has no entrypoint"),
    "exit handler": (lambda o: o[0]["spec"].update(onExit="x"), "onExit names the template 'x'"),
    "twice": (lambda o: o[0]["spec"]["templates"].append(template(o, "train")), "two templates have one name"),
    "unused": (
        lambda o: o[0]["spec"]["templates"].append({**template(o, "register"), "name": "x"}),
        "template x: nothing uses it",
    ),
    "task's template": (lambda o: task(o, "train").update(template="x"), "runs the template 'x'"),
    "dependency": (lambda o: task(o, "train").update(depends="x"), "depends on 'x', which is no task"),
    "circle": (lambda o: task(o, "preprocess").update(depends="evaluate"), "depends on itself"),
    "argument missing": (lambda o: task(o, "train").pop("arguments"), "does not give parameter 'dataset-id'"),
    "argument unknown": (
        lambda o: task(o, "train")["arguments"]["parameters"].append({"name": "x", "value": "1"}),
        "gives parameter 'x', which train does not take",
    ),
    "output of a task": (
        lambda o: task(o, "train")["arguments"]["parameters"][0].update(
            value="{{tasks.preprocess.outputs.parameters.x}}"
        ),
        "refers to tasks.preprocess.outputs.parameters.x, which is not there",
    ),
    "output of no task": (
        lambda o: task(o, "register").update(when="'{{tasks.x.outputs.parameters.word}}' == 'blessed'"),
        "refers to tasks.x.outputs.parameters.word",
    ),
    "output of a later task": (
        lambda o: task(o, "evaluate").update(when="'{{tasks.register.outputs.parameters.version}}' == '1'"),
        "does not depend on register",
    ),
    "output withdrawn": (lambda o: template(o, "evaluate")["outputs"].pop("parameters"), "word, which is not there"),
    "workflow parameter": (
        lambda o: o[0]["spec"]["arguments"]["parameters"].pop(), "workflow.parameters.data, which is not there",
    ),
    "input": (lambda o: argument(o, "train", "{{inputs.parameters.x}}"), "refers to inputs.parameters.x"),
    "status before the end": (lambda o: argument(o, "train", "{{workflow.status}}"), "refers to workflow.status"),
    "variable": (lambda o: argument(o, "notify", "{{workflow.fails}}"), "refers to workflow.fails"),
    "retry expression": (
        lambda o: template(o, "train")["retryStrategy"].update(expression="lastRetry.code > 1"), "lastRetry.code",
    ),
    "backoff factor": (
        lambda o: template(o, "train")["retryStrategy"]["backoff"].update(factor="1.5"), "no whole number",
    ),
    "backoff that ends": (
        lambda o: template(o, "train")["retryStrategy"]["backoff"].update(maxDuration="1h"), "use cap",
    ),
    "volume": (lambda o: o[0]["spec"].update(volumes=[]), "mounts the volume 'temporary'"),
    "relative output": (
        lambda o: template(o, "train")["outputs"]["parameters"][0]["valueFrom"].update(path="x"), "no absolute path",
    ),
    "template of the schedule": (
        lambda o: o[1]["spec"]["workflowSpec"]["workflowTemplateRef"].update(name="x"), "names 'x'",
    ),
    "way in of the schedule": (
        lambda o: o[1]["spec"]["workflowSpec"].update(entrypoint="x"), "CronWorkflow holdfast-a: entrypoint",
    ),
}  # fmt: skip


def test_emitted_objects_have_no_dangling_references() -> None:
    assert check(RIGHT) == []


@pytest.mark.parametrize(("broken", "message"), BREAKS.values(), ids=BREAKS.keys())
def test_a_reference_to_nothing_is_reported(broken: Callable[[Objects], object], message: str) -> None:
    objects = copy.deepcopy(RIGHT)
    broken(objects)
    assert any(message in problem for problem in check(objects)), check(objects)


def test_objects_with_dangling_references_are_not_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit, "check", lambda _: ["template x: refers to y, which is not there"])
    with pytest.raises(AssertionError, match="refers to y"):
        argo_objects(parse_spec("{name: a, data: {sources: [{uri: x}]}}"))
