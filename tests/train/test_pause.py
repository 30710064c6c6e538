"""A training that a search pauses and promotes: each budget is a prefix of the run made alone."""

from pathlib import Path
from typing import NoReturn

import pytest

from holdfast.checkpoint.lineage import newest_step
from holdfast.components.train import __main__ as entry
from holdfast.components.train.step import _has_same_end, train_until
from holdfast.engines.assignment import Assignment
from holdfast.launch.launches import claim_launch
from holdfast.scoring.evaluations import find_scores
from holdfast.spec import Spec
from tests.train.ranks import Runs, identity_of, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, new_store, tiny_spec

SHORT = ("training.steps=6", "checkpoint.every_steps=100")


@pytest.mark.slow
def test_a_promoted_trial_has_the_bits_and_the_scores_of_the_run_made_alone(tmp_path: Path) -> None:
    store, spec, measured = new_store(tmp_path / "store"), tiny_spec(*SHORT), (*SHORT, "evaluation.every_steps=2")
    trial: Runs = [(SHORT, "trial", None)]
    for pause in (2, 4, 4):  # the second time, the controller was killed before it recorded the score
        assert train_in_ranks(1, store.url, tmp_path / f"until-{pause}", trial, pause_at=pause) == [""]
        assert newest_step(store, identity_of(spec, "trial")) == pause
    runs: Runs = [*trial, (measured, "alone", None)]
    assert train_in_ranks(1, store.url, tmp_path / "rest", runs) == [""] * 2
    assert trained(store, spec, "trial") == trained(store, spec, "alone")
    for step in (2, 4):
        scores = find_scores(store, identity_of(spec, "trial"), step)
        assert scores is not None and scores.loss is not None
        assert scores == find_scores(store, identity_of(spec, "alone"), step)
    # A score in the store is returned, and no gang starts. So is that of the newest checkpoint.
    assert train_until(spec, DATASET_ID, store, "trial", until=4) == scores
    newest = find_scores(store, identity_of(spec, "alone"), 6)
    assert train_until(spec, DATASET_ID, store, "alone", until=5) == newest


def test_a_launch_with_another_end_is_not_adopted(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec(*SHORT)
    whole = Assignment.of(spec, "run", DATASET_ID)
    paused = whole.paused(2, spec.evaluation)
    number = claim_launch(store, "run", paused.model_dump(mode="json"))
    assert _has_same_end(store, number, paused)
    assert not _has_same_end(store, number, whole)
    assert not _has_same_end(store, number, whole.paused(4, spec.evaluation))


def test_a_pause_at_the_last_step_is_not_recorded_as_part_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int | None] = []

    def train(spec: Spec, *_: object, **__: object) -> NoReturn:
        pauses.append(spec.training.pause_at)
        raise InterruptedError

    monkeypatch.setattr(entry, "run", train)
    spec, store = tiny_spec(*SHORT, "training.pause_at=6"), new_store(tmp_path / "store")
    with pytest.raises(InterruptedError):
        entry.body(spec, store.url, dataset_id=DATASET_ID, salt="", replan=False)
    assert pauses == [None]
