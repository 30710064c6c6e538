"""`python -m holdfast.components.evaluate --spec S --run-id R`: scores a finished run and decides whether it is
blessed.
"""

from __future__ import annotations

import sys

from holdfast.components.evaluate import run
from holdfast.spec import Spec
from holdfast.steps import Artifact, StepResult
from holdfast.steps.adapters import main
from holdfast.store import layout, open_store

# Entry point of the evaluate step in a DAG, and its artifacts.


def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
    """Score a run. The result is its `Verdict`. `not_blessed` is a result, not a failure."""
    store = open_store(url)
    verdict = run(spec, run_id, store)
    summary = {"run_id": run_id, "verdict": verdict.word, "reasons": list(verdict.reasons)}
    report = store.get(layout.verdict(run_id, verdict.key, "html")).decode()
    artifacts = {"metrics": Artifact(metadata={**verdict.metrics, **summary}), "report": Artifact(report)}
    return StepResult(verdict.model_dump(mode="json"), artifacts)


if __name__ == "__main__":
    sys.exit(main("evaluate", body))
