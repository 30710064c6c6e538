"""What the trigger step does in a DAG, and what it shows."""

from __future__ import annotations

from holdfast.components.spec import Spec
from holdfast.components.steps import Artifact, Done
from holdfast.components.store import open_store
from holdfast.components.trigger import run


def body(spec: Spec, url: str, *, salt: str, job: str = "") -> Done:
    """Decide; the result is the `Decision`. `salt` is the one that the retraining would have, `job` this execution."""
    made = run(spec, open_store(url), salt, job=job)
    found = {"word": made.word, "run_id": made.run_id, "dataset_id": made.dataset_id}
    decision = Artifact(f"**{made.word.replace('_', ' ')}**: {made.reason}\n", metadata=found)
    return Done(made.model_dump(mode="json"), {"decision": decision}, f"{made.word}: {made.reason}")
