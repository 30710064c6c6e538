"""States of Slurm jobs as states of the backend protocol, and as messages for people."""

import signal
from collections.abc import Iterator, Mapping, Sequence

from holdfast.pipelines.backends.interface import CANCELED, FAILED, PENDING, RUNNING, SKIPPED, SUCCEEDED, StepStatus
from holdfast.pipelines.backends.slurm.client import AT_WORK, ENDING, NEVER_SATISFIED, WAITING, BatchJob
from holdfast.spec.errors import ExitCode
from holdfast.steps.outcomes import EXIT_HANDLER, Outcome
from holdfast.telemetry.event_base import in_words

NOT_KNOWN = "is not known to have begun, and Slurm has forgotten it"
_IN_WORDS = {
    "TIMEOUT": "reached its time limit",
    "NODE_FAIL": "its node went down",
    "OUT_OF_MEMORY": "used more memory than it had requested",
    "PREEMPTED": "gave way to another job",
    "DEADLINE": "could not end before its deadline",
    "BOOT_FAIL": "its node did not boot",
    "REVOKED": "runs on another cluster",
}
_WAITS = {
    "Dependency": "waits for the step before it",
    "BeginTime": "comes back in a moment",
    "Resources": "waits for free nodes",
    "Priority": "waits behind jobs of higher priority",
    "JobHeldUser": "is held; scontrol release lets it go",
    "JobHeldAdmin": "is held by an administrator",
    "ReqNodeNotAvail": "waits for nodes that are down, drained or reserved",
    "PartitionConfig": "asks for more than its partition has",
    "PartitionTimeLimit": "asks for more time than its partition gives",
}


def state_of(job: BatchJob) -> str:
    """The protocol's state of a job."""
    if job.state in WAITING:
        return PENDING
    if job.state in (*AT_WORK, *ENDING):
        return RUNNING
    if job.state == "COMPLETED":
        return SUCCEEDED
    # A job that gets SIGTERM before its step handles signals ends by the signal itself.
    by_signal = job.state == "FAILED" and job.signal == signal.SIGTERM
    is_canceled = job.state == "CANCELLED" or by_signal or ExitCode.is_interruption(job.exit_code)
    return CANCELED if is_canceled else FAILED


def message_of(job: BatchJob, outcome: Outcome | None = None) -> str:
    """The message for a person about a job, in addition to its state; empty if none."""
    state, parts = state_of(job), []
    if state == PENDING:
        parts.append(_WAITS.get(job.reason, f"waits: {job.reason}" if job.reason else ""))
    elif state in (FAILED, CANCELED):
        parts.append(_why(job, outcome))
    if job.restarts:
        parts.append(f"requeued {job.restarts} time{'s' if job.restarts > 1 else ''}")
    return "; ".join(filter(None, parts))


def _why(job: BatchJob, outcome: Outcome | None) -> str:
    reason = _IN_WORDS.get(job.state, "")
    if not reason and job.reason == NEVER_SATISFIED:
        reason = "not begun: a step before it did not succeed"
    if not reason and job.state == "CANCELLED":
        reason = "cancelled"
    if not reason:
        code = f"exit code {job.exit_code} ({in_words(job.exit_code)})" if job.exit_code else ""
        reason = code or (f"signal {job.signal}" if job.signal else f"{job.state.lower()} ({job.reason})")
    first_line = outcome.reason.splitlines()[0] if outcome and outcome.exit_code and outcome.reason else ""
    return f"{reason}: {first_line}" if first_line else reason


def step_of(step: str, job: BatchJob, outcome: Outcome | None) -> StepStatus:
    """The status of a step from its job and its outcome."""
    state = state_of(job)
    if state == SUCCEEDED and outcome and outcome.result.startswith(f"{SKIPPED}:"):
        return StepStatus(step, SKIPPED.upper(), job.seconds, outcome.result.partition(": ")[2], (job.called,), 0)
    return StepStatus(step, state, job.seconds, message_of(job, outcome), (job.called,), _code_of(job, outcome))


def _code_of(job: BatchJob, outcome: Outcome | None) -> int | None:
    """The exit code of an ended job: the job's, which a shell passes on, or the one that the step recorded before its
    end.
    """
    if job.unfinished:
        return None
    if job.state == "COMPLETED":
        return int(ExitCode.OK)
    recorded_code = outcome.exit_code if outcome and outcome.ended is not None else None
    return job.exit_code or recorded_code or (128 + job.signal if job.signal else None)


def trials_of(step: str, job: BatchJob, outcomes: Mapping[str, Outcome]) -> Iterator[StepStatus]:
    """The trials of a step of a sweep: from their tasks, or from the outcomes of tasks that Slurm has forgotten."""
    tasks = {task.task: task for task in job.tasks if task.task is not None}
    by_trial = {int(entry.part): entry for entry in outcomes.values() if entry.step == step and entry.part.isdecimal()}
    for number in sorted({*tasks, *by_trial}):
        name, outcome = f"{step}-{number}", by_trial.get(number)
        if number in tasks:
            yield step_of(name, tasks[number], outcome)
        elif outcome and outcome.ended is not None:
            yield status_of_outcome(outcome)


def status_of_outcome(outcome: Outcome) -> StepStatus:
    """The status of a step, or a part of it, that Slurm has forgotten, from its outcome."""
    if outcome.ended is None:
        return StepStatus(outcome.name, FAILED, None, "did not say how it ended, and Slurm has forgotten it")
    seconds, skipped = outcome.ended - outcome.started, outcome.result.removeprefix(f"{SKIPPED}: ")
    if not outcome.exit_code and skipped != outcome.result:
        return StepStatus(outcome.name, SKIPPED.upper(), seconds, skipped, exit_code=0)
    state = CANCELED if ExitCode.is_interruption(outcome.exit_code) else FAILED if outcome.exit_code else SUCCEEDED
    return StepStatus(outcome.name, state, seconds, outcome.reason, exit_code=outcome.exit_code)


def whole_state(steps: Sequence[StepStatus]) -> str:
    """The state of a chain: that of the first step that did not succeed, once none may change."""
    states = [step.state for step in steps]
    if any(state in (PENDING, RUNNING) for state in states):
        return PENDING if all(state == PENDING for state in states) else RUNNING
    decisive = [step.state for step in steps if step.name != EXIT_HANDLER] or states
    return next((state for state in decisive if state in (FAILED, CANCELED)), SUCCEEDED)


def ended_as(steps: Sequence[str], jobs: Mapping[str, BatchJob], outcomes: Mapping[str, Outcome]) -> tuple[str, str]:
    """How `steps`, those before the exit handler, ended: succeeded, failed or cancelled, and a message.

    The message is Slurm's about the first step that did not succeed, or the step's own where Slurm has forgotten it.
    """
    for step in steps:
        if step in jobs:
            ends = [(state_of(jobs[step]), message_of(jobs[step], outcomes.get(step)))]
        else:
            statuses = [status_of_outcome(outcome) for outcome in outcomes.values() if outcome.step == step]
            ends = [(status.state, status.error) for status in statuses]
            ends = ends or [(CANCELED, NOT_KNOWN)]
        for state, message in ends:
            if state in (FAILED, CANCELED):
                return ("failed" if state == FAILED else "cancelled"), f"{step}: {message}"
    return "succeeded", ""
