"""Evaluate step: scores a finished model on held-out text, gives a verdict with reasons, and draws a report.

The pipeline calls `run`. `docs/evaluation.md` explains what is measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.scoring import Verdict
    from holdfast.spec import Spec
    from holdfast.store import Store


def run(spec: Spec, run_id: str, store: Store) -> Verdict:
    """Evaluate a run, or return its existing verdict. See `holdfast.components.evaluate.step`."""
    from holdfast.components.evaluate.step import evaluate
    from holdfast.store import layout
    from holdfast.telemetry import recorded_step

    known_id = run_id if store.stat(layout.result(run_id)) is not None else ""  # an unknown run id leaves no trace
    with recorded_step(store, known_id, "evaluate") as ended:
        verdict = evaluate(spec, run_id, store)
        ended(verdict.word)
    return verdict
