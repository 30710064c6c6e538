"""The exit handler of a sweep: one summary of all trials."""

import json
from pathlib import Path

import pytest

from holdfast.components.compare import compare
from holdfast.components.notify.__main__ import body
from holdfast.scoring import settings_key
from holdfast.scoring.comparison import sweep_id
from holdfast.spec import parse_spec, run_id
from holdfast.steps.jobs import recorder
from holdfast.steps.outcomes import Outcome
from holdfast.store import Store, layout, open_store

TEXT = "{name: story, data: {sources: [{uri: x}]}}"
TRIALS = [["training.seed=1"], ["training.seed=2"]]
RUNS = [run_id(parse_spec(TEXT, trial), "d") for trial in TRIALS]
JOB = "job-1"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name in ("HOLDFAST_STORE", "HOLDFAST_WEBHOOK", "HOLDFAST_RUN_ID", "HOLDFAST_OUTCOMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    sweep_store = open_store((tmp_path / "store").as_uri())
    left(sweep_store, Outcome("preprocess", 1, 1.0, 2.0, 0, result="d"))
    return sweep_store


def left(store: Store, outcome: Outcome) -> None:
    record = recorder(JOB)
    assert record
    record(store.url, outcome)


def judged(store: Store, trial: list[str], run: str) -> None:
    store.put(layout.result(run), json.dumps({"step": 300, "loss": 1.5, "state_digest": "0" * 32}).encode())
    spec = parse_spec(TEXT, trial)
    settings = spec.evaluation.model_dump(mode="json")
    verdict = {"metrics": {"loss": 1.0, "perplexity": 2.0}, "word": "blessed", "key": "k", "settings": settings}
    store.put(layout.verdict(run, f"{settings_key(spec)}-none"), json.dumps(verdict).encode())
    record = {"model": "story", "version": 3, "alias": "champion"}
    store.put(layout.registration(run, "r"), json.dumps(record).encode())


def summarize(store: Store, status: str) -> dict[str, object]:
    notification = body(TEXT, [], store.url, JOB, "", json.dumps(TRIALS), status)
    record = json.loads(store.get(layout.sweep(sweep_id(RUNS), "summary.json")))
    assert record["text"] == notification.result["text"]
    return dict(record)


def test_the_summary_has_the_best_trial_and_each_that_failed_with_its_cause(store: Store) -> None:
    judged(store, TRIALS[0], RUNS[0])
    left(store, Outcome("train", 1, 2.0, 3.0, 12, "loss is NaN", part="2"))
    outcomes = [Outcome("train", 1, 2.0, 3.0, 12, "loss is NaN", part="2")]
    compare(parse_spec(TEXT), "d", TRIALS, store, outcomes=outcomes)
    left(store, Outcome("compare", 1, 4.0, 5.0, 0, result="blessed"))
    summary = summarize(store, "Failed")
    assert (summary["status"], summary["failed_step"], summary["reason"]) == ("failed", "train-2", "loss is NaN")
    assert summary["registered"] == "models:/story/3"
    text = str(summary["text"])
    assert text.startswith(f"**story-sweep (sweep {sweep_id(RUNS)}): failed**")
    assert f"1 of 2 trials compared: best training.seed=1 (run {RUNS[0]}, loss 1.0000)" in text
    assert "training.seed=2: train failed (exit code 12): loss is NaN" in text
    assert f"holdfast show {sweep_id(RUNS)}" in text


def test_a_sweep_whose_trials_were_all_compared_succeeded(store: Store) -> None:
    for trial, run in zip(TRIALS, RUNS, strict=True):
        judged(store, trial, run)
    compare(parse_spec(TEXT), "d", TRIALS, store)
    left(store, Outcome("compare", 1, 4.0, 5.0, 0, result="blessed"))
    summary = summarize(store, "Succeeded")
    assert (summary["status"], summary["failed_step"], summary["reason"]) == ("succeeded", "", "")
    assert str(summary["text"]).startswith(f"**story-sweep (sweep {sweep_id(RUNS)}): registered as models:/story/3**")


def test_the_summary_of_a_sweep_without_comparison_names_the_failed_step(store: Store) -> None:
    judged(store, TRIALS[0], RUNS[0])
    compare(parse_spec(TEXT), "d", TRIALS, store)  # of an earlier execution
    left(store, Outcome("train", 1, 2.0, part="1"))
    summary = summarize(store, "Failed")
    assert (summary["status"], summary["failed_step"]) == ("failed", "train-1")
    assert "killed" in str(summary["reason"])
    assert "no comparison of 2 trials was made" in str(summary["text"])
