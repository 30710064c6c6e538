"""The task list of a real KFP server: which rows are valid, and which nodes are the pods of a step."""

import json

import pytest

from holdfast.pipelines.backends.kubeflow.connection import Server
from holdfast.pipelines.backends.kubeflow.pod_logs import error_in
from holdfast.pipelines.backends.kubeflow.records import Tasks
from holdfast.pipelines.backends.kubeflow.submit import submit
from holdfast.pipelines.backends.kubeflow.watch import find_run, state_of
from holdfast.pipelines.backends.request import RunRequest
from tests.kubeflow_server import KubeflowServer
from tests.kubeflow_workflow import NEVER, Node
from tests.pipelines.backends.kubeflow.conftest import spec
from tests.recordings import missing_log


def tasks_of(kubeflow: KubeflowServer, server: Server, name: str) -> Tasks:
    return Tasks(find_run(server, kubeflow.recorded(name)))


@pytest.mark.parametrize(
    ("name", "step", "pods"),
    [
        ("succeeded", "train", ("long3-65p4g-3835630432", "long3-65p4g-2426163341")),
        ("retried", "train", ("long2-sdwm5-4156017399",)),
        ("cancelled", "train", ("big-b8fhw-2898509530",)),
        ("cancelled", "evaluate", ()),
        ("image-not-pulled-then-cancelled", "preprocess", ("noimage-dr6zw-4233412716",)),
        ("sweep-running", "train-2", ("sw-sweep-skpzr-1285253159",)),
        ("failed-before-any-step", "train", ()),
    ],
)
def test_the_pods_of_a_step_are_found_by_the_hashes_of_the_names_of_their_nodes(
    kubeflow: KubeflowServer, server: Server, name: str, step: str, pods: tuple[str, ...]
) -> None:
    assert tasks_of(kubeflow, server, name).pods(step) == pods


@pytest.mark.parametrize(
    ("name", "task", "state"),
    [
        ("cancelled", "notify", "SUCCEEDED"),
        ("cancelled", "evaluate", ""),
        ("retried", "train", "SUCCEEDED"),
        ("image-not-pulled-then-cancelled", "exit-handler-1", "FAILED"),
        ("sweep-running", "preprocess", "SUCCEEDED"),
        ("sweep-running", "evaluate-2", "RUNNING"),
        ("succeeded-not-blessed", "condition-3", "SKIPPED"),
    ],
)
def test_the_row_with_the_outcome_of_a_node_counts(
    kubeflow: KubeflowServer, server: Server, name: str, task: str, state: str
) -> None:
    row = tasks_of(kubeflow, server, name).row(task)
    assert row is not None and row.state == state


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("succeeded", "SUCCEEDED"), ("retried", "SUCCEEDED"), ("failed-bad-parameter", "FAILED"),
        ("cancelled", "CANCELED"), ("image-not-pulled-then-cancelled", "CANCELED"), ("sweep-running", "RUNNING"),
    ],
)  # fmt: skip
def test_a_run_that_failed_because_it_was_cancelled_is_cancelled(
    kubeflow: KubeflowServer, server: Server, name: str, state: str
) -> None:
    assert state_of(find_run(server, kubeflow.recorded(name))) == state


def test_the_emulated_server_answers_as_a_real_one_does(kubeflow: KubeflowServer, server: Server) -> None:
    kfp_run_id = submit(server, RunRequest(spec(), run_id="3f2a4b5c6d7e8f90")).kfp_run_id
    kubeflow.progress(kfp_run_id, "RUNNING", {"preprocess": "SUCCEEDED", "train": Node("RUNNING", "PENDING", tries=2)})
    kubeflow.progress(
        kfp_run_id, "FAILED", {"preprocess": "SUCCEEDED", "train": Node("FAILED", tries=2), "notify": "SUCCEEDED"}
    )
    real = kubeflow.runs[kubeflow.recorded("cancelled")]["run_details"]["task_details"]
    rows = kubeflow.runs[kfp_run_id]["run_details"]["task_details"]
    assert {key for row in rows for key in row} <= {key for row in real for key in row}
    assert [row["end_time"] for row in rows if (row["display_name"], row.get("state")) == ("train", "RUNNING")] == [
        NEVER
    ]
    assert [row.get("state") for row in rows if row["display_name"] == "evaluate"] == [None]
    workflow, tasks = kubeflow.workflow(kfp_run_id), Tasks(find_run(server, kfp_run_id))
    assert tasks.pods("train") == (workflow.executor("train"), workflow.executor("train", 1))
    assert tasks.pods("notify") == (workflow.executor("notify"),)


def test_a_missing_log_reply_is_not_a_log() -> None:
    assert error_in(json.dumps(missing_log()).encode())
    assert not error_in(b'{"error_message": "of a step", "time": 1}')
    assert not error_in(b'{"error_message"')
