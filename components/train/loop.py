"""The training loop.

State at step k is a pure function of (spec, dataset, seed, k): the loop asks for batch k, steps, and now and then
saves. It can stop after any step and go on after any saved one without leaving a trace in the bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.components.checkpoint import Checkpointer
from holdfast.components.runtime.gang import Gang
from holdfast.components.spec.errors import PreemptedError
from holdfast.components.train.assignment import Assignment
from holdfast.components.train.engine import Engine
from holdfast.components.train.leave import LeaveSignal
from holdfast.components.train.observers import FinishedStep, Observer
from holdfast.components.train.randomness import stream_seed
from holdfast.components.train.replicas import require_equal_replicas, state_digest
from holdfast.components.train.schedule import learning_rate


def train(
    spec: Assignment,
    engine: Engine,
    batches: Iterable[tuple[int, NDArray[np.int64]]],
    checkpointer: Checkpointer,
    observers: Sequence[Observer],
    leave: LeaveSignal,
    gang: Gang,
) -> None:
    """Train on `batches`: each step not yet done, in order, with this rank's rows of its batch, to the last step.

    Raises PreemptedError after saving when any rank was asked to leave, DivergedError when the loss is not finite,
    WrongArithmeticError (LostPeerError on the sound ranks) when replicas of the state differ.
    """
    training = spec.training
    for step, rows in batches:
        torch.manual_seed(stream_seed(training.seed, "step", step))
        rate = learning_rate(training, step)
        output = engine.step(torch.from_numpy(rows), rate)

        done, digest = step + 1, None
        scalars: dict[str, float | int] = {"optimizer.step": done}
        digesting = spec.checkpoint.digest_every is not None and done % spec.checkpoint.digest_every == 0
        if digesting:
            require_equal_replicas(engine, gang, done)
            digest = state_digest(engine, gang, scalars)
        for observer in observers:
            observer.on_step(FinishedStep(done, rate, output, time.time(), digest))

        leaving = leave.agreed()
        if done % spec.checkpoint.every_steps == 0 or done == training.steps or leaving:
            if not digesting:
                require_equal_replicas(engine, gang, done)
            for observer in observers:
                observer.on_save(done)
            checkpointer.save(done, engine.saved(), scalars)
        if leaving and done < training.steps:
            checkpointer.wait()
            raise PreemptedError(f"asked to leave: saved step {done}; the same command goes on from there")
    checkpointer.wait()
