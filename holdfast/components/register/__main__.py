"""`python -m holdfast.components.register --spec S --run-id R`: registers the model of a finished, blessed run."""

import sys

from holdfast.components.register import run
from holdfast.spec import Spec
from holdfast.steps import Artifact, StepResult
from holdfast.steps.adapters import main
from holdfast.store import layout, open_store

# Entry point of the register step in a DAG, and its artifacts.


def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
    """Register the model of a run whose newest verdict blesses it. The result is the `Registration`."""
    registration = run(spec, run_id, open_store(url))
    registered = {"run_id": run_id, "model": registration.model, "version": registration.version}
    return StepResult(
        registration.model_dump(mode="json"), {"registered": Artifact(key=layout.run(run_id), metadata=registered)}
    )


if __name__ == "__main__":
    sys.exit(main("register", body))
