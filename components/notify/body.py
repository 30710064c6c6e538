"""What the exit handler does: from what the steps left behind, and what the cluster says of them, to the summary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

from holdfast.components.notify import run
from holdfast.components.notify.failures import first_failed_node
from holdfast.components.runtime.outcomes import (
    LOG_FILE,
    RUN_ID,
    first_failure,
    outcomes_folder,
    read_outcomes,
    run_of,
    was_stopped,
)
from holdfast.components.steps import Artifact, Done
from holdfast.components.store.jobs import outcomes_of


def body(
    spec: str,
    overrides: Sequence[str],
    store: str,
    job: str,
    salt: str,
    status: str,
    message: str = "",
    failures: str = "",
) -> Done:
    """Say what became of the execution `job`. `spec` is text, perhaps one that was refused; `status` is how the DAG
    ended, `message` or Argo's `failures` what the cluster says of the step that failed."""
    folder = outcomes_folder()
    outcomes = read_outcomes(folder) if folder else outcomes_of(job, spec, overrides, store)
    ended_well = status.lower() == "succeeded"
    not_due = next((one.result for one in outcomes if one.step == "trigger" and one.result.startswith("not_due")), "")
    if ended_well and not_due:  # nobody is told that nothing happened
        text = f"**{not_due}**\n"
        return Done({"text": text, "status": "succeeded"}, {"summary": Artifact(text)})
    node, said = first_failed_node(failures)
    # What a step said itself is better than what the cluster says of its pod. After a success, the record of a try that
    # was killed is history.
    failure = None if ended_well else first_failure(outcomes)
    summary = run(
        "cancelled" if was_stopped() else status,
        spec,
        store,
        os.environ.get(RUN_ID) or run_of(outcomes, spec, overrides, salt),
        overrides=overrides,
        failed_step=failure.step if failure else node,
        message=failure.reason if failure else message or said,
        exit_code=failure.exit_code if failure else None,
        log_place=os.environ.get(LOG_FILE) or (f"holdfast logs {job}" if job and not folder else ""),
    )
    return Done({"text": summary.text, **asdict(summary)}, {"summary": Artifact(summary.markdown)})
