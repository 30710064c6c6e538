"""Scores of the evaluations while training: one record per evaluated step, and the decisions that follow from them."""

from collections.abc import Sequence

from pydantic import BaseModel

from holdfast.scoring.verdict import TaskScore
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json

BEST = "best"  # the holder of the best checkpoint's pin


class StepScores(BaseModel, frozen=True):
    """The scores of one checkpoint: `runs/<run-id>/scores/step-N.json`."""

    step: int
    state_digest: str  # of the checkpoint
    max_tokens: int  # held-out targets at most
    loss: float | None  # held out, in nats per token; None: not finite
    tasks: tuple[TaskScore, ...] = ()

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the tasks, by `task.NAME.METRIC`."""
        return {f"task.{score.task}.{score.metric}": score.value for score in self.tasks}

    def covers(self, state_digest: str, max_tokens: int, tasks: Sequence[tuple[str, str, int]]) -> bool:
        """Whether they are of this state, on this text, and of these tasks: digests, metrics and shots."""
        known = [(score.digest, score.metric, score.shots) for score in self.tasks]
        return (self.state_digest, self.max_tokens, known) == (state_digest, max_tokens, list(tasks))


def write_scores(store: Store, run_id: str, scores: StepScores) -> None:
    """Write the scores of a step. They replace those of another state."""
    store.put(layout.step_scores(run_id, scores.step), scores.model_dump_json(indent=1).encode())


def find_scores(store: Store, run_id: str, step: int) -> StepScores | None:
    """The scores of a step, or None. Raises DataError for a damaged record."""
    try:
        return read_json(store, layout.step_scores(run_id, step), StepScores)
    except MissingError:
        return None


def scores_of_pause(store: Store, run_id: str, steps: Sequence[int], max_tokens: int) -> StepScores | None:
    """The scores at the first of `steps` that was measured on `max_tokens` held-out targets. None if there are none."""
    found = (find_scores(store, run_id, step) for step in steps)
    return next((scores for scores in found if scores is not None and scores.max_tokens == max_tokens), None)


def best_step(store: Store, run_id: str, every_steps: int, last: int) -> int | None:
    """The first step with the lowest held-out loss of a run whose last checkpoint is at step `last`. None if no loss is
    finite."""
    found = (find_scores(store, run_id, step) for step in range(every_steps, last + 1, every_steps))
    losses = [(scores.loss, scores.step) for scores in found if scores is not None and scores.loss is not None]
    return min(losses)[1] if losses else None
