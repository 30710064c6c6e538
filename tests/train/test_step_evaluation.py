"""Evaluation while training: training bits stay equal, and no kill, layout or replay changes a decision."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.checkpoint import open_checkpoint, read_manifest
from holdfast.checkpoint.lineage import newest_step
from holdfast.checkpoint.retention import list_pins
from holdfast.components.train.step import _final_step
from holdfast.dataset import Dataset
from holdfast.engines.assignment import Assignment
from holdfast.rank import step_evaluation
from holdfast.rank.step_evaluation import StepEvaluation, load_decoder, measure_checkpoint
from holdfast.runtime.environment import cache_dir
from holdfast.scoring.evaluations import best_step, find_scores
from holdfast.spec.operations import Evaluation
from holdfast.telemetry import read_history
from tests.train.ranks import Runs, identity_of, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, new_store, tiny_spec

CPU = torch.device("cpu")


def decisions(losses: list[float | None], kill_at: int | None = None, **settings: bool | int) -> list[tuple[int, bool]]:
    """(step, stopped) of each decision; a resumed run begins again with the scalars of the checkpoint at `kill_at`."""
    evaluation, kept = Evaluation(every_steps=1, **settings), list[int]()

    def new(scalars: dict[str, float | int]) -> StepEvaluation:
        return StepEvaluation(evaluation, lambda step: losses[step - 1], scalars, kept.append)

    current, saved, made = new({}), dict[int, dict[str, float | int]](), []
    for step in range(1, len(losses) + 1):
        saved[step] = current.scalars()  # the checkpoint is saved before it is evaluated
        stopped = current.decide(step)
        if step == kill_at:
            current = new(saved[step])
            assert current.decide(step) == stopped
        made.append((step, stopped))
        if stopped:
            break
    return [*made, *((step, True) for step in dict.fromkeys(kept))]


@pytest.mark.parametrize(
    ("losses", "stop_after", "expected"),
    [
        ([3.0, 2.0, 2.0, 1.0, 1.5, 1.2], 2, [(1, False), (2, False), (3, False), (4, False), (5, False), (6, True)]),
        ([None, None, 3.0], 2, [(1, False), (2, True)]),
        ([3.0, None, 4.0, 1.0], 3, [(1, False), (2, False), (3, False), (4, False)]),
    ],
)
def test_decisions_follow_the_losses_and_no_kill_changes_them(
    losses: list[float | None], stop_after: int, expected: list[tuple[int, bool]]
) -> None:
    assert decisions(losses, stop_after=stop_after) == expected
    calm = decisions(losses, stop_after=stop_after, keep_best=True)
    for kill_at in range(1, len(losses) + 1):
        assert decisions(losses, kill_at, stop_after=stop_after, keep_best=True) == calm


EVERY = ("training.steps=6", "evaluation.every_steps=2", "evaluation.max_tokens=640", "checkpoint.keep_last=1")
# The rate is too low to change a weight, so that no evaluation has a lower loss than the first one.
DECIDING = (
    *EVERY,
    "training.steps=12",
    "evaluation.keep_best=true",
    "evaluation.stop_after=2",
    "training.optimizer.learning_rate=1.0e-30",
)


@pytest.mark.slow
def test_training_bits_are_those_without_evaluations_and_figures_are_those_of_the_whole_model(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    runs: Runs = [
        (EVERY[:1], "without", None),
        (EVERY, "with", None),
        (("parallel.strategy=fsdp", *EVERY), "fsdp", None),
    ]
    assert train_in_ranks(1, store.url, tmp_path / "ranks", runs) == [""] * 3
    spec = tiny_spec(*EVERY)
    assert identity_of(spec) == identity_of(tiny_spec(*EVERY[:1]))
    assert trained(store, spec, "with") == trained(store, spec, "without")
    identity, dataset = identity_of(spec, "with"), Dataset.open(store, DATASET_ID, cache_dir())
    for step in (2, 4, 6):
        scores = find_scores(store, identity, step)
        assert scores is not None
        assert scores.loss is not None
        assert math.isfinite(scores.loss)
        other = find_scores(store, identity_of(spec, "fsdp"), step)
        assert other is not None
        assert other.loss == pytest.approx(scores.loss, rel=1e-4)
    decoder = load_decoder(open_checkpoint(store, identity, 6), Assignment.of(spec, identity, DATASET_ID), dataset, CPU)
    weights = open_checkpoint(store, identity, 6)
    assert all(torch.equal(weights.tensor(name), tensor) for name, tensor in decoder.named_parameters())
    tokens = torch.from_numpy(np.concatenate(list(dataset.validation(16, 640))))
    with torch.no_grad():
        loss = float(decoder(tokens[:, :-1], tokens[:, 1:], None, reduction="mean"))
    assert scores is not None
    assert scores.loss == pytest.approx(loss, rel=1e-5)
    rows = {row["step"]: row for row in read_history(store, identity)}
    assert [step for step, row in rows.items() if "evaluation.step" in row] == [3, 5]
    assert rows[5]["evaluation.step"] == 4
    assert list_pins(store, identity) == []


@pytest.mark.slow
def test_a_killed_run_stops_at_the_same_step_with_the_same_best_checkpoint(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec(*DECIDING)
    runs: Runs = [(DECIDING, "calm", None)]
    assert train_in_ranks(1, store.url, tmp_path / "calm", runs) == [""]
    calm = identity_of(spec, "calm")
    last = newest_step(store, calm)
    assert last == 6
    for attempt, stop in enumerate((1, 5, None)):
        endings = train_in_ranks(1, store.url, tmp_path / str(attempt), [(DECIDING, "killed", stop)])
        assert endings == ["" if stop is None else "PreemptedError"]
    killed = identity_of(spec, "killed")
    assert newest_step(store, killed) == last
    manifests = [read_manifest(store, identity, last) for identity in (calm, killed)]
    assert manifests[0].state_digest == manifests[1].state_digest
    assert manifests[0].scalars["evaluation.best_step"] == 2
    best = best_step(store, calm, 2, last)
    assert best == best_step(store, killed, 2, last) == 2
    for identity in (calm, killed):
        assert [(pin.step, pin.name) for pin in list_pins(store, identity)] == [(best, "best")]
        assert _final_step(spec, identity, store) == best
    assert _final_step(tiny_spec(*DECIDING, "evaluation.keep_best=false"), calm, store) == last


def test_scores_of_the_same_state_are_read_and_those_of_another_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec("training.steps=4", *EVERY[1:])
    assert train_in_ranks(1, store.url, tmp_path / "ranks", [(("training.steps=4", *EVERY[1:]), "", None)]) == [""]
    assignment = Assignment.of(spec, identity_of(spec), DATASET_ID)
    dataset, before = Dataset.open(store, DATASET_ID, cache_dir()), find_scores(store, identity_of(spec), 4)
    state, measured = torch.random.get_rng_state(), list[int]()
    original: Any = step_evaluation.score

    def counted(*arguments: Any, **options: Any) -> Any:
        measured.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr(step_evaluation, "score", counted)
    assert measure_checkpoint(store, dataset, assignment, CPU, 4) == before
    assert not measured
    assert assignment.evaluation is not None
    fewer = assignment.evaluation.model_copy(update={"max_tokens": 320})
    again = measure_checkpoint(store, dataset, assignment.model_copy(update={"evaluation": fewer}), CPU, 4)
    assert measured == [1]
    assert again.max_tokens == 320
    assert torch.equal(torch.random.get_rng_state(), state)
