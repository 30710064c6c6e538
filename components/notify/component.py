"""The notify step as a KFP component: the exit handler of the pipeline."""

from kfp import dsl
from kfp.dsl import Markdown, Output, PipelineTaskFinalStatus

from components.spec.component import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def notify(
    spec: str,
    overrides: list,
    store: str,
    salt: str,
    status: PipelineTaskFinalStatus,
    summary: Output[Markdown],
) -> None:
    """Say what happened, why, and where the logs are."""
    from components.notify import run
    from components.spec.component import run_component

    def body(checked, url):  # type: ignore[no-untyped-def]
        run(checked, url)

    run_component("notify", spec, overrides, store, body, final=True)
