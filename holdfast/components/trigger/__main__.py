"""`python -m holdfast.components.trigger --spec SPEC`: decides whether a retraining is due. The result has the
outcome.
"""

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
    decision = run(spec, open_store(url), salt, job=job)
    metadata = {"word": decision.word, "run_id": decision.run_id, "dataset_id": decision.dataset_id}
    artifact = Artifact(f"**{decision.word.replace('_', ' ')}**: {decision.reason}\n", metadata=metadata)
    return StepResult(decision.model_dump(mode="json"), {"decision": artifact}, f"{decision.word}: {decision.reason}")


if __name__ == "__main__":
    sys.exit(main("trigger", body))
