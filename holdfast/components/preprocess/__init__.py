"""Preprocess step: the sources of a spec become its dataset of packed tokens in the store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.corpus import Prepared, prepare
from holdfast.scoring import require_tasks
from holdfast.steps.outcomes import RUN_ID
from holdfast.telemetry import recorded_step

if TYPE_CHECKING:
    from holdfast.spec import Spec
    from holdfast.store import Store
    from holdfast.telemetry import Progress

__all__ = ["Prepared", "run"]


def run(spec: Spec, store: Store, progress: Progress | None = None, division: str = "") -> Prepared:
    """Prepare the dataset of a spec, or join the tokenized shares of a `division`. See `holdfast.corpus.prepare`.
    Its events belong to the run in HOLDFAST_RUN_ID, if set, because a dataset belongs to no run."""
    with recorded_step(store, os.environ.get(RUN_ID, ""), "preprocess") as ended:
        require_tasks(spec.evaluation.tasks, spec.model.context)  # fail before the work if a task is missing
        prepared = prepare(spec, store, progress, division)
        ended(prepared.dataset_id)
    return prepared
