"""Entry point of the register step in a DAG, and its artifacts."""

from __future__ import annotations

from holdfast.components.register import run
from holdfast.spec import Spec
from holdfast.steps import Artifact, StepResult
from holdfast.store import layout, open_store


def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
    """Register the model of a run whose newest verdict blesses it. The result is the `Registration`."""
    made = run(spec, run_id, open_store(url))
    registered = {"run_id": run_id, "model": made.model, "version": made.version}
    return StepResult(
        made.model_dump(mode="json"), {"registered": Artifact(key=layout.run(run_id), metadata=registered)}
    )
