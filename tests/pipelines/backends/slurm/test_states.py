"""Slurm's states as those of the common protocol, and as sentences."""

from dataclasses import replace

import pytest

from holdfast.pipelines.backends.interface import ended_with
from holdfast.pipelines.backends.slurm import client
from holdfast.pipelines.backends.slurm.client import BatchJob
from holdfast.pipelines.backends.slurm.states import ended_as, message_of, state_of, step_of, trials_of, whole_state
from holdfast.steps.outcomes import Outcome


def job(state: str, reason: str = "", code: int = 0, restarts: int = 0) -> BatchJob:
    return BatchJob(7, "holdfast-x-train", state, reason, code, restarts=restarts)


@pytest.mark.parametrize(
    ("found", "state", "message"),
    [
        (job("PENDING", "Dependency"), "PENDING", "waits for the step before it"),
        (job("PENDING", "BeginTime", restarts=2), "PENDING", "comes back in a moment; requeued 2 times"),
        (job("PENDING", "QOSMaxJobsPerUserLimit"), "PENDING", "waits: QOSMaxJobsPerUserLimit"),
        (job("RUNNING"), "RUNNING", ""),
        (job("COMPLETED", restarts=1), "SUCCEEDED", "requeued 1 time"),
        (job("TIMEOUT", "TimeLimit"), "FAILED", "reached its time limit"),
        (job("NODE_FAIL", "NodeDown"), "FAILED", "its node went down"),
        (job("CANCELLED", "DependencyNeverSatisfied"), "CANCELED", "not begun: a step before it did not succeed"),
        (job("FAILED", "NonZeroExitCode", 204), "CANCELED", "exit code 204 (preempted)"),
        (replace(job("FAILED", "RaisedSignal:15(Terminated)"), signal=15), "CANCELED", "signal 15"),
        (replace(job("FAILED", "RaisedSignal:9(Killed)"), signal=9), "FAILED", "signal 9"),
    ],
    ids=str,
)  # fmt: skip
def test_the_state_of_a_job_has_a_readable_text(found: BatchJob, state: str, message: str) -> None:
    assert state_of(found) == state
    assert message_of(found) == message


def test_the_message_of_a_step_follows_its_exit_code() -> None:
    outcome = Outcome("train", 1, 0.0, 1.0, 11, reason="the corpus is empty\nmore")
    assert message_of(job("FAILED", "NonZeroExitCode", 11), outcome).endswith(": the corpus is empty")


def test_the_exit_code_of_a_run_is_that_of_the_first_step_that_did_not_succeed() -> None:
    died = Outcome("evaluate", 1, 0.0, 1.0, 203, "away")
    steps = [
        step_of("train", job("COMPLETED"), None), step_of("evaluate", job("TIMEOUT"), died),
        step_of("register", job("CANCELLED", "DependencyNeverSatisfied"), None),
    ]  # fmt: skip
    assert [step.exit_code for step in steps] == [0, 203, None]
    assert ended_with(whole_state(steps), steps) == 203
    running_step = step_of("train", job("RUNNING"), Outcome("train", 1, 0.0))
    assert (running_step.exit_code, ended_with(whole_state([running_step]), [running_step])) == (None, None)
    assert step_of("train", job("FAILED", "NonZeroExitCode", 11), None).exit_code == 11
    assert step_of("train", BatchJob(7, "n", "OUT_OF_MEMORY", signal=9), None).exit_code == 137


def test_a_step_whose_condition_did_not_hold_is_skipped_and_the_run_has_succeeded() -> None:
    outcome = Outcome("register", 1, 0.0, 1.0, 0, result="skipped: evaluate says not_blessed")
    skipped = step_of("register", job("COMPLETED"), outcome)
    assert (skipped.state, skipped.error) == ("SKIPPED", "evaluate says not_blessed")
    assert whole_state([step_of("train", job("COMPLETED"), None), skipped]) == "SUCCEEDED"


def test_the_exit_handler_gets_the_first_step_that_did_not_succeed() -> None:
    jobs = {"train": job("NODE_FAIL"), "evaluate": job("CANCELLED", "DependencyNeverSatisfied")}
    assert ended_as(list(jobs), jobs, {}) == ("failed", "train: its node went down")
    assert ended_as(["train"], {"train": job("FAILED", "", 204)}, {})[0] == "cancelled"


def test_the_exit_handler_reads_the_outcomes_of_jobs_that_slurm_has_purged() -> None:
    outcomes = {
        "preprocess": Outcome("preprocess", 1, 0.0, 2.0, 0),
        "train": Outcome("train", 1, 3.0, 4.0, 11, "no text"),
    }
    assert ended_as(["preprocess", "train", "evaluate"], {}, outcomes) == ("failed", "train: no text")
    outcomes["train"] = Outcome("train", 1, 3.0)
    assert ended_as(["preprocess", "train"], {}, outcomes)[0] == "failed"
    assert ended_as(["preprocess"], {}, outcomes) == ("succeeded", "")
    expected = ("cancelled", "register: is not known to have begun, and Slurm has forgotten it")
    assert ended_as(["preprocess", "register"], {}, outcomes) == expected
    parts = {f"train-{part}": Outcome("train", 1, 0.0, 1.0, 0, part=part) for part in "01"}
    assert ended_as(["train"], {}, parts) == ("succeeded", "")
    parts["train-1"] = Outcome("train", 1, 0.0, 1.0, 11, "no text", part="1")
    assert ended_as(["train"], {}, parts) == ("failed", "train: no text")


def test_an_array_is_one_job_that_fails_when_a_task_does() -> None:
    line = "7|{}|holdfast-x-tokenise|{}|None|{}|0|0:01|tiny x-6|"
    tasks = [line.format(2, "COMPLETED", 0), line.format(1, "FAILED", 11 << 8), line.format(3, "COMPLETED", 0)]
    (whole,) = client._one_each(map(client._from_squeue, tasks)).values()
    assert (whole.id, whole.called, whole.state, whole.exit_code) == (7, "7", "FAILED", 11)
    assert [(task.called, task.state) for task in whole.tasks] == [
        ("7_1", "FAILED"), ("7_2", "COMPLETED"), ("7_3", "COMPLETED"),
    ]  # fmt: skip
    running = [*tasks, line.format(4, "RUNNING", 0)]
    assert client._one_each(map(client._from_squeue, running))[7].state == "RUNNING"


def test_a_trial_whose_task_slurm_has_purged_has_the_state_of_its_outcome() -> None:
    array = BatchJob(7, "n", "RUNNING", tasks=(BatchJob(7, "n", "RUNNING", task=10),))
    outcomes = {"train-2": Outcome("train", 1, 1.0, 3.0, 11, "no text", part="2")}
    steps = list(trials_of("train", array, outcomes))
    assert [(step.name, step.state, step.error) for step in steps] == [
        ("train-2", "FAILED", "no text"), ("train-10", "RUNNING", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), [("0:13", 13), ("1:02:03", 3723), ("2-00:00:01", 172801), ("INVALID", 0)])
def test_the_time_that_a_job_has_run_is_read(text: str, seconds: float) -> None:
    assert client._seconds(text) == seconds
