"""The notify step as a KFP component: the exit handler of the pipeline."""

from kfp import dsl
from kfp.dsl import Markdown, Output, PipelineTaskFinalStatus

from holdfast.components.runtime.shell import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def notify(
    spec: str,
    overrides: list,
    store: str,
    job: str,
    salt: str,
    status: PipelineTaskFinalStatus,
    summary: Output[Markdown],
) -> None:
    """Say what happened, why, and where the logs are; also when the pipeline failed."""
    import os
    from pathlib import Path

    from holdfast.components.notify import run
    from holdfast.components.runtime.outcomes import (
        LOG_FILE,
        RUN_ID,
        first_failure,
        outcomes_folder,
        read_outcomes,
        run_of,
        was_stopped,
    )
    from holdfast.components.runtime.shell import run_exit_handler
    from holdfast.components.store.jobs import outcomes_of

    def body():  # type: ignore[no-untyped-def]
        folder = outcomes_folder()
        outcomes = read_outcomes(folder) if folder else outcomes_of(job, spec, overrides, store)
        # After a success, the record of a try that was killed is history.
        failure = None if status.state == "SUCCEEDED" else first_failure(outcomes)
        told = run(
            "cancelled" if was_stopped() else status.state,
            spec,
            store,
            os.environ.get(RUN_ID) or run_of(outcomes, spec, overrides, salt),
            overrides=overrides,
            failed_step=failure.step if failure else "",
            message=failure.reason if failure else status.error_message or "",
            exit_code=failure.exit_code if failure else None,
            log_place=os.environ.get(LOG_FILE) or (f"holdfast logs {job}" if not folder and job else ""),
        )
        Path(summary.path).write_text(told.markdown, encoding="utf-8")

    run_exit_handler("notify", body)
