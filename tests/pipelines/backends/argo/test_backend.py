"""Argo behind the common protocol, on an API server over HTTP: submitted once, followed, stopped, and resumed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import Configuration

from holdfast.launch.kubernetes.client import Api
from holdfast.pipelines.backends.argo import check
from holdfast.pipelines.backends.argo.backend import NODE, NOT_AGAIN, WORKFLOW_LABEL, Argo
from holdfast.pipelines.backends.argo.template import labels
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec import parse_spec
from holdfast.spec.errors import ClusterUnreachableError, MissingError
from holdfast.steps.outcomes import Outcome
from holdfast.store import layout, open_store
from tests.cluster.api import ALLOWED, NAMESPACE, ApiServer, StatusError

SPEC = "{name: small, store: 'file:///nowhere/holdfast', data: {sources: [{uri: 'python:stdlib'}]}}"
RUN_ID = "3f2a4b5c6d7e8f90"
ORDER = RunRequest(parse_spec(SPEC), run_id=RUN_ID)
PERSON = {  # permissions of a user who submits
    **ALLOWED,
    "workflows": {"create", "get", "list", "update"},
    "workflowtemplates": {"create", "get", "update"},
}


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """An empty API server."""
    with ApiServer() as api:
        api.allowed = PERSON
        yield api


@pytest.fixture
def argo(server: ApiServer) -> Argo:
    """A connection to it."""

    def configure() -> Configuration:
        configuration = Configuration(host=server.url)
        configuration.api_key["authorization"] = "Bearer token-1"
        return configuration

    return Argo(api=Api(configure, NAMESPACE, patience=10.0))


def workflows(server: ApiServer) -> list[dict[str, Any]]:
    return server.objects.all("workflows")


def ended(server: ApiServer, name: str, phase: str, **status: Any) -> None:
    server.objects.change("workflows", name, lambda one: one.update(status={"phase": phase, **status}))


def test_submitted_objects_match_the_dry_run_and_have_no_dangling_references(server: ApiServer, argo: Argo) -> None:
    shown = argo.objects(ORDER)
    assert workflows(server) == []
    argo.submit(ORDER)
    sent = [server.objects.all(plural)[0] for plural in ("workflowtemplates", "workflows")]
    for manifest, other in zip(shown, sent, strict=True):
        assert manifest["spec"] == other["spec"]
        assert manifest["metadata"].items() <= other["metadata"].items()
    assert check(shown) == []
    arguments = {parameter["name"]: parameter["value"] for parameter in sent[1]["spec"]["arguments"]["parameters"]}
    assert arguments["replan"] == "false"
    assert parse_spec(arguments["spec"]) == ORDER.spec


def test_the_same_order_is_one_workflow_until_it_fails(server: ApiServer, argo: Argo) -> None:
    first, created = argo.submit(ORDER)
    assert (created, first.state) == (True, "PENDING")
    assert argo.submit(ORDER) == (first, False)
    ended(server, first.id, "Succeeded")
    assert argo.submit(ORDER)[1] is False
    ended(server, first.id, "Failed")
    second, created = argo.resume(ORDER)
    assert created
    assert second.id != first.id
    assert argo.submit(replace(ORDER, salt="other"))[0].id not in (first.id, second.id)


def test_an_answer_that_is_lost_makes_no_second_workflow(server: ApiServer, argo: Argo) -> None:
    lost: list[bool] = []

    def lose(verb: str, plural: str) -> StatusError | None:
        if (verb, plural) == ("create", "workflows") and not lost:
            lost.append(True)
            server.objects.create("workflows", argo.objects(ORDER)[1])  # the request arrived
            return StatusError(503, "the connection broke")
        return None

    server.faults.append(lose)
    argo.submit(ORDER)
    assert len(workflows(server)) == 1


def test_a_template_that_changed_is_applied_again(server: ApiServer, argo: Argo) -> None:
    argo.submit(ORDER)
    argo.submit(replace(ORDER, image="elsewhere/holdfast:2"))
    (template,) = server.objects.all("workflowtemplates")
    assert "elsewhere/holdfast:2" in str(template)
    assert len(workflows(server)) == 2


NODES = {
    "wf-1": {"id": "wf-1", "type": "Retry", "templateName": "preprocess", "phase": "Succeeded",
             "startedAt": "2026-11-20T10:00:00Z", "finishedAt": "2026-11-20T10:00:07Z"},
    "wf-2": {"id": "wf-2", "type": "Pod", "templateName": "preprocess", "phase": "Succeeded",
             "startedAt": "2026-11-20T10:00:00Z"},
    "wf-3": {"id": "wf-3", "type": "Retry", "templateName": "train", "phase": "Failed", "message": "code 12",
             "startedAt": "2026-11-20T10:01:00Z", "finishedAt": "2026-11-20T10:02:00Z"},
    "wf-5": {"id": "wf-5", "type": "Pod", "templateName": "train", "phase": "Failed",
             "startedAt": "2026-11-20T10:01:30Z", "outputs": {"exitCode": "12"}},
    "wf-4": {"id": "wf-4", "type": "Pod", "templateName": "train", "phase": "Failed",
             "startedAt": "2026-11-20T10:01:00Z", "outputs": {"exitCode": "203"}},
    "wf-6": {"id": "wf-6", "type": "DAG", "templateName": "train-and-register", "phase": "Failed"},
}  # fmt: skip


@pytest.fixture
def failed(server: ApiServer, argo: Argo) -> str:
    """A Workflow whose training failed twice; the pod of its first step is gone."""
    name = argo.submit(ORDER)[0].id
    ended(server, name, "Failed", nodes=NODES, message="train failed")
    for node in ("wf-4", "wf-5"):
        metadata = {"name": f"pod-{node}", "labels": {WORKFLOW_LABEL: name}, "annotations": {NODE: node}}
        server.objects.create("pods", {"metadata": metadata, "spec": {}})

    class Printed:
        def __init__(self, line: str) -> None:
            self.lines = [f"2026-11-20T10:01:00.0Z {line}"]

        def snapshot(self) -> tuple[list[str], bool]:
            return self.lines, True

    server.logs = lambda pod: Printed(f'{{"time": 0, "level": "INFO", "logger": "holdfast", "message": "{pod}"}}')
    return name


@pytest.mark.parametrize("wanted", [RUN_ID, "3f2a", "small"])
def test_a_run_is_found_by_its_id_and_its_name_and_shown_step_by_step(failed: str, argo: Argo, wanted: str) -> None:
    status = argo.status(wanted)
    assert (status.id, status.state, status.message) == (failed, "FAILED", "train failed")
    preprocess, train, *rest = status.steps
    assert [(step.name, step.state) for step in rest] == [("evaluate", "NOT_BEGUN"), ("register", "NOT_BEGUN")]
    assert (preprocess.name, preprocess.state, preprocess.seconds) == ("preprocess", "SUCCEEDED", 7.0)
    assert (train.exit_code, status.exit_code) == (12, 12)  # of the last try
    assert (train.state, train.error, train.pods) == ("FAILED", "code 12", ("pod-wf-4", "pod-wf-5"))


def test_failure_and_skip_reasons_of_steps_come_from_the_records_in_the_store(
    server: ApiServer, argo: Argo, tmp_path: Path
) -> None:
    """Argo knows at most an exit code. The Workflow comes from a schedule: all its parameters are its template's."""
    store = open_store(url := f"file://{tmp_path}")
    times = {"startedAt": "2026-11-20T10:00:00Z", "finishedAt": "2026-11-20T10:01:00Z"}

    def made(name: str, phase: str, ends: dict[str, str], **outcomes: Outcome) -> None:
        nodes = {step: {"id": step, "type": "Pod", "templateName": step, "phase": word, **times}
                 for step, word in ends.items()}  # fmt: skip
        written = [
            {"name": "spec", "value": SPEC},
            {"name": "store", "value": url},
            {"name": "overrides", "value": "[]"},
        ]
        template = {"arguments": {"parameters": written}}
        metadata = {"name": name, "labels": labels()}
        status = {"phase": phase, "nodes": nodes, "storedWorkflowTemplateSpec": template}
        workflow = server.objects.create("workflows", {"metadata": metadata, "spec": {}, "status": status})
        for step, outcome in outcomes.items():
            store.put(layout.job(workflow["metadata"]["uid"], step), outcome.as_json())

    ended: dict[str, Any] = {"started": 1.0, "ended": 2.0}
    failed = Outcome("train", 1, **ended, exit_code=11, reason="the loss is not finite at step 7\nand more")
    made("wf-a", "Failed", {"preprocess": "Succeeded", "train": "Failed", "evaluate": "Omitted"}, train=failed)
    run_status = argo.status("wf-a")
    assert [(step.name, step.state) for step in run_status.steps] == [
        ("preprocess", "SUCCEEDED"), ("train", "FAILED"), ("evaluate", "NOT_BEGUN"), ("register", "NOT_BEGUN"),
    ]  # fmt: skip
    assert run_status.steps[1].error.endswith(": the loss is not finite at step 7")
    assert run_status.exit_code == 11

    train = Outcome("train", 1, **ended, exit_code=0, result=RUN_ID)
    evaluate = Outcome("evaluate", 1, **ended, exit_code=0, result="not_blessed")
    ends = {"preprocess": "Succeeded", "train": "Succeeded", "evaluate": "Succeeded", "register": "Skipped"}
    store.put(layout.run(RUN_ID, "evaluations/1.json"), b'{"reasons": ["perplexity 228 is not below 200"]}')
    made("wf-b", "Succeeded", ends, train=train, evaluate=evaluate)
    register = argo.status("wf-b").steps[-1]
    assert (register.name, register.state, register.error) == ("register", "SKIPPED", "perplexity 228 is not below 200")


def test_a_step_with_an_unschedulable_pod_is_pending_with_the_reason(server: ApiServer, argo: Argo) -> None:
    """Argo reports the node of all tries as running from its creation."""
    name, why = argo.submit(ORDER)[0].id, "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu."
    times = {"startedAt": "2026-11-20T10:00:00Z", "finishedAt": None}
    nodes = {
        "wf-1": {"id": "wf-1", "type": "Retry", "templateName": "evaluate", "phase": "Running", **times},
        "wf-2": {"id": "wf-2", "type": "Pod", "templateName": "evaluate", "phase": "Pending", "message": why, **times},
    }
    ended(server, name, "Running", nodes=nodes)
    (evaluate,) = argo.status(name).steps
    assert (evaluate.state, evaluate.error, evaluate.exit_code) == ("PENDING", why, None)
    nodes["wf-2"] |= {"phase": "Running", "message": ""}
    ended(server, name, "Running", nodes=nodes)
    (evaluate,) = argo.status(name).steps
    assert (evaluate.state, evaluate.error) == ("RUNNING", "")


def test_a_step_without_further_retries_has_the_error_of_its_last_try(server: ApiServer, argo: Argo) -> None:
    name, times = argo.submit(ORDER)[0].id, {"finishedAt": "2026-11-20T10:02:00Z"}
    step = {"templateName": "train", "phase": "Failed", **times}
    nodes = {
        "wf-1": {"id": "wf-1", "type": "Retry", "message": NOT_AGAIN, "startedAt": "2026-11-20T10:00:00Z", **step},
        "wf-2": {"id": "wf-2", "type": "Pod", "message": "Error (exit code 12)", "startedAt": "2026-11-20T10:00:00Z",
                 "outputs": {"exitCode": "12"}, **step},
    }  # fmt: skip
    ended(server, name, "Failed", nodes=nodes)
    train = next(step for step in argo.status(name).steps if step.name == "train")
    assert (train.error, train.exit_code) == ("Error (exit code 12)", 12)


def test_the_logs_of_every_try_are_shown_in_their_order(failed: str, argo: Argo) -> None:
    assert list(argo.logs(failed)) == [
        ("train", f"1970-01-01T00:00:00Z INFO    holdfast: pod-wf-{number}") for number in (4, 5)
    ]
    with pytest.raises(MissingError, match="no log of preprocess"):
        list(argo.logs(failed, "preprocess"))


def test_cancelling_stops_a_workflow_once_and_leaves_an_ended_one(server: ApiServer, argo: Argo) -> None:
    name = argo.submit(ORDER)[0].id
    ended(server, name, "Running")
    server.faults.append(_once(("update", "workflows"), StatusError(409, "the object has been modified")))
    assert argo.cancel("small")[1] is True
    (workflow,) = workflows(server)
    assert workflow["spec"]["shutdown"] == "Stop"  # not Terminate: the exit handler runs
    ended(server, name, "Failed")
    run_status, running = argo.cancel(name)
    assert (run_status.state, running) == ("CANCELED", False)


def test_the_listing_has_only_what_holdfast_made_the_newest_first(server: ApiServer, argo: Argo) -> None:
    server.objects.create("workflows", {"metadata": {"name": "of-others"}, "spec": {}})
    names = [argo.submit(replace(ORDER, salt=salt))[0].id for salt in ("a", "b")]
    assert {run.id for run in argo.list()} == set(names)


def test_an_unknown_run_is_reported_with_the_command_that_lists_runs(argo: Argo) -> None:
    with pytest.raises(MissingError, match="holdfast runs --backend argo"):
        argo.status("nothing")


@pytest.mark.parametrize("length", [43, 44, 51])
def test_a_name_that_argo_cuts_is_found_whole(argo: Argo, length: int) -> None:
    name = "n" * length
    run = argo.submit(replace(ORDER, spec=parse_spec(SPEC, [f"name={name}"])))[0]
    assert argo.status(name).id == run.id
    sweep = replace(ORDER, spec=parse_spec(SPEC, [f"name={name}"]), trials=(("training.seed=1",), ("training.seed=2",)))
    run = argo.submit(sweep)[0]
    assert argo.status(f"{name}-sweep").id == run.id


def test_the_beginning_of_several_ids_cancels_none_of_them(server: ApiServer, argo: Argo) -> None:
    names = [argo.submit(replace(ORDER, run_id=run_id, salt=run_id))[0].id for run_id in ("3f2a", "3f2b")]
    for name in names:
        ended(server, name, "Running")
    for wanted, why in (("3f2", "several runs"), ("", "no Workflow")):
        with pytest.raises(MissingError, match=why):
            argo.cancel(wanted)
    assert not any("shutdown" in workflow["spec"] for workflow in workflows(server))
    assert argo.status("3f2b").id == names[1]


@pytest.mark.slow
def test_however_often_a_run_of_a_long_name_has_failed_argo_takes_the_name_of_the_next_one(
    server: ApiServer, argo: Argo
) -> None:
    request = replace(ORDER, spec=parse_spec(SPEC.replace("small", "a" + "-long" * 10)))
    for _ in range(11):
        ended(server, argo.submit(request)[0].id, "Failed")
    names = {workflow["metadata"]["name"] for workflow in workflows(server)}
    assert len(names) == 11
    assert max(map(len, names)) <= 63


def test_a_template_that_cannot_be_applied_starts_nothing_and_may_be_tried_again(server: ApiServer, argo: Argo) -> None:
    server.faults.append(
        lambda verb, plural, *_: (
            StatusError(409, "exists") if (verb, plural) == ("create", "workflowtemplates") else None
        )
    )
    with pytest.raises(ClusterUnreachableError, match="run the same command again"):
        argo.submit(ORDER)
    assert workflows(server) == []


def _once(what: tuple[str, str], error: StatusError) -> Callable[[str, str], StatusError | None]:
    raised: list[bool] = []

    def fault(verb: str, plural: str) -> StatusError | None:
        if (verb, plural) == what and not raised:
            raised.append(True)
            return error
        return None

    return fault
