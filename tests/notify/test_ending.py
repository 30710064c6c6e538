"""The end of an execution: from the records of its steps, then from the engine's status in each engine's terms."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.components.notify.__main__ import body
from holdfast.components.notify.ending import ExitStatus, exit_status_of, headline_of
from holdfast.steps.jobs import outcome_of, recorder
from holdfast.steps.outcomes import Outcome
from holdfast.store import Store, layout, open_store

TEXT = "{name: story, data: {sources: [{uri: x}]}}"
JOB, RUN_ID = "job-1", "fedcba9876543210"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name in ("HOLDFAST_STORE", "HOLDFAST_WEBHOOK", "HOLDFAST_RUN_ID", "HOLDFAST_OUTCOMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    return open_store((tmp_path / "store").as_uri())


def step(name: str, result: str = "", code: int | None = 0, reason: str = "") -> Outcome:
    return Outcome(name, 1, 1.0, 2.0, code, reason, result)


def part(name: str, code: int, number: str = "1", result: str = "") -> Outcome:
    return Outcome(name, 1, 1.0, 2.0, code, "why", result, part=number)


TRAINED = (step("preprocess", "d"), step("train", RUN_ID))


@pytest.mark.parametrize(
    ("word", "ending"),
    [
        ("COMPLETE", "succeeded"), ("CACHED", "succeeded"), ("CANCELED", "cancelled"),  # KFP's final status
        ("FAILED", "failed"), ("RUNNING", "failed"), ("NEW", "failed"), ("UNKNOWN", "failed"),
        ("SUCCEEDED", "succeeded"), ("CANCELLED", "cancelled"),  # kfp.local, Ray, our own
        ("Succeeded", "succeeded"), ("Failed", "failed"), ("Error", "failed"),  # Argo
        ("COMPLETED", "succeeded"), ("TIMEOUT", "failed"), ("NODE_FAIL", "failed"),  # Slurm
        ("CANCELLED by 0", "cancelled"), ("STOPPED", "cancelled"),  # Slurm, Ray
    ],
)  # fmt: skip
def test_the_word_of_each_engine_is_known(word: str, ending: str) -> None:
    assert exit_status_of(word) == ending
    assert exit_status_of(word, [*TRAINED, step("evaluate", "not_blessed")], stopped=True) == "cancelled"


@pytest.mark.parametrize(
    ("outcomes", "ending"),
    [
        ([*TRAINED, step("evaluate", "blessed"), step("register", "3")], "succeeded"),
        ([*TRAINED, step("evaluate", "not_blessed")], "succeeded"),
        ([step("trigger", "not_due: nothing changed")], "succeeded"),
        ([step("trigger", "due: new data"), *TRAINED], "failed"),
        ([*TRAINED, step("evaluate", "blessed")], "failed"),
        ([*TRAINED, step("evaluate", "not_blessed", None)], "failed"),
        ([*TRAINED, step("evaluate", "blessed"), step("register", code=16)], "failed"),
    ],
)
@pytest.mark.parametrize("word", ["UNKNOWN", "RUNNING", "FAILED"])
def test_the_records_of_the_steps_decide_before_the_word(word: str, outcomes: list[Outcome], ending: str) -> None:
    assert exit_status_of(word, outcomes) == ending


KILLED = Outcome("train", 1, 1.0)  # it reported its start and nothing more


@pytest.mark.parametrize(
    ("word", "outcomes", "ending"),
    [
        ("COMPLETE", [step("preprocess", code=11)], "failed"),
        ("FAILED", [step("preprocess", "d"), step("train", code=204)], "cancelled"),
        ("FAILED", [step("preprocess", code=143)], "cancelled"),
        ("UNKNOWN", [step("preprocess", code=17)], "cancelled"),
        ("FAILED", [step("preprocess", "d"), KILLED], "failed"),
        ("CANCELED", [step("preprocess", "d"), KILLED], "cancelled"),
        ("COMPLETE", [step("preprocess", "d"), KILLED], "succeeded"),
        # Parts of one step: a failed part ends the rest. Trials of a sweep: no trial ends the DAG.
        ("FAILED", [part("tokenise", 143), part("tokenise", 11, "2")], "failed"),
        ("FAILED", [part("evaluate", 0, result="not_blessed")], "failed"),
        ("COMPLETE", [part("train", 12), step("compare", "blessed"), step("register", "3")], "succeeded"),
        ("RUNNING", [part("train", 12), step("compare", "not_blessed")], "succeeded"),
    ],
)
def test_a_step_that_failed_or_was_interrupted_decides(word: str, outcomes: list[Outcome], ending: str) -> None:
    assert exit_status_of(word, [replace(outcome) for outcome in outcomes]) == ending


def test_a_workflow_that_was_stopped_is_cancelled() -> None:
    assert exit_status_of("Failed", message="workflow shutdown with strategy: Stop") == "cancelled"


@pytest.mark.parametrize(
    ("ending", "more", "headline"),
    [
        ("succeeded", {"registered": True, "verdict": "blessed"}, "registered"),
        ("succeeded", {"verdict": "not_blessed"}, "not blessed"),
        ("succeeded", {"outcomes": [step("trigger", "not_due: nothing changed")]}, "nothing to do"),
        ("succeeded", {"outcomes": [*TRAINED, step("evaluate", "not_blessed")], "registered": True}, "not blessed"),
        ("succeeded", {"outcomes": [*TRAINED, step("register", "skipped: why")]}, "succeeded"),
        ("cancelled", {"verdict": "blessed"}, "cancelled"),
        ("failed", {"registered": True}, "failed"),
    ],
)
def test_the_headline_states_the_outcome(ending: ExitStatus, more: dict[str, Any], headline: str) -> None:
    assert headline_of(ending, **more) == headline


def test_a_training_preempted_in_every_try_has_failed_and_one_preempted_once_is_cancelled(
    store: Store,
) -> None:
    """Engines report FAILED for both, and no person cancels a run four times."""
    statuses = []
    for _ in range(4):
        record = recorder(JOB)  # a process
        assert record
        record(store.url, Outcome("train", 1, 1.0))
        record(store.url, step("train", code=204, reason="stop requested (SIGTERM)"))
        statuses.append(body(TEXT, [], store.url, JOB, "", "", "FAILED").result["status"])
    assert statuses == ["cancelled", "cancelled", "cancelled", "failed"]
    next_recorder = recorder(JOB)
    assert next_recorder
    next_recorder(store.url, step("train", RUN_ID))
    after = outcome_of(store, JOB, "train")
    once = recorder(JOB)
    assert once
    once(store.url, step("train", code=204))
    then = outcome_of(store, JOB, "train")
    assert after and then and (after.interrupted, then.interrupted) == (4, 0)  # a success ends the series


@pytest.mark.parametrize(("last", "ended"), [("blessed", "registered"), ("not_blessed", "not blessed")])
def test_a_succeeded_kubeflow_run_is_summarized_as_succeeded(store: Store, last: str, ended: str) -> None:
    record = recorder(JOB)
    assert record
    steps = [*TRAINED, step("evaluate", last), *([step("register", "3")] if ended == "registered" else [])]
    for outcome in steps:
        record(store.url, outcome)
    notification = body(TEXT, [], store.url, JOB, "", "", "COMPLETE")
    assert notification.result["status"] == "succeeded"
    assert str(notification.result["text"]).splitlines()[0].endswith(f": {ended}**")
    assert (notification.result["reason"], notification.result["failed_step"], notification.result["exit_code"]) == (
        "",
        "",
        0,
    )
    assert json.loads(store.get(layout.run(RUN_ID, "summary.json")))["status"] == "succeeded"


def test_a_firing_that_finds_nothing_due_on_a_kubeflow_server_is_no_failure(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_WEBHOOK", "http://127.0.0.1:1/never")
    posts: list[object] = []
    monkeypatch.setattr("holdfast.components.notify.summary.post", lambda *args: posts.append(args))
    record = recorder(JOB)
    assert record
    record(store.url, step("trigger", "not_due: the data and the spec are those of the champion"))
    notification = body(TEXT, [], store.url, JOB, "", "", "COMPLETE")
    assert notification.result["status"] == "succeeded"
    assert str(notification.result["text"]).splitlines()[::2] == [
        "**story: nothing to do**", "- reason: the data and the spec are those of the champion"
    ]  # fmt: skip
    assert not posts
