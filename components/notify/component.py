"""The notify step as a KFP component: the exit handler of the pipeline."""

from kfp import dsl
from kfp.dsl import Markdown, Output, PipelineTaskFinalStatus

from components.spec.component import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def notify(spec: str, overrides: list, store: str, status: PipelineTaskFinalStatus, summary: Output[Markdown]) -> None:
    """Say what happened, why, and where the logs are; also when the pipeline failed."""
    import os
    from pathlib import Path

    from components.notify import run
    from components.spec.component import LOG_FILE, RUN_ID, first_failure, run_exit_handler, was_stopped

    def body():  # type: ignore[no-untyped-def]
        failure = first_failure()
        told = run(
            "cancelled" if was_stopped() else status.state,
            spec,
            store,
            os.environ.get(RUN_ID, ""),
            overrides=overrides,
            failed_step=failure.step if failure else "",
            message=failure.reason if failure else status.error_message or "",
            log_place=os.environ.get(LOG_FILE, ""),
        )
        Path(summary.path).write_text(told.text, encoding="utf-8")

    run_exit_handler("notify", body)
