"""`python -m holdfast.components.evaluate --spec S --run-id R`: scores a finished run and decides whether it is
blessed.
"""

import sys

from holdfast.components.evaluate import run
from holdfast.spec import Spec
from holdfast.steps import Artifact, StepResult
from holdfast.steps.adapters import main
from holdfast.store import layout, open_store

PAUSED = "paused"  # ends the DAG before register

# Entry point of the evaluate step in a DAG, and its artifacts.


def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
    """Score a run. The result is its `Verdict`. `not_blessed` is a result, not a failure."""
    store = open_store(url)
    if spec.training.pauses:
        return _paused(spec, run_id)
    verdict = run(spec, run_id, store)
    summary = {"run_id": run_id, "verdict": verdict.word, "reasons": list(verdict.reasons)}
    report = store.get(layout.verdict(run_id, verdict.key, "html")).decode()
    artifacts = {"metrics": Artifact(metadata={**verdict.metrics, **summary}), "report": Artifact(report)}
    result = verdict.model_dump(mode="json")
    if spec.training.pause_at is not None:  # a trial of a search, which registers the best one itself
        result["word"] = PAUSED
    return StepResult(result, artifacts)


def _paused(spec: Spec, run_id: str) -> StepResult:
    """The result of a run that paused before its last step. It has no verdict."""
    reason = f"run {run_id} is paused at step {spec.training.pause_at}, and has no verdict"
    artifacts = {"metrics": Artifact(metadata={"run_id": run_id}), "report": Artifact(f"<p>{reason}</p>")}
    return StepResult({"run_id": run_id, "word": PAUSED}, artifacts, f"{PAUSED}: {reason}")


if __name__ == "__main__":
    sys.exit(main("evaluate", body))
