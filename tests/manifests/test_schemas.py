"""Every overlay renders, and every object in it is one that its API knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.kubernetes_schemas import needs_schemas
from tests.manifests.rendering import OVERLAYS, name_of, render
from tests.manifests.validation import is_custom, problems


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_built_in_object_has_only_fields_that_kubernetes_knows(overlay: str) -> None:
    objects = [thing for thing in render(overlay) if not is_custom(thing)]
    assert len(objects) > 20
    assert [problem for thing in objects for problem in problems(thing)] == []


@needs_schemas
def test_every_custom_object_fits_its_official_schema() -> None:
    objects = [thing for overlay in OVERLAYS for thing in render(overlay) if is_custom(thing)]
    kinds = {thing["kind"] for thing in objects}
    assert kinds >= {"Queue", "ClusterQueue", "LocalQueue", "Topology", "ResourceFlavor", "Sensor", "EventSource"}
    assert [problem for thing in objects for problem in problems(thing)] == []


def _deployment() -> dict[str, Any]:
    return copy.deepcopy(next(thing for thing in render("kind") if name_of(thing) == "Deployment/mlflow"))


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


@needs_schemas
@pytest.mark.parametrize("kind", ["Queue", "ClusterQueue", "Sensor", "EventSource"])
def test_an_unknown_field_of_a_custom_object_is_found(kind: str) -> None:
    thing = copy.deepcopy(next(thing for thing in render("production") if thing["kind"] == kind))
    thing["spec"]["wieght"] = 1
    assert any("wieght" in problem for problem in problems(thing))
