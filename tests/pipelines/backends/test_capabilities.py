"""Backends state their capabilities, and no caller compares the name of a backend."""

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from holdfast import api
from holdfast.pipelines.backends import BACKENDS
from holdfast.pipelines.backends.capabilities import Capabilities
from holdfast.spec.errors import UsageError

ROOT = Path(__file__).parents[3]
FOLDERS = ("holdfast/pipelines", "holdfast/api")


def named_in_comparisons(source: str) -> set[str]:
    """The names of backends that the comparisons of a module contain."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            constants = [child.value for child in ast.walk(node) if isinstance(child, ast.Constant)]
            names |= {name for name in BACKENDS if name in constants}
    return names


def test_no_caller_compares_the_name_of_a_backend() -> None:
    backends = tuple(ROOT / "holdfast/pipelines/backends" / name for name in BACKENDS)
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    callers = [path for path in files if not any(path.is_relative_to(folder) for folder in backends)]
    assert len(callers) > 50
    names_by_file = {str(path): names for path in callers if (names := named_in_comparisons(path.read_text()))}
    assert names_by_file == {str(ROOT / "holdfast/pipelines/doctor/ray.py"): {"ray"}}  # the name of a Python package
    assert named_in_comparisons('if name in ("local", "x"): pass') == {"local"}


def test_every_backend_class_states_the_capabilities_of_the_table() -> None:
    for name, entry in BACKENDS.items():
        module = __import__(f"holdfast.pipelines.backends.{name}.backend", fromlist=[name])
        kind: Any
        (kind,) = (
            member
            for member in vars(module).values()
            if getattr(member, "name", "") == name and isinstance(member, type)
        )
        assert kind.capabilities == entry.capabilities, name


@pytest.mark.parametrize(
    ("options", "backend", "words"),
    [
        (api.ClusterOptions(image="x"), "local", "--image: the backend local has no use for it"),
        (api.ClusterOptions(endpoint="http://x"), "local", "add --backend with one of kubeflow, argo, ssh, ray"),
    ],
)
def test_an_option_that_a_backend_does_not_have_is_refused(
    options: api.ClusterOptions, backend: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        api.request(ROOT / "examples/quickstart.yaml", backend=backend, options=options)


def test_a_sweep_on_a_backend_without_sweeps_is_refused_with_those_that_have_them() -> None:
    with pytest.raises(UsageError, match="ray runs no sweeps; use one of local, kubeflow, argo, slurm"):
        api.request(ROOT / "examples/quickstart.yaml", backend="ray", over=["training.seed=1,2"])


@pytest.mark.parametrize(
    ("options", "backend", "over", "words"),
    [
        (
            api.ClusterOptions(concurrent_trials=1),
            "local",
            ["training.seed=1,2"],
            "--concurrent-trials.*use one of argo, slurm",
        ),
        (api.ClusterOptions(concurrent_trials=1), "kubeflow", ["training.seed=1,2"], "cannot limit the trials"),
        (api.ClusterOptions(namespace="x"), "slurm", [], "--namespace: the backend slurm has no use for it"),
        (api.ClusterOptions(image="x"), "ray", [], "--image: the backend ray has no use for it"),
    ],
)
def test_an_option_without_effect_is_refused_on_a_cluster_as_well(
    options: api.ClusterOptions, backend: str, over: list[str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        api.request(ROOT / "examples/quickstart.yaml", backend=backend, over=over, options=options)


def test_every_capability_is_used_somewhere() -> None:
    sources = "".join(path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    for field in fields(Capabilities):
        uses = re.findall(rf"capabilities(?:_of\([^)]*\))?\.{field.name}\b|\"{field.name}\"", sources)
        assert uses, f"{field.name} has no reader"
