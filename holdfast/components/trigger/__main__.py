"""`python -m holdfast.components.trigger --spec SPEC`: decides whether a retraining is due. The result has the
outcome.
"""

from __future__ import annotations

import sys

from holdfast.components.trigger import run
from holdfast.spec import Spec
from holdfast.steps import Artifact, StepResult
from holdfast.steps.adapters import main
from holdfast.store import open_store

# Entry point of the trigger step in a DAG, and its artifacts.


def body(spec: Spec, url: str, *, salt: str, job: str = "") -> StepResult:
    """Decide whether a retraining is due. The result is the `Decision`. `salt` is that of the possible retraining.
    `job` is this execution."""
    made = run(spec, open_store(url), salt, job=job)
    found = {"word": made.word, "run_id": made.run_id, "dataset_id": made.dataset_id}
    decision = Artifact(f"**{made.word.replace('_', ' ')}**: {made.reason}\n", metadata=found)
    return StepResult(made.model_dump(mode="json"), {"decision": decision}, f"{made.word}: {made.reason}")


if __name__ == "__main__":
    sys.exit(main("trigger", body))
