"""Evaluation while training: the held-out loss and tasks of a committed checkpoint, and the decisions that follow.

Rank 0 loads the checkpoint as one whole model and scores it. So the figures do not depend on the layout, and the
training state is not touched. `StepEvaluation` decides from the losses alone which checkpoint is the best, and whether
the run stops. Its counts are part of the state. A run that resumes at a step that is due measures it again, and
decides the same.
"""

import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import MappingProxyType

import numpy as np
import torch

from holdfast.checkpoint import Attempt, Checkpoint, Checkpointer, open_checkpoint
from holdfast.checkpoint.retention import list_pins, pin, unpin
from holdfast.collectives import Gang
from holdfast.corpus.chat import ChatTemplate
from holdfast.corpus.encode import load_tokenizer
from holdfast.dataset import Dataset
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import Scalars
from holdfast.engines.torch.balance import Balance
from holdfast.exchange.hugging_face import averaged_rows
from holdfast.launch.device import local_device
from holdfast.model.decoder import Decoder
from holdfast.rank.state_loading import StateLoader
from holdfast.scoring.evaluations import BEST, StepScores, find_scores, write_scores
from holdfast.scoring.score import score
from holdfast.scoring.task_files import find_task
from holdfast.scoring.tasks import score_tasks
from holdfast.spec.errors import MissingError
from holdfast.spec.operations import Evaluation
from holdfast.store import Store
from holdfast.telemetry import emit
from holdfast.telemetry.events import StepEvaluated

log = logging.getLogger("holdfast.train")

PREFIX = "evaluation."
KEPT = ("best_loss", "best_step", "without_gain")  # scalars of the state; best_step 0: no best one yet


class StepEvaluation:
    """Decides after each evaluation which checkpoint is the best, and whether to stop. It decides alike on every
    rank."""

    def __init__(
        self,
        settings: Evaluation,
        measure: Callable[[int], float | None],
        scalars: Scalars = MappingProxyType({}),
        keep: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`measure(step)` returns the held-out loss of the checkpoint at `step`, alike on every rank; None for one that
        is not finite. `scalars` are those of the restored state. `keep(step)` is called for each new best
        checkpoint."""
        self._settings, self._measure, self._keep = settings, measure, keep
        self.restored(scalars)

    def restored(self, scalars: Scalars) -> None:
        """Restore the counts from the scalars of a checkpoint. Without scalars, all start at zero."""
        self._best_loss, best_step, without_gain = (scalars.get(PREFIX + name, 0) for name in KEPT)
        self._best_step, self._without_gain = int(best_step), int(without_gain)

    def scalars(self) -> dict[str, float | int]:
        """The counts, for the checkpoint. Empty if nothing is decided."""
        if not (self._settings.keep_best or self._settings.stop_after):
            return {}
        counts = (float(self._best_loss), self._best_step, self._without_gain)
        return {PREFIX + name: value for name, value in zip(KEPT, counts, strict=True)}

    def due(self, step: int) -> bool:
        """Whether the checkpoint at `step` is evaluated."""
        return step > 0 and self._settings.every_steps is not None and step % self._settings.every_steps == 0

    def measure(self, step: int) -> None:
        """Measure the checkpoint at `step`, and decide nothing. A collective call."""
        self._measure(step)

    def decide(self, step: int) -> bool:
        """Measure the checkpoint at `step`. Returns whether the run stops. A collective call."""
        loss = self._measure(step)
        if loss is not None and (not self._best_step or loss < self._best_loss):
            self._best_loss, self._best_step, self._without_gain = loss, step, 0
            if self._settings.keep_best:
                self._keep(step)
        else:
            self._without_gain += 1
        return self._settings.stop_after is not None and self._without_gain >= self._settings.stop_after


def evaluation_of(
    spec: Assignment,
    dataset: Dataset,
    attempt: Attempt,
    checkpointer: Checkpointer,
    on_scores: Callable[[StepScores], None],
    *,
    gang: Gang,
    store: Store,
    loader: StateLoader,
) -> StepEvaluation | None:
    """The evaluation of a rank whose state is restored; None if the spec has none. `on_scores` gets the scores on rank
    0. A rewind of `loader` restores the counts."""
    if spec.evaluation is None:
        return None

    def measure_on_rank_0(step: int) -> float | None:
        scores = measure_checkpoint(store, dataset, spec, local_device(spec.accelerator), step)
        on_scores(scores)
        return scores.loss

    def measure(step: int) -> float | None:
        return gang.from_rank_0(partial(measure_on_rank_0, step), float)

    def keep(step: int) -> None:
        gang.from_rank_0(partial(keep_best, store, attempt, step))

    evaluation = StepEvaluation(spec.evaluation, measure, checkpointer.scalars, keep)
    loader.on_rewind = evaluation.restored
    return evaluation


def measure_checkpoint(store: Store, dataset: Dataset, spec: Assignment, device: torch.device, step: int) -> StepScores:
    """The scores of the checkpoint at `step`, which are also written to the store. Scores of the same state are not
    measured again. Raises what reading a checkpoint and scoring raise."""
    settings = spec.evaluation
    assert settings is not None
    checkpoint = open_checkpoint(store, spec.run_id, step)
    tasks = [find_task(task) for task in settings.tasks if task.while_training]
    asked = [(task.digest, task.task.metric, task.task.shots) for task in tasks]
    scores = find_scores(store, spec.run_id, step)
    if scores is None or not scores.covers(checkpoint.manifest.state_digest, settings.max_tokens, asked):
        with _untouched_randomness():
            decoder = load_decoder(checkpoint, spec, dataset, device)
            rows = dataset.validation(spec.model.context, settings.max_tokens, every_answer=decoder.score is not None)
            measured = score(decoder, rows, dataset.token_bytes(), document_masks=spec.document_masks)
            tokenizer = load_tokenizer(dataset.tokenizer_json())
            scored = score_tasks(decoder, tokenizer, tasks, template_of(dataset))
        scores = StepScores(
            step=step,
            state_digest=checkpoint.manifest.state_digest,
            max_tokens=settings.max_tokens,
            loss=measured.loss if math.isfinite(measured.loss) else None,
            tasks=scored,
        )
        write_scores(store, spec.run_id, scores)
    event = StepEvaluated(step=step, loss=scores.loss, tasks=scores.figures)
    log.info("%s", event.text)
    emit(event)
    return scores


def template_of(dataset: Dataset) -> ChatTemplate | None:
    """The chat template of a dataset of conversations, or None."""
    chat = dataset.manifest.chat or {}
    return ChatTemplate(chat["text"], chat.get("specials") or {}) if chat.get("text") else None


def keep_best(store: Store, attempt: Attempt, step: int) -> None:
    """Pin the checkpoint at `step` as the best one, and unpin the former best. Raises what `pin` raises."""
    pin(store, attempt.run_id, step, BEST, "the lowest held-out loss (evaluation.keep_best)")
    for other in list_pins(store, attempt.run_id):
        if other.name == BEST and other.step != step:
            unpin(store, attempt.run_id, other.step, BEST)


def recorded_loss(store: Store, run_id: str, step: int) -> float | None:
    """The loss that the run measured at `step`, for a replay. Raises MissingError if it measured none."""
    if (scores := find_scores(store, run_id, step)) is None:
        raise MissingError(f"run {run_id}: the scores of step {step} are gone, and the replay decides by them")
    return scores.loss


@torch.no_grad()
def load_decoder(checkpoint: Checkpoint, spec: Assignment, dataset: Dataset, device: torch.device) -> Decoder:
    """The whole model of a checkpoint, fp32, on one device. With `training.ema.export` it has the averages."""
    decoder = Decoder.empty(spec.model, dataset.vocabulary, device, dataset.end_of_text)
    rows = averaged_rows(checkpoint) if spec.training.ema.export else checkpoint.rows
    for name, tensor in chain(decoder.named_parameters(), Balance([decoder], spec.model.routing).state()):
        first = 0
        for part in rows(name):
            tensor[first : first + len(part)] = part.to(device)
            first += len(part)
    return decoder.requires_grad_(False).eval()


@contextmanager
def _untouched_randomness() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch. The library of the tasks seeds them all."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy_state)
