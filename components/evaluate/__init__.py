"""The evaluation step: scores a finished model on held-out text, says whether it is blessed and why, draws a report.

`run` is what the pipeline calls; `docs/evaluation.md` explains what is measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.evaluate.verdict import Verdict
    from components.spec import Spec
    from components.store import Store


def run(spec: Spec, run_id: str, store: Store) -> Verdict:
    """Evaluate a run, or return the verdict that there is. See `components.evaluate.step`."""
    from components.evaluate.step import evaluate

    return evaluate(spec, run_id, store)


def verdict_key(spec: Spec) -> str:
    """What the keys of all verdicts under this spec's evaluation settings begin with, whoever was the champion."""
    from components.evaluate.verdict import settings_key

    return settings_key(spec)
