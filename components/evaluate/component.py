"""The evaluate step as a KFP component."""

from kfp import dsl
from kfp.dsl import HTML, Metrics, Output

from holdfast.components.runtime.shell import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    spec: str, overrides: list, store: str, job: str, run_id: str, metrics: Output[Metrics], report: Output[HTML]
) -> str:
    """Score the model on the held-out split. Returns the verdict's word: blessed or not_blessed."""
    from math import isfinite
    from pathlib import Path

    from holdfast.components.evaluate import run
    from holdfast.components.runtime.shell import run_component
    from holdfast.components.store import layout, open_store
    from holdfast.components.store.jobs import recorder

    def body(checked, url):  # type: ignore[no-untyped-def]
        opened = open_store(url)
        verdict = run(checked, run_id, opened)
        for name, value in verdict.metrics.items():
            if isinstance(value, int | float) and isfinite(value):  # the UI cannot show NaN
                metrics.log_metric(name, value)
        metrics.metadata.update(run_id=run_id, verdict=verdict.word, reasons=list(verdict.reasons))
        Path(report.path).write_bytes(opened.get(layout.verdict(run_id, verdict.key, "html")))
        return verdict.word

    return run_component("evaluate", spec, overrides, store, body, recorder(job))
