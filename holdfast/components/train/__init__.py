"""The train step: launches the gang, follows it, restarts it, and exports the trained model.

The pipeline calls `run`. The ranks run `holdfast.rank.worker`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.components.train.result import TrainingResult
    from holdfast.scoring.evaluations import StepScores
    from holdfast.spec import Spec
    from holdfast.store import Store


def run(spec: Spec, dataset_id: str, store: Store, salt: str = "", *, replan: bool = False) -> TrainingResult:
    """Train, resume training, or return the result of a finished run. See `holdfast.components.train.step`."""
    from holdfast.components.train.step import train

    return train(spec, dataset_id, store, salt, replan=replan)


def run_until(
    spec: Spec, dataset_id: str, store: Store, salt: str = "", *, until: int, replan: bool = False
) -> StepScores:
    """Train up to a step, and measure the held-out loss there. See `holdfast.components.train.step.train_until`."""
    from holdfast.components.train.step import train_until

    return train_until(spec, dataset_id, store, salt, until=until, replan=replan)
