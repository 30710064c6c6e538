"""The comparison of trials, from the records in the store."""

import json
from pathlib import Path

import pytest

from holdfast.components.compare import compare
from holdfast.components.compare.step import NoTrialEndedError
from holdfast.scoring import settings_key
from holdfast.scoring.comparison import read_comparison
from holdfast.spec import ExitCode, parse_spec, run_id
from holdfast.steps.outcomes import Outcome
from holdfast.store import Store, layout, open_store

SPEC = parse_spec("{name: a, data: {sources: [{uri: x}]}}")
TRIALS = [["training.seed=1"], ["training.seed=2"], ["training.seed=3"]]


def judged(store: Store, trial: list[str], loss: float | str, word: str) -> str:
    """Write the records of a trial. Returns its run id."""
    spec = parse_spec("{name: a, data: {sources: [{uri: x}]}}", trial)
    run = run_id(spec, "d")
    store.put(layout.result(run), json.dumps({"step": 300, "loss": 1.5, "state_digest": "0" * 32}).encode())
    verdict = {"metrics": {"loss": loss, "perplexity": 2.0}, "word": word}
    store.put(layout.verdict(run, f"{settings_key(spec)}-none"), json.dumps(verdict).encode())
    return run


def test_the_best_trial_is_the_blessed_one_with_the_lowest_loss_in_any_order(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    words = ("not_blessed", "blessed", "blessed")
    runs = [judged(store, trial, loss, word) for trial, loss, word in zip(TRIALS, (1.0, 3.0, 2.0), words, strict=True)]
    comparison = compare(SPEC, "d", TRIALS, store)
    assert [row.run_id for row in comparison.rows] == [runs[2], runs[1], runs[0]]
    assert (comparison.best.changes, comparison.best.word) == (("training.seed=3",), "blessed")
    assert read_comparison(store, comparison.sweep_id) == comparison == compare(SPEC, "d", TRIALS[::-1], store)
    assert comparison.markdown.count("\n") == 5


def test_a_trial_without_a_finite_loss_is_last(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    losses: tuple[float | str, ...] = ("NaN", 3.0, 2.0)
    runs = [judged(store, trial, loss, "not_blessed") for trial, loss in zip(TRIALS, losses, strict=True)]
    comparison = compare(SPEC, "d", TRIALS, store)
    assert [row.run_id for row in comparison.rows] == [runs[2], runs[1], runs[0]]
    assert comparison.rows[-1].loss is None
    assert read_comparison(store, comparison.sweep_id) == comparison


@pytest.mark.parametrize(("higher", "best"), [(True, "2"), (False, "1")])
def test_trials_of_a_script_are_ranked_by_its_first_metric(tmp_path: Path, higher: bool, best: str) -> None:
    store, trials = open_store(tmp_path.as_uri()), [[f'train.arguments=["{number}"]'] for number in (1, 2, 3)]
    metric = f"{{name: score, higher_is_better: {higher}}}"
    spec = parse_spec(
        f"{{name: a, code: 'blake3:{'0' * 64}', train: {{script: a.py}}, "
        f"evaluation: {{command: [score], metrics: [{metric}, other]}}}}"
    )
    for trial, value in zip(trials, (0.5, 0.75, "NaN"), strict=True):
        changed = spec.with_overrides(trial)
        run = run_id(changed, "")
        store.put(layout.result(run), json.dumps({"step": 3, "loss": None, "state_digest": "0" * 32}).encode())
        verdict = {"metrics": {"metric.score": value, "metric.other": -1.0}, "word": "blessed"}
        store.put(layout.verdict(run, f"{settings_key(changed)}-none"), json.dumps(verdict).encode())
    comparison = compare(spec, "", trials, store)
    assert comparison.best.changes == (f'train.arguments=["{best}"]',)
    assert comparison.rows[-1].value is None, "a metric that is not finite is last"
    assert read_comparison(store, comparison.sweep_id) == comparison
    header, _, first, *_ = comparison.markdown.splitlines()
    assert header == "| changes | score | training loss | verdict | run | digest |"
    assert f"| {comparison.best.value:.4f} |  | blessed |" in first


def test_a_failed_trial_is_listed_with_its_cause_and_the_rest_is_compared(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    judged(store, TRIALS[0], 1.0, "blessed")
    outcomes = [
        Outcome("train", 1, 1.0, 2.0, int(ExitCode.DIVERGED), "loss is NaN\nat step 7", part="2"),
        Outcome("train", 1, 1.0, part="3"),
    ]
    comparison = compare(SPEC, "d", TRIALS, store, outcomes=outcomes)
    assert [row.changes for row in comparison.rows] == [("training.seed=1",)]
    assert [(failure.changes, failure.step, failure.exit_code) for failure in comparison.failed] == [
        (("training.seed=2",), "train", 12),
        (("training.seed=3",), "train", 137),
    ]
    assert "loss is NaN<br>at step 7" in comparison.markdown
    assert "was killed" in comparison.markdown
    assert read_comparison(store, comparison.sweep_id) == comparison
    judged(store, TRIALS[1], 2.0, "blessed")
    judged(store, TRIALS[2], 3.0, "blessed")
    recompared = compare(SPEC, "d", TRIALS, store, outcomes=outcomes)  # existing results count, not earlier outcomes
    assert (len(recompared.rows), recompared.failed, recompared.sweep_id) == (3, (), comparison.sweep_id)


def test_a_sweep_without_any_verdict_ends_with_the_code_of_the_first_trial_and_names_them_all(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    outcomes = [Outcome("train", 1, 1.0, 2.0, int(ExitCode.DIVERGED), "loss is NaN", part="1")]
    with pytest.raises(NoTrialEndedError, match=r"seed=1: train failed .*\n.*seed=2.*nothing says why") as error:
        compare(SPEC, "d", TRIALS[:2], store, outcomes=outcomes)
    assert error.value.exit_code is ExitCode.DIVERGED


def test_a_value_is_text_in_the_table(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    trial = ["checkpoint.compression=none", "cluster.namespace=a"]
    judged(store, trial, 1.0, "blessed")
    comparison = compare(SPEC, "d", [trial], store)
    markdown = comparison.model_copy(
        update={"rows": (comparison.best.model_copy(update={"changes": ("a=<b>|`*",)}),)}
    ).markdown
    assert "<b>" not in markdown and "a=&#60;b&#62;&#124;&#96;&#42;" in markdown
