"""The doctor's advice names existing files, pages, commands, options and spec fields. It gives no advice about what
the spec does not use."""

import ast
import re
from pathlib import Path

import pytest
import typer
import yaml

from holdfast.pipelines import doctor
from holdfast.pipelines.cli import app
from holdfast.spec import Spec
from holdfast.spec.fields import find
from tests.pipelines.doctor.cluster import ACCOUNT, Cluster, spec_with

ROOT = Path(__file__).parents[3]
KUBECTL = {"apply", "auth", "cluster-info", "create", "describe", "edit", "get", "label", "patch"}
UNUSED = ("Volcano", "Kueue", "Trainer 2", "gang", "preempt", "PriorityClass")


def texts() -> list[str]:
    """The texts in the code of the doctor, from which it builds its remedies."""
    strings = []
    for file in sorted((ROOT / "pipelines/doctor").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
    return strings


def named(pattern: str) -> set[str]:
    names = {match for text in texts() for match in re.findall(pattern, text)}
    assert names
    return names


@pytest.mark.parametrize("pattern", [r"\bmanifests/[\w./-]*\w", r"(?<![\w/])docs/[\w./-]*\w"])
def test_a_file_that_a_remedy_names_exists(pattern: str) -> None:
    assert {path for path in named(pattern) if not (ROOT / path).exists()} == set()
    assert not any("<yours>" in text for text in texts())


def test_a_field_that_a_remedy_names_is_one_of_the_spec() -> None:
    sections = "|".join(name for name in Spec.model_fields if name not in ("name", "version", "store"))
    fields = named(rf"(?<![\w/.-])((?:{sections})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w/])")
    fields = {field for field in fields if not field.endswith((".md", ".yaml"))}
    assert {field for field in fields if find(field.split("."))[1] is None} == set()


def test_a_command_that_a_remedy_names_is_one() -> None:
    assert named(r"\bkubectl ([a-z-]+)") <= KUBECTL
    group = typer.main.get_command(app)
    assert {name for text in texts() for name in re.findall(r"`holdfast ([a-z-]+)", text)} <= set(group.commands)  # type: ignore[attr-defined]


def everything_missing(cluster: Cluster) -> None:
    for path in list(cluster.objects):
        if not path.startswith(("/apis/kubeflow.org", "/apis/argoproj.io", "/version", "/api/v1/nodes")):
            del cluster.objects[path]


@pytest.mark.parametrize(
    "overrides",
    [
        None,
        {"scheduler": "kueue", "queue": "holdfast", "priority_class": "holdfast-high"},
        {"scheduler": "volcano", "job": "volcano", "queue": "holdfast", "priority_class": "holdfast-low"},
        {"scheduler": "volcano", "queue": "mine", "priority_class": "mine", "service_account": "mine"},
    ],
)
def test_a_file_that_is_to_be_applied_makes_the_object_that_is_missing(
    cluster: Cluster, overrides: dict[str, str] | None
) -> None:
    served = {path: cluster.objects[path] for path in cluster.objects if re.fullmatch(r"/apis/[^/]+(/v\w+)?", path)}
    everything_missing(cluster)
    cluster.objects |= served
    count = 0
    for finding in doctor.examine(spec_with(**overrides) if overrides else None, everything=overrides is None):
        missing = re.search(r"(?:no \S+ |service account )'([\w-]+)'", f"{finding.message}")
        if finding.outcome == "ok" or missing is None or finding.check not in doctor.examine.__globals__["CHECKS"]:
            continue
        file = re.search(r"kubectl apply -n team -f (\S+?),", finding.remedy)
        if missing[1] == "mine":
            assert file is None, "no manifest makes it"
        elif file is not None:
            manifests = yaml.safe_load_all((ROOT / file[1]).read_text(encoding="utf-8"))
            assert missing[1] in {manifest["metadata"]["name"] for manifest in manifests if manifest}
            count += 1
    assert count >= (0 if overrides and "mine" in overrides.values() else 2)


def test_a_plain_run_in_a_kubeflow_profile_gets_no_warning_on_volcano_kueue_or_trainer_2(cluster: Cluster) -> None:
    """A real Kubeflow Pipelines with the training operator had six of ten warnings about these."""
    for path in list(cluster.objects):
        if any(term in path for term in ("volcano", "kueue", "trainer", "priorityclasses")) or path.startswith(ACCOUNT):
            del cluster.objects[path]
    cluster.objects[f"{ACCOUNT}/default-editor"] = {}
    operator = cluster.objects["/apis/apps/v1/deployments"]["items"][0]
    operator["spec"]["template"]["spec"]["containers"][0]["args"] = []
    for spec in (spec_with(), None):
        findings = [finding for finding in doctor.examine(spec) if finding.outcome != "ok"]
        assert not [
            finding for finding in findings if any(term in finding.message + finding.check for term in UNUSED)
        ], findings
    messages = [
        finding.message for finding in doctor.examine(spec_with(), everything=True) if finding.outcome == "warn"
    ]
    assert all(any(term in text for text in messages) for term in ("Volcano", "Kueue", "Trainer 2", "PriorityClass"))
