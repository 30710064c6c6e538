"""Output of `status` for a run, on answers of a real server: one row for each node, with reasons."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import Configuration

from holdfast.launch.kubernetes.client import Api
from holdfast.pipelines.backends.interface import RunStatus
from holdfast.pipelines.backends.kubeflow import records
from holdfast.pipelines.backends.kubeflow.backend import Kubeflow
from holdfast.pipelines.backends.kubeflow.connection import Access, Server
from holdfast.pipelines.backends.kubeflow.submit import submit
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec.errors import AccessDeniedError
from holdfast.steps.jobs import recorder
from holdfast.steps.outcomes import Outcome
from holdfast.store import Store, layout, open_store
from holdfast.telemetry import emit, recording
from holdfast.telemetry.events import LaunchPending, Progress
from tests.cluster.api import ALLOWED, NAMESPACE, ApiServer
from tests.kubeflow_server import KubeflowServer
from tests.pipelines.backends.kubeflow.conftest import spec

RUN_ID = "fedcba9876543210"
Shown = list[tuple[str, str, str, int | None]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def no_cluster() -> Api:
    raise AccessDeniedError("no cluster is known here")


def status(kubeflow: KubeflowServer, store: Store, run: str, api: Any = no_cluster) -> RunStatus:
    return Kubeflow(Access(kubeflow.endpoint), store.url, api).status(run)


def shown(found: RunStatus) -> Shown:
    return [(step.name, step.state, step.error, step.exit_code) for step in found.steps]


def left(store: Store, job: str, *outcomes: Outcome) -> None:
    record = recorder(job)
    assert record
    for outcome in outcomes:
        record(store.url, outcome)


def step(name: str, result: str = "", code: int | None = 0, reason: str = "") -> Outcome:
    return Outcome(name, 1, 1.0, 2.0, code, reason, result)


TRAINED = (step("preprocess", "d"), step("train", RUN_ID))


def test_each_step_of_a_succeeded_run_is_one_row_in_dag_order(kubeflow: KubeflowServer, store: Store) -> None:
    run_status = status(kubeflow, store, kubeflow.recorded("retried"))
    assert shown(run_status) == [
        (name, "SUCCEEDED", "", 0) for name in ("preprocess", "train", "evaluate", "register", "notify")
    ]
    assert [step.seconds for step in run_status.steps] == [20, 64, 21, 22, 20]


def test_a_skipped_step_has_the_reason(kubeflow: KubeflowServer, store: Store) -> None:
    run = kubeflow.recorded("succeeded-not-blessed")
    left(store, run, *TRAINED, step("evaluate", "not_blessed"))
    verdict = {"word": "not_blessed", "reasons": ["Perplexity 228 is not below 200."]}
    store.put(layout.verdict(RUN_ID, "k"), json.dumps(verdict).encode())
    assert shown(status(kubeflow, store, run))[2:4] == [
        ("evaluate", "SUCCEEDED", "", 0), ("register", "SKIPPED", "Perplexity 228 is not below 200.", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("given", ["default", "dictionary"])
def test_a_refused_value_is_named_whether_the_spec_is_a_default_or_a_dictionary(
    kubeflow: KubeflowServer, server: Server, store: Store, given: str
) -> None:
    run = submit(server, RunRequest(spec())).kfp_run_id
    whole = {"spec": {"name": "small", "data": {"sources": [{"uri": "x"}]}}} if given == "dictionary" else {}
    kubeflow.runs[run]["runtime_config"]["parameters"] = {**whole, "learning_rate": -1}
    kubeflow.progress(run, "FAILED", {"preprocess": "FAILED", "notify": "SUCCEEDED"})
    assert "learning_rate" in shown(status(kubeflow, store, run))[0][2]


def test_a_refused_spec_of_the_form_is_the_reason_and_the_rest_never_began(
    kubeflow: KubeflowServer, store: Store
) -> None:
    run = kubeflow.recorded("failed-bad-parameter")
    kubeflow.runs[run]["runtime_config"]["parameters"]["spec"] = "{name: long, data: {sources: [{uri: x}]}}"
    run_status = status(kubeflow, store, run)
    name, state, error, code = shown(run_status)[0]
    assert (name, state, code, run_status.exit_code) == ("preprocess", "FAILED", 10, 10)
    assert "exit code 10" in error and "learning_rate" in error and "-1" in error
    assert [row[:2] for row in shown(run_status)[1:]] == [
        ("train", "NOT_BEGUN"), ("evaluate", "NOT_BEGUN"), ("register", "NOT_BEGUN"), ("notify", "SUCCEEDED"),
    ]  # fmt: skip


def test_a_failed_step_has_its_own_reason_and_exit_code(kubeflow: KubeflowServer, store: Store) -> None:
    run = kubeflow.recorded("failed-bad-parameter")
    left(store, run, step("preprocess", code=11, reason="x: no file matches\nmore"))
    assert shown(status(kubeflow, store, run))[0][1:] == ("FAILED", "exit code 11 (bad data): x: no file matches", 11)


@pytest.mark.parametrize("known", ["record", "workflow", "nothing"])
def test_a_step_with_a_killed_pod_has_the_reason(
    kubeflow: KubeflowServer, store: Store, cluster: ApiServer, known: str
) -> None:
    run = kubeflow.recorded("failed-bad-parameter")
    kubeflow.runs[run]["runtime_config"]["parameters"] = {"spec": "{name: long, data: {sources: [{uri: x}]}}"}
    if known == "record":
        left(store, run, Outcome("preprocess", 1, 1.0))
    elif known == "workflow":
        node = {"type": "Pod", "phase": "Failed", "message": "OOMKilled (exit code 137)"}
        metadata = {"name": "long-f7l6j", "namespace": NAMESPACE}
        cluster.objects.create(
            "workflows", {"metadata": metadata, "status": {"nodes": {"long-f7l6j-2365417634": node}}}
        )
    error = shown(status(kubeflow, store, run, reached(cluster)))[0][2]
    assert error.startswith({"record": "the process was killed", "workflow": "OOMKilled", "nothing": ""}[known])
    assert bool(error) == (known != "nothing")


def test_a_store_that_cannot_be_read_is_named_where_a_reason_is_missing(
    kubeflow: KubeflowServer, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    away.symlink_to(away)
    run = kubeflow.recorded("failed-bad-parameter")
    kubeflow.runs[run]["runtime_config"]["parameters"] = {"spec": "{name: long, data: {sources: [{uri: x}]}}"}
    run_status = Kubeflow(Access(kubeflow.endpoint), away.as_uri(), no_cluster).status(run)
    assert "why preprocess failed is not known: the records in the store cannot be read" in run_status.message


def test_a_firing_that_found_nothing_due_skips_all_with_its_reason(kubeflow: KubeflowServer, store: Store) -> None:
    run = kubeflow.recorded("succeeded")
    rows = kubeflow.runs[run]["run_details"]["task_details"]
    first = next(row for row in rows if row["display_name"] == "preprocess")
    rows[:] = [{**first, "display_name": "trigger"}]
    left(store, run, step("trigger", "not_due: nothing changed"))
    assert [row[:3] for row in shown(status(kubeflow, store, run))] == [
        ("trigger", "SUCCEEDED", ""),
        *((name, "SKIPPED", "nothing changed") for name in ("preprocess", "train", "evaluate", "register")),
    ]


def test_a_cancelled_run_and_its_step_are_cancelled(kubeflow: KubeflowServer, store: Store) -> None:
    run = kubeflow.recorded("cancelled")
    left(store, run, step("preprocess", "d"), step("train", code=204, reason="stop requested: saved step 80"))
    run_status = status(kubeflow, store, run)
    assert run_status.state == "CANCELED"
    assert [row[:2] for row in shown(run_status)] == [
        ("preprocess", "SUCCEEDED"), ("train", "CANCELED"), ("evaluate", "NOT_BEGUN"), ("register", "NOT_BEGUN"),
        ("notify", "SUCCEEDED"),
    ]  # fmt: skip
    assert shown(run_status)[1][2] == "exit code 204 (preempted): stop requested: saved step 80"


def test_trials_of_a_sweep_that_runs_have_one_row_each(kubeflow: KubeflowServer, store: Store) -> None:
    run_status = status(kubeflow, store, kubeflow.recorded("sweep-running"))
    assert [row[:2] for row in shown(run_status)] == [
        ("preprocess", "SUCCEEDED"), ("train-1", "RUNNING"), ("train-2", "SUCCEEDED"), ("train-3", "RUNNING"),
        ("evaluate-2", "PENDING"),
    ]  # fmt: skip


@pytest.mark.parametrize("trains", [False, True])
def test_a_pending_training_shows_what_it_waits_for_until_it_trains(
    kubeflow: KubeflowServer, store: Store, trains: bool
) -> None:
    run = kubeflow.recorded("sweep-running")
    rows = kubeflow.runs[run]["run_details"]["task_details"]
    rows[:] = [row for row in rows if "-2" not in row["display_name"] and "-3" not in row["display_name"]]
    left(store, run, step("preprocess", "d"), Outcome("train", 1, 1.0, result=RUN_ID))
    with recording(store, RUN_ID, "launcher"):
        emit(LaunchPending(reason="2 pods cannot be scheduled: insufficient memory"))
        if trains:
            emit(Progress(step=1, steps=3, loss=2.0, grad_norm=1, tokens_per_second=1, seconds_left=1))
    message = "" if trains else "waits: 2 pods cannot be scheduled: insufficient memory"
    assert ("train", "RUNNING", message, None) in shown(status(kubeflow, store, run))


# ---------------------------------------------------------------- pods that do not start


@pytest.fixture
def cluster() -> Iterator[ApiServer]:
    with ApiServer() as api:
        api.allowed = {**ALLOWED, "workflows": {"get", "create"}, "pods": {"list", "create"}}
        yield api


def reached(cluster: ApiServer) -> Any:
    def configure() -> Configuration:
        configuration = Configuration(host=cluster.url)
        configuration.api_key["authorization"] = "Bearer token-1"
        return configuration

    return lambda: Api(configure, NAMESPACE, patience=2.0)


def stuck(kubeflow: KubeflowServer, name: str = "image-not-pulled-then-cancelled") -> str:
    """The run as it was before a user stopped it: the pod of its first step does not start."""
    run = kubeflow.recorded(name)
    run_record = kubeflow.runs[run]
    run_record["state_history"] = run_record["state_history"][:2]
    run_record |= {"state": "RUNNING", "finished_at": "1970-01-01T00:00:00Z"}
    rows = run_record["run_details"]["task_details"]
    rows[:] = [row for row in rows if row.get("state") and row["start_time"] < "2026-11-25T14:24:00Z"]
    for row in rows:
        if row["end_time"] >= "2026-11-25T14:24:00Z":
            row["end_time"] = "0001-01-01T00:00:00Z"
            row["state"] = "PENDING" if row["display_name"] == "executor(0)" else "RUNNING"
    return run


def test_a_pod_that_has_not_begun_after_two_minutes_is_reported_with_how_to_look(
    kubeflow: KubeflowServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stuck(kubeflow)
    name, state, error, _ = shown(status(kubeflow, store, run))[0]
    assert (name, state) == ("preprocess", "PENDING")
    assert "has not begun" in error
    assert f"kubectl -n kubeflow describe pods -l pipeline/runid={run}" in error
    monkeypatch.setattr(records, "SLOW_POD", 1e12)
    assert shown(status(kubeflow, store, run)) == [("preprocess", "PENDING", "", None)]


def test_an_unreachable_cluster_is_logged_once_for_many_status_reads(
    kubeflow: KubeflowServer, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    run = stuck(kubeflow)
    records._warned.clear()
    for _ in range(3):
        status(kubeflow, store, run)
    assert caplog.text.count("Kubernetes cannot be queried") == 1


@pytest.mark.parametrize("where", ["workflow", "pod"])
def test_the_status_explains_a_pending_pod_if_kubernetes_is_reachable(
    kubeflow: KubeflowServer, store: Store, cluster: ApiServer, where: str
) -> None:
    run = stuck(kubeflow)
    workflow, reason = "noimage-dr6zw", 'Back-off pulling image "registry.example/none:1"'
    node = {"type": "Pod", "phase": "Pending", "message": f"ImagePullBackOff: {reason}" if where == "workflow" else ""}
    metadata = {"name": workflow, "namespace": NAMESPACE}
    nodes = {f"{workflow}-4233412716": node}
    cluster.objects.create("workflows", {"metadata": metadata, "status": {"nodes": nodes}})
    waiting = {"reason": "ImagePullBackOff", "message": reason}
    statuses = [{"name": "main", "state": {"waiting": waiting}}] if where == "pod" else []
    cluster.objects.create("pods", {
        "metadata": {"name": f"{workflow}-retry-system-container-impl-4233412716", "namespace": NAMESPACE,
                     "labels": {"workflows.argoproj.io/workflow": workflow}},
        "status": {"phase": "Pending", "containerStatuses": statuses},
    })  # fmt: skip
    name, state, error, _ = shown(status(kubeflow, store, run, reached(cluster)))[0]
    assert (name, state, reason in error) == ("preprocess", "PENDING", True)


def test_a_workflow_that_fails_before_its_first_step_reports_the_cause_or_where_to_look(
    kubeflow: KubeflowServer, store: Store, cluster: ApiServer
) -> None:
    run = kubeflow.recorded("failed-before-any-step")
    run_status = status(kubeflow, store, run)
    assert run_status.state == "FAILED"
    assert [row[:2] for row in shown(run_status)] == [
        (name, "NOT_BEGUN") for name in ("preprocess", "train", "evaluate", "register")
    ]
    for text in ("before its first step", "serviceaccount pipeline-runner", "describe workflow mu-69rlt"):
        assert text in run_status.message
    why = 'error looking up service account train/pipeline-runner: serviceaccount "pipeline-runner" not found'
    nodes = {"mu-69rlt-1": {"type": "Pod", "phase": "Error", "message": why}}
    metadata = {"name": "mu-69rlt", "namespace": NAMESPACE}
    cluster.objects.create("workflows", {"metadata": metadata, "status": {"nodes": nodes}})
    assert status(kubeflow, store, run, reached(cluster)).message == why
