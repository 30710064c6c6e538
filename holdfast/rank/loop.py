"""The training loop.

The state at step k is a pure function of (spec, dataset, seed, k). The loop takes batch k, runs the step, and saves at
times. It can stop after any step and resume from any saved one with the same bits.
"""

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from holdfast.rank.observers import FinishedStep
from holdfast.rank.schedule import learning_rate
from holdfast.rank.session import RankSession
from holdfast.spec.errors import PreemptedError
from holdfast.telemetry import phases


def train(session: RankSession, batches: Iterable[tuple[int, NDArray[np.int64]]], start: int) -> None:
    """Train on `batches`, which are numbered batches with this rank's rows, from the state after `start` steps up
    to the last step of the launch, or until an evaluation ends the run.

    Raises PreemptedError after a save if any rank received a stop request. Raises DivergedError if an anomaly ends the
    run. Raises WrongArithmeticError (LostPeerError on the sound ranks) if replicas of the state differ.
    """
    training, anomalies = session.spec.training, session.anomalies
    stopped = session.evaluates(start) and session.evaluate(start)  # its attempt may have ended before the decision
    phases.enter("data")
    for step, rows in () if stopped else batches:
        rate = learning_rate(training, step)
        output = session.compute(step, rows, rate)
        if anomalies.resolve(before=step):  # the state that this step used was rewound
            output = session.compute(step, rows, rate)

        done = step + 1
        phases.enter("check", done)
        digest = session.digest(done)
        session.report(FinishedStep(done, rate, output, time.time(), digest, phases.lap()))

        leaving = session.leave.all_ranks_stopping()
        evaluating = session.evaluates(done)
        due = session.schedule.due(done) or leaving or anomalies.saves(done) or evaluating
        if due or session.saves.near_due(done):
            session.save(done, committed=due, compared=digest is not None)
        if leaving and done < training.steps:
            phases.enter("leave")
            session.saves.wait()
            raise PreemptedError(f"stop requested: saved step {done}; the same command resumes from there")
        if evaluating and session.evaluate(done):
            break
        phases.enter("data")
    phases.enter("leave")
    session.saves.wait()
    session.measure_pause()
