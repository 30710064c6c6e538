"""A sweep behind the common protocol: submitted under a separate name, followed trial by trial, found again."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.components.compare import compare
from holdfast.pipelines.backends.argo import check
from holdfast.pipelines.backends.argo.backend import Argo
from holdfast.pipelines.backends.kubeflow.backend import Kubeflow
from holdfast.pipelines.backends.kubeflow.connection import Access
from holdfast.pipelines.backends.record import find_record, record_of
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.view.comparison import find_comparison
from holdfast.spec import parse_spec
from holdfast.store import open_store
from tests.cluster.api import ApiServer
from tests.compare.test_compare import SPEC as COMPARED
from tests.compare.test_compare import TRIALS as COMPARED_TRIALS
from tests.compare.test_compare import judged
from tests.kubeflow_server import KubeflowServer
from tests.pipelines.backends.argo.test_backend import argo, ended, server, workflows
from tests.pipelines.backends.kubeflow.conftest import compile_once, without_pauses

SPEC = parse_spec("{name: small, store: 's3://bucket/prefix', data: {sources: [{uri: 'python:stdlib'}]}}")
SWEEP = "3f2a4b5c6d7e8f90"
ORDER = RunRequest(SPEC, run_id=SWEEP, trials=(("training.seed=1",), ("training.seed=2",)), concurrent_trials=1)
__all__ = ["argo", "compile_once", "server", "without_pauses"]  # fixtures


def node(name: str, kind: str, template: str, phase: str) -> dict[str, Any]:
    return {
        "id": name, "type": kind, "templateName": template, "phase": phase, "displayName": name,
        "startedAt": "2026-11-20T10:00:00Z",
    }  # fmt: skip


def test_argo_runs_a_sweep_as_a_workflow_with_a_status_per_trial(server: ApiServer, argo: Argo) -> None:
    assert check(argo.objects(ORDER)) == []
    run, created = argo.submit(ORDER)
    assert (created, argo.submit(ORDER)[1]) == (True, False)
    assert run.name.startswith("holdfast-small-sweep-")
    (workflow,) = workflows(server)
    names = {parameter["name"] for parameter in workflow["spec"]["arguments"]["parameters"]}
    assert names == {"spec", "store", "salt", "replan"}
    (template,) = server.objects.all("workflowtemplates")
    dag = next(entry for entry in template["spec"]["templates"] if "dag" in entry)
    assert dag["parallelism"] == 1
    nodes = [
        node("train-1", "Retry", "train", "Succeeded"), node("train-1(0)", "Pod", "train", "Succeeded"),
        node("train-2", "Retry", "train", "Failed"), node("train-2(0)", "Pod", "train", "Failed"),
        node("compare", "Retry", "compare", "Running"),
    ]  # fmt: skip
    ended(server, run.id, "Running", nodes={entry["id"]: entry for entry in nodes})
    for name in (SWEEP, SWEEP[:6], "small-sweep", run.id):
        steps = {step.name: step.state for step in argo.status(name).steps}
        assert steps == {"train-1": "SUCCEEDED", "train-2": "FAILED", "compare": "RUNNING"}
    other = argo.submit(replace(ORDER, trials=(("training.seed=1",), ("training.seed=3",))))
    assert other[0].id != run.id


@pytest.fixture
def kubeflow() -> Iterator[KubeflowServer]:
    with KubeflowServer() as server:
        yield server


def test_kubeflow_runs_a_sweep_as_a_separate_pipeline_with_a_status_per_trial(kubeflow: KubeflowServer) -> None:
    backend = Kubeflow(Access(kubeflow.endpoint))
    run, created = backend.submit(ORDER)
    assert (created, backend.submit(ORDER)[1]) == (True, False)
    assert [pipeline["display_name"] for pipeline in kubeflow.pipelines.values()] == ["small-sweep"]
    kubeflow.progress(run.id, "RUNNING", {"train": "SUCCEEDED", "train-2": "RUNNING", "evaluate": "RUNNING"})
    for name in (SWEEP, "small-sweep"):
        assert [step.name for step in backend.status(name).steps] == ["train-1", "train-2", "evaluate-1"]
    kubeflow.runs[run.id]["state"] = "SUCCEEDED"
    assert backend.submit(ORDER)[1] is True  # KFP does not report whether a trial failed


def test_a_sweep_record_is_found_by_id_and_name_and_restores_the_request(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    record_of(replace(ORDER, trials=(), run_id="0" * 16), "argo", "workflow-1").write(store)
    record_of(ORDER, "argo", "workflow-2").write(store)
    for wanted in (SWEEP, SWEEP[:5], "small-sweep", "workflow-2"):
        record = find_record(store, wanted)
        assert record is not None
        assert (record.id, record.request) == ("workflow-2", ORDER)
    run = find_record(store, "small")
    assert run is not None and run.id == "workflow-1"


def test_a_comparison_is_found_by_the_name_or_the_beginning_of_the_id(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    judged(store, COMPARED_TRIALS[0], 1.0, "blessed")
    comparison = compare(COMPARED, "d", COMPARED_TRIALS, store)
    assert find_comparison(store, "a-sweep") == find_comparison(store, comparison.sweep_id[:6]) == comparison
