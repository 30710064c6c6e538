"""Divide step: lists the sources of a spec, divides them into units and provides a tokenizer, for parallel
tokenization.

Preparing a dataset on many machines takes three steps. `divide` comes first, then `tokenise` for each share, in any
order or concurrently. `preprocess` with the division joins the shares.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.corpus import Divided, divide
from holdfast.scoring import require_tasks
from holdfast.steps.outcomes import RUN_ID
from holdfast.telemetry import recorded_step

if TYPE_CHECKING:
    from holdfast.spec import Spec
    from holdfast.store import Store

__all__ = ["Divided", "run"]


def run(spec: Spec, store: Store, shares: int = 0) -> Divided:
    """Divide the corpus of a spec. See `holdfast.corpus.divide`."""
    with recorded_step(store, os.environ.get(RUN_ID, ""), "divide") as ended:
        require_tasks(spec.evaluation.tasks, spec.model.context)  # fail before the work if a task is missing
        divided = divide(spec, store, shares)
        ended(divided.division)
    return divided
