"""The divide step: the sources of a spec are listed, cut into units and given a tokenizer, so that many can tokenise.

The first of the three verbs of preparing a dataset on many machines: `divide`, then `tokenise` for each of the shares
that it names, at once or in any order, then `preprocess` with the division, which joins them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.corpus import Divided, divide
from holdfast.runtime.outcomes import RUN_ID
from holdfast.scoring import require_tasks
from holdfast.telemetry import recorded_step

if TYPE_CHECKING:
    from holdfast.spec import Spec
    from holdfast.store import Store

__all__ = ["Divided", "run"]


def run(spec: Spec, store: Store, shares: int = 0) -> Divided:
    """Divide the corpus of a spec. See `holdfast.corpus.divide`."""
    with recorded_step(store, os.environ.get(RUN_ID, ""), "divide") as ended:
        require_tasks(spec.evaluation.tasks)  # what is missing is better known before the work
        divided = divide(spec, store, shares)
        ended(divided.division)
    return divided
