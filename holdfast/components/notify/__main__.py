"""`python -m holdfast.components.notify --status failed`: reports the outcome of a DAG. The exit code is always 0."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from holdfast.components.notify import Summary, run
from holdfast.components.notify.ending import PipelineExit, end_jobs_left, exit_status_of, first_failed_node, not_due
from holdfast.components.notify.summary import nothing_to_do
from holdfast.components.notify.sweep_summary import run_sweep
from holdfast.runtime.environment import outcomes_folder
from holdfast.spec.errors import HoldfastError
from holdfast.steps import Artifact, StepResult
from holdfast.steps.adapters import main
from holdfast.steps.jobs import DEADLINE, known_outcomes
from holdfast.steps.outcomes import LOG_FILE, RUN_ID, first_failure, run_of, was_stopped
from holdfast.steps.step_logs import collect_jobs, local_job
from holdfast.store import open_store

# Entry point of the exit handler: cleans up training jobs on the cluster and makes the summary. The summary uses the
# steps' records and the cluster's messages about them.

log = logging.getLogger("holdfast.notify")


def body(
    spec: str,
    overrides: Sequence[str],
    store: str,
    job: str,
    salt: str,
    trials: str,
    status: str,
    message: str = "",
    failures: str = "",
) -> StepResult:
    """Report the outcome of the execution `job`. `spec` is text, and may be a refused spec. `status` is the DAG's
    final status. `message`, or Argo's `failures`, is the cluster's report of the failed step. `trials` are those of
    a sweep."""
    outcomes = known_outcomes(job, spec, overrides, store)
    node, node_message = first_failed_node(failures)
    ending = exit_status_of(status, outcomes, stopped=was_stopped(), message=message or node_message)
    ended_well = ending == "succeeded"
    if ended_well and (reason := not_due(outcomes)):
        return _done(nothing_to_do(spec, overrides, reason), job)
    log_place = os.environ.get(LOG_FILE) or (f"holdfast logs {job}" if job and not outcomes_folder() else "")
    if trials:
        end = PipelineExit(ending, node, message or node_message, log_place=log_place, outcomes=outcomes)
        return _done(run_sweep(end, trials, spec, store, overrides=overrides, salt=salt), job)
    # A step's own message is better than the cluster's message about its pod. After a success, the record of a killed
    # try no longer matters.
    failure = None if ended_well else first_failure(outcomes)
    run_id = os.environ.get(RUN_ID) or run_of(outcomes, spec, overrides, salt)
    ended_jobs, unknown = end_jobs_left(spec, overrides, run_id)
    end = PipelineExit(
        ending,
        failed_step=failure.step if failure else node,
        message=failure.reason if failure else message or node_message,
        exit_code=failure.exit_code if failure else None,
        log_place=log_place,
        outcomes=outcomes,
        done=ended_jobs,
        unknown=unknown,
    )
    return _done(run(end, spec, store, run_id, overrides=overrides), job)


def _done(summary: Summary, job: str = "") -> StepResult:
    if summary.store:
        _collect(summary.store, job)
    return StepResult({"text": summary.text, **asdict(summary)}, {"summary": Artifact(summary.markdown)})


def _collect(url: str, job: str) -> None:
    """Delete logs of old executions. The next exit handler retries what fails."""
    try:
        removed = collect_jobs(open_store(url, deadline=DEADLINE), job or local_job(os.environ.get(LOG_FILE, "")))
    except (HoldfastError, OSError) as error:
        log.info("old logs of steps are not removed for now: %s", error)
        return
    if removed:
        log.info("the logs of %d old executions are removed: %s", len(removed), ", ".join(removed))


if __name__ == "__main__":
    sys.exit(main("notify", body))
