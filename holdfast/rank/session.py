"""Session of a rank: what the training loop works with, from the formed gang to the last step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from numpy import int64
from numpy.typing import NDArray

from holdfast.checkpoint.box import TensorBox
from holdfast.collectives import Gang
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import Engine, StepOutput
from holdfast.rank.anomalies import Anomalies
from holdfast.rank.answer_batches import AnswerBatches
from holdfast.rank.observers import FinishedStep, Observer
from holdfast.rank.preemption import PreemptionSignal
from holdfast.rank.randomness import seed_torch, stream_seed
from holdfast.rank.replicas import require_equal_replicas, state_digest
from holdfast.rank.step_evaluation import StepEvaluation
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.telemetry import phases


class Saves(Protocol):
    """What the loop needs of `holdfast.checkpoint.Checkpointer`."""

    def save(
        self,
        step: int,
        boxes: Sequence[TensorBox],
        scalars: Mapping[str, float | int],
        attachments: Mapping[str, str] | None = None,
        *,
        committed: bool = True,
    ) -> None:
        """Begin to save the state after `step` steps."""

    def near_due(self, step: int) -> bool:
        """Whether a local tier keeps the state after `step`."""

    def wait_for_staging(self) -> None:
        """Wait until the state that was saved last may change."""

    def wait(self) -> None:
        """Wait for the saves in flight."""


class SaveSchedule(Protocol):
    """What the loop needs of `CheckpointPolicy`."""

    def due(self, step: int) -> bool:
        """Whether the state after `step` steps becomes a checkpoint. A collective call."""

    def saved(self) -> None:
        """Record that a save began."""


@dataclass(frozen=True)
class RankSession:
    """One rank of a formed gang, with its state loaded."""

    spec: Assignment
    gang: Gang
    engine: Engine
    saves: Saves
    schedule: SaveSchedule
    anomalies: Anomalies
    observers: Sequence[Observer]
    leave: PreemptionSignal
    answers: AnswerBatches | None = None  # of the objective grpo
    evaluation: StepEvaluation | None = None

    def evaluates(self, done: int) -> bool:
        """Whether the checkpoint after `done` steps is evaluated."""
        return self.evaluation is not None and self.evaluation.due(done)

    def evaluate(self, done: int) -> bool:
        """Wait for the checkpoint after `done` steps, and evaluate it. Returns whether the run ends with it. A
        collective call."""
        assert self.evaluation is not None
        phases.enter("save")
        self.saves.wait()
        phases.enter("check", done)
        return self.evaluation.decide(done)

    def measure_pause(self) -> None:
        """Measure the checkpoint at which this launch pauses, if it does. A collective call."""
        if self.spec.pause_at is not None and self.evaluation is not None:
            phases.enter("check", self.spec.pause_at)
            self.evaluation.measure(self.spec.pause_at)

    def compute(self, step: int, rows: NDArray[int64], rate: float) -> StepOutput:
        """Run one optimizer step on this rank's rows of batch `step`. A collective call."""
        phases.enter("forward", step)
        seed_torch(stream_seed(self.spec.training.seed, "step", step))
        self.anomalies.begin_step(step)
        size = BatchSizes.of(self.spec.training).size(step)
        output = self.engine.step(torch.from_numpy(rows), rate, self.before_update, self.anomalies.judge, size)
        if self.answers is None:
            return output
        metrics = {name: torch.tensor(value) for name, value in self.answers.metrics.items()}
        return replace(output, metrics={**output.metrics, **metrics})

    def before_update(self) -> None:
        """Wait for the readers of the state, which changes next."""
        phases.enter("save")
        self.saves.wait_for_staging()
        phases.enter("optimizer")

    def digest(self, done: int) -> str | None:
        """Compare the replicas of the state after `done` steps, and return its digest, in steps that are digested.
        None in other steps. A collective call."""
        every = self.spec.checkpoint.digest_every
        if every is None or done % every:
            return None
        self.anomalies.resolve(before=done)
        require_equal_replicas(self.engine, self.gang, done)
        return state_digest(self.engine, self.gang, self.scalars(done))

    def report(self, finished: FinishedStep) -> None:
        """Show a finished step to all observers."""
        for observer in self.observers:
            observer.on_step(finished)

    def save(self, done: int, *, committed: bool, compared: bool) -> None:
        """Begin to save the state after `done` steps: as a checkpoint if `committed`, else only in local tiers. Compare
        its replicas first, unless they were `compared`. A collective call."""
        self.anomalies.resolve(before=done)
        if not compared:
            require_equal_replicas(self.engine, self.gang, done)
        attached = {key: text for observer in self.observers for key, text in observer.on_save(done).items()}
        scalars = self.scalars(done)
        phases.enter("save")
        self.saves.save(done, self.engine.saved(), scalars, attached, committed=committed)
        if committed:
            self.schedule.saved()

    def scalars(self, done: int) -> dict[str, float | int]:
        """The scalars of the state after `done` steps, in addition to its tensors."""
        answers = {} if self.answers is None else self.answers.scalars()
        decided = {} if self.evaluation is None else self.evaluation.scalars()
        return self.engine.scalars(done) | self.anomalies.scalars() | answers | decided
