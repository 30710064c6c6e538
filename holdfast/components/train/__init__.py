"""The train step: launches the gang, follows it, restarts it, and exports the trained model.

The pipeline calls `run`. The ranks run `holdfast.rank.worker`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.components.train.result import TrainingResult
    from holdfast.spec import Spec
    from holdfast.store import Store


def run(spec: Spec, dataset_id: str, store: Store, salt: str = "", *, replan: bool = False) -> TrainingResult:
    """Train, resume training, or return the result of a finished run. See `holdfast.components.train.step`."""
    from holdfast.components.train.step import train

    return train(spec, dataset_id, store, salt, replan=replan)
