"""What the trigger step does in a DAG, and what it shows."""

from __future__ import annotations

from holdfast.components.trigger import run
from holdfast.spec import Spec
from holdfast.steps import Artifact, StepResult
from holdfast.store import open_store


def body(spec: Spec, url: str, *, salt: str, job: str = "") -> StepResult:
    """Decide; the result is the `Decision`. `salt` is the one that the retraining would have, `job` this execution."""
    made = run(spec, open_store(url), salt, job=job)
    found = {"word": made.word, "run_id": made.run_id, "dataset_id": made.dataset_id}
    decision = Artifact(f"**{made.word.replace('_', ' ')}**: {made.reason}\n", metadata=found)
    return StepResult(made.model_dump(mode="json"), {"decision": decision}, f"{made.word}: {made.reason}")
