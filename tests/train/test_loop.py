"""The training loop over a session: its calls to the other parts."""

from pathlib import Path

import pytest
import torch

from holdfast.audit.replay_rank import _NoCheckpoints
from holdfast.collectives import Gang
from holdfast.rank.anomalies import Anomalies
from holdfast.rank.loop import train
from holdfast.rank.observers import FinishedStep
from holdfast.rank.preemption import PreemptionSignal
from holdfast.rank.session import RankSession
from tests.train.ranks import started
from tests.train.test_reference import END, global_batch
from tests.train.tiny_run import tiny_assignment

REWIND = ("training.anomalies.action=rewind", "training.anomalies.rewind_steps=1", "training.anomalies.deviations=8")


class Steps:
    """An observer that records the steps."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step(self, finished: FinishedStep) -> None:
        """See Observer."""
        self.seen.append(finished.step)

    def on_save(self, _step: int) -> dict[str, str]:
        """See Observer."""
        return {}


def test_a_replay_computes_the_steps_of_a_run_that_rewinds_although_it_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    spec, steps, nothing, leave = tiny_assignment(*REWIND), Steps(), _NoCheckpoints(), PreemptionSignal()
    leave.join()
    anomalies = Anomalies(spec.training.anomalies, torch.device("cpu"))
    assert anomalies.saves(1), "this step would be a checkpoint of the run"
    session = RankSession(spec, Gang(), started(spec, END), nothing, nothing, anomalies, [steps], leave)
    train(session, ((step, global_batch(step).numpy()) for step in range(2)), 0)
    assert steps.seen == [1, 2]
