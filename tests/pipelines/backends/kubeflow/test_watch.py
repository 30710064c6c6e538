"""State, logs and cancellation of a run."""

import json

import pytest

from holdfast.pipelines.backends.kubeflow.connection import Access, Server
from holdfast.pipelines.backends.kubeflow.submit import submit
from holdfast.pipelines.backends.kubeflow.watch import cancel, find_run, logs, state_of, steps_of
from holdfast.pipelines.backends.request import RunRequest
from holdfast.runtime.logs import plain
from holdfast.spec.errors import MissingError
from tests.kubeflow_server import KubeflowServer
from tests.pipelines.backends.kubeflow.conftest import spec

RUN_ID = "3f2a4b5c6d7e8f90"


@pytest.fixture
def run(kubeflow: KubeflowServer, server: Server) -> str:
    """KFP's id of a run in its second step."""
    kfp_run_id = submit(server, RunRequest(spec(), run_id=RUN_ID)).kfp_run_id
    kubeflow.progress(kfp_run_id, "RUNNING", {"preprocess": "SUCCEEDED", "train": "RUNNING"})
    kubeflow.logs = {(kfp_run_id, "preprocess"): b"all of it\n", (kfp_run_id, "train"): b"first\nsec"}
    return kfp_run_id


@pytest.mark.parametrize("wanted", [RUN_ID, "3f2a", "small"])
def test_a_run_is_found_by_holdfasts_id_its_beginning_and_its_name(run: str, server: Server, wanted: str) -> None:
    assert find_run(server, wanted).run_id == run
    assert find_run(server, run).run_id == run
    assert find_run(server, run[:8]).run_id == run


def test_the_beginning_of_several_of_kfps_ids_is_refused_with_all_of_them(
    kubeflow: KubeflowServer, run: str, server: Server
) -> None:
    twin = run[:9] + "f" * 27
    kubeflow.runs[twin] = {**kubeflow.runs[run], "run_id": twin}
    with pytest.raises(MissingError) as error:
        find_run(server, run[:9])
    assert run in str(error.value) and twin in str(error.value)


@pytest.mark.parametrize("wanted", ["ffff", "2a4b", "00000000-0000-4000-8000-000000000000"])
def test_an_unknown_run_is_not_found(run: str, server: Server, wanted: str) -> None:
    with pytest.raises(MissingError, match=wanted):
        find_run(server, wanted)


def test_the_newest_of_several_is_meant(kubeflow: KubeflowServer, run: str, server: Server) -> None:
    kubeflow.runs[run] |= {"state": "FAILED", "created_at": "2020-01-01T00:00:00Z"}
    newer = submit(server, RunRequest(spec(), run_id=RUN_ID)).kfp_run_id
    assert find_run(server, "3f2a").run_id == newer != run


def test_a_name_means_no_run_of_a_longer_name_and_the_beginning_of_several_ids_none_of_them(
    kubeflow: KubeflowServer, run: str, server: Server
) -> None:
    kubeflow.runs[run] |= {"created_at": "2020-01-01T00:00:00Z"}
    submit(server, RunRequest(spec("name=smaller"), run_id="3f2b4b5c6d7e8f90"))
    assert find_run(server, "small").run_id == run
    for wanted, why in (("3f2", "several runs"), ("", "no run")):
        with pytest.raises(MissingError, match=why):
            cancel(server, wanted)


def test_a_password_in_the_endpoint_is_in_no_link_and_no_error(kubeflow: KubeflowServer, run: str) -> None:
    server = Server(Access(endpoint=kubeflow.endpoint.replace("://", "://me:hunter2@")))
    assert "hunter2" not in server.link("runs", run)
    for wanted in ("nothing", "00000000-0000-4000-8000-000000000000"):
        with pytest.raises(MissingError) as error:
            find_run(server, wanted)
        assert "hunter2" not in str(error.value)


def test_the_steps_are_those_of_the_dag_and_not_kfps_own_nodes(
    kubeflow: KubeflowServer, run: str, server: Server
) -> None:
    steps = steps_of(find_run(server, run))
    workflow = kubeflow.workflow(run)
    assert [(step.name, step.state, step.pods) for step in steps] == [
        (name, state, (workflow.executor(name),)) for name, state in (("preprocess", "SUCCEEDED"), ("train", "RUNNING"))
    ]
    assert steps[0].seconds == 7


def test_a_run_that_has_just_been_made_has_no_steps(server: Server) -> None:
    kfp_run_id = submit(server, RunRequest(spec("name=fresh"))).kfp_run_id
    run = find_run(server, kfp_run_id)
    assert (state_of(run), steps_of(run)) == ("PENDING", [])
    with pytest.raises(MissingError, match="has not begun"):
        list(logs(server, kfp_run_id))


def test_logs_are_those_of_all_steps_or_of_one(kubeflow: KubeflowServer, run: str, server: Server) -> None:
    kubeflow.progress(run, "RUNNING", {"preprocess": "SUCCEEDED", "train": "SUCCEEDED"})
    assert list(logs(server, run)) == [("preprocess", "all of it"), ("train", "first"), ("train", "sec")]
    assert list(logs(server, run, "train")) == [("train", "first"), ("train", "sec")]


def test_following_gives_every_line_once_and_whole_and_ends_with_the_run(
    kubeflow: KubeflowServer, run: str, server: Server
) -> None:
    states = iter(
        [
            ("RUNNING", b"first\nsecond\nthi"),
            ("SUCCEEDED", b"first\nsecond\nthird\nlast without an end"),
        ]
    )

    def pause(_seconds: float) -> None:
        state, kubeflow.logs[run, "train"] = next(states)
        kubeflow.progress(run, state, {"preprocess": "SUCCEEDED", "train": state})

    followed = [line for _, line in logs(server, run, "train", follow=True, pause=pause)]
    assert followed == ["first", "second", "third", "last without an end"]


def test_the_log_of_a_deleted_pod_is_reported_missing(kubeflow: KubeflowServer, run: str, server: Server) -> None:
    kubeflow.logs.clear()
    with pytest.raises(MissingError, match="its pod is gone"):
        list(logs(server, run))


def test_lines_of_json_become_lines_for_people() -> None:
    entry = {"time": 0.0, "level": "INFO", "logger": "holdfast.train", "message": "step 1", "traceback": "Traceback: x"}
    assert plain(json.dumps(entry)) == "1970-01-01T00:00:00Z INFO    holdfast.train: step 1\nTraceback: x"
    for line in ("plain text", "{not json", '{"other": 1}', '{"time": "x"}'):
        assert plain(line) == line


def test_cancelling_ends_a_run_once(kubeflow: KubeflowServer, run: str, server: Server) -> None:
    assert cancel(server, "3f2a")[1] is True
    assert kubeflow.terminated == [run]
    kubeflow.progress(run, "FAILED", {"preprocess": "SUCCEEDED", "train": "FAILED"})
    run_record, was_running = cancel(server, "3f2a")
    assert (state_of(run_record), was_running) == ("CANCELED", False)
    assert kubeflow.terminated == [run]
