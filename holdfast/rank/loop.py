"""The training loop.

The state at step k is a pure function of (spec, dataset, seed, k). The loop takes batch k, runs the step, and saves at
times. It can stop after any step and resume from any saved one with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.checkpoint import Checkpointer
from holdfast.collectives import Gang
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import Engine, StepOutput
from holdfast.rank.anomalies import Anomalies
from holdfast.rank.checkpoint_policy import CheckpointPolicy
from holdfast.rank.observers import FinishedStep, Observer
from holdfast.rank.preemption import PreemptionSignal
from holdfast.rank.randomness import stream_seed
from holdfast.rank.replicas import require_equal_replicas, state_digest
from holdfast.rank.schedule import learning_rate
from holdfast.spec.errors import PreemptedError
from holdfast.spec.training import BatchSizes
from holdfast.telemetry import phases


def train(
    spec: Assignment,
    engine: Engine,
    batches: Iterable[tuple[int, NDArray[np.int64]]],
    checkpointer: Checkpointer,
    cadence: CheckpointPolicy,
    anomalies: Anomalies,
    observers: Sequence[Observer],
    leave: PreemptionSignal,
    gang: Gang,
) -> None:
    """Train on `batches`, which are numbered batches with this rank's rows, up to the last step.

    Raises PreemptedError after a save if any rank was asked to stop. Raises DivergedError if an anomaly ends the run.
    Raises WrongArithmeticError (LostPeerError on the sound ranks) if replicas of the state differ.
    """
    training, sizes = spec.training, BatchSizes.of(spec.training)

    def before_update() -> None:
        phases.enter("save")
        checkpointer.wait_for_staging()
        phases.enter("optimizer")

    def computed(step: int, rows: NDArray[np.int64], rate: float) -> StepOutput:
        phases.enter("forward", step)
        torch.manual_seed(stream_seed(training.seed, "step", step))
        anomalies.begin_step(step)
        return engine.step(torch.from_numpy(rows), rate, before_update, anomalies.judge, sizes.size(step))

    phases.enter("data")
    for step, rows in batches:
        rate = learning_rate(training, step)
        output = computed(step, rows, rate)
        if anomalies.resolve(before=step):  # the state that this step used was rewound
            output = computed(step, rows, rate)

        done, digest = step + 1, None
        phases.enter("check", done)
        digesting = spec.checkpoint.digest_every is not None and done % spec.checkpoint.digest_every == 0
        if digesting:
            anomalies.resolve(before=done)
            require_equal_replicas(engine, gang, done)
            digest = state_digest(engine, gang, scalars_of(engine, anomalies, done))
        lap = phases.lap()
        for observer in observers:
            observer.on_step(FinishedStep(done, rate, output, time.time(), digest, lap))

        leaving = leave.all_ranks_stopping()
        due = cadence.due(done) or leaving or anomalies.saves(done)
        if due or checkpointer.near_due(done):
            anomalies.resolve(before=done)
            if not digesting:
                require_equal_replicas(engine, gang, done)
            attached = {key: text for observer in observers for key, text in observer.on_save(done).items()}
            scalars = scalars_of(engine, anomalies, done)
            phases.enter("save")
            checkpointer.save(done, engine.saved(), scalars, attached, committed=due)
            if due:
                cadence.saved()
        if leaving and done < training.steps:
            phases.enter("leave")
            checkpointer.wait()
            raise PreemptedError(f"asked to leave: saved step {done}; the same command goes on from there")
        phases.enter("data")
    phases.enter("leave")
    checkpointer.wait()


def scalars_of(engine: Engine, anomalies: Anomalies, done: int) -> dict[str, float | int]:
    """The scalars of the state after `done` steps, in addition to its tensors."""
    return engine.scalars(done) | anomalies.scalars()
