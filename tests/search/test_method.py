"""The methods of a search: what they try, promote and refuse, as functions of the log alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.pipelines.trials import plan_trials, require_comparable
from holdfast.scoring import settings_key
from holdfast.search.log import WHOLE, LogEntry, pending
from holdfast.search.method import Search, next_decision, promotable, random_trials
from holdfast.search.space import axes_of
from holdfast.spec import SpecError, parse_spec

RATE = "training.optimizer.learning_rate"
RANGE = f"{RATE}=1e-5..1e-1 log"
PREFIX, FIELDS = "training.optimizer", ("learning_rate", "weight_decay", "epsilon")
SPEC = parse_spec("{name: a, data: {sources: [{uri: x}]}, training: {steps: 90}}")
Loss = Callable[[LogEntry], float | None]


def rate_of(entry: LogEntry) -> float:
    return float(entry.changes[0].partition("=")[2])


def distance(entry: LogEntry) -> float:
    """A loss with its minimum at a rate of 1e-3."""
    return (math.log10(rate_of(entry)) + 3) ** 2


def searched(search: Search, loss: Loss, steps: int = 90) -> list[LogEntry]:
    """The log of a whole search."""
    log: list[LogEntry] = []
    while (decision := next_decision(search, steps, log)) is not None:
        log.append(decision)
        assert pending(log) == decision
        step = decision.until or steps
        log.append(LogEntry(kind="score", trial=decision.trial, until=decision.until, step=step, loss=loss(decision)))
    return log


def decided(log: list[LogEntry]) -> list[tuple[int, int]]:
    return [(entry.trial, entry.until) for entry in log if entry.kind == "decision"]


def test_random_values_are_in_their_range_and_depend_on_the_seed_alone() -> None:
    over = (RANGE, "model.layers=2..3", "training.seed=1,2")
    trials = random_trials(Search("random", over, 64, seed=3))
    assert trials == random_trials(Search("random", over, 64, seed=3))
    assert trials != random_trials(Search("random", over, 64, seed=4))
    assert trials[:5] == random_trials(Search("random", over, 5, seed=3))
    rates = [float(rate.partition("=")[2]) for rate, *_ in trials]
    assert all(1e-5 <= rate <= 1e-1 for rate in rates)
    assert 20 <= sum(rate < 1e-3 for rate in rates) <= 44, "half of a logarithmic range is below its middle"
    assert {layers for _, layers, _ in trials} == {"model.layers=2", "model.layers=3"}
    assert len(random_trials(Search("random", ("model.layers=2..4",), 9))) == 3  # there are no more


def test_asha_promotes_the_best_third_of_each_rung_and_no_failed_trial() -> None:
    search = Search("asha", (RANGE,), 9, seed=1)
    assert search.rungs(90) == (10, 30, WHOLE)
    losses = dict(enumerate((5.0, 3.0, 4.0, 9.0, None, 1.0, 8.0, 7.0, 2.0), 1))
    log = searched(search, lambda entry: losses[entry.trial])
    assert decided(log) == [
        *((1, 10), (2, 10), (3, 10), (2, 30)),
        *((4, 10), (5, 10), (6, 10), (6, 30)),  # 6 is among the best two of six
        *((7, 10), (8, 10), (9, 10), (9, 30), (6, WHOLE)),
    ]  # fmt: skip
    assert promotable(search, 10, log) == [6, 9, 2]
    assert all(entry.changes == log[0].changes for entry in log if entry.kind == "decision" and entry.trial == 1)
    failed = searched(search, lambda _: None)
    assert decided(failed) == [(trial, 10) for trial in range(1, 10)]


def test_tpe_repeats_its_suggestions_from_the_log_and_follows_the_losses() -> None:
    search = Search("tpe", (RANGE, "model.layers=2..8", "training.seed=1,2"), 20, seed=1)
    log = searched(search, distance)
    assert decided(log) == [(trial, WHOLE) for trial in range(1, 21)]
    for length in range(0, len(log), 2):  # a controller that is killed before any decision
        assert next_decision(search, 90, log[:length]) == log[length]
    tries = searched(Search("tpe", (RANGE,), 40, seed=1), distance)[::2]
    far = [abs(math.log10(rate_of(entry)) + 3) for entry in tries]
    assert sum(far[10:]) / 30 < 0.6 * sum(far[:10]) / 10, "after its random trials it is nearer to the minimum"
    assert searched(search, lambda entry: None if entry.trial == 2 else distance(entry))[4:] != log[4:]


def test_a_search_without_untried_values_ends() -> None:
    log = searched(Search("tpe", ("training.seed=1,2",), 5), lambda entry: 1.0)
    assert sorted(entry.changes for entry in log[::2]) == [("training.seed=1",), ("training.seed=2",)]


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"over": (f"{RATE}=1e-3..1e-5",)}, "begins at or above its end"),
        ({"over": (f"{RATE}=-1..1 log",)}, "has no logarithm"),
        ({"over": (f"{RATE}=a..b",)}, "is no range of numbers"),
        ({"over": (RANGE, RANGE)}, "is given twice"),
        ({"over": ("data.seed=1..5",)}, "is the same for all trials"),
        ({"over": ("training.pause_at=1..5",)}, "is the same for all trials"),
        ({"over": tuple(f"{PREFIX}.{name}=1e-5..1e-1 log" for name in FIELDS), "trials": 1000}, "in an argument"),
        ({"over": (f"{RATE}=-1.0..1.0",)}, "--over"),  # a rate below 0
        ({"over": ("training.optimizer.no=1..50",)}, "training.optimizer.no"),
        ({"over": ("training.seed=1..3",), "method": "random"}, "more than the values give: 3"),
        ({"trials": 1}, "is no number of trials"),
        ({"trials": 8}, "are too few: no trial of 2 promotions reaches the last step"),
        ({"min_steps": 90}, "leaves no rung"),
        ({"reduction": 1, "min_steps": 10}, "promotes all trials"),
        ({"over": ("training.steps=10..90",)}, "is the budget of asha"),
        ({"method": "tpe", "min_steps": 5}, "has no rungs"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(search: dict[str, Any], message: str) -> None:
    wanted = Search(**{"method": "asha", "over": (RANGE,), "trials": 9, **search})
    with pytest.raises(SpecError) as refusal:
        plan_trials(SPEC, wanted)
    assert message in str(refusal.value)


def test_asha_refuses_checkpoints_that_cannot_be_measured() -> None:
    for change in ("training.lora.rank=4", "evaluation.stop_after=1"):
        more = ["evaluation.every_steps=10"] if "evaluation" in change else []
        with pytest.raises(SpecError, match=r"--search|model\.init_from"):
            plan_trials(SPEC.with_overrides([change, *more]), Search("asha", (RANGE,), 9))


def test_a_sweep_over_runs_that_pause_is_refused() -> None:
    with pytest.raises(SpecError, match="gives no trial a verdict"):
        require_comparable(SPEC.with_overrides(["training.pause_at=4"]), ("training.seed=1,2",))


def test_a_pause_that_may_not_be_reached_is_refused() -> None:
    changes = ["training.pause_at=4", "evaluation.every_steps=2", "evaluation.stop_after=1"]
    with pytest.raises(SpecError, match=r"may not be reached with evaluation\.stop_after"):
        SPEC.with_overrides(changes)


def test_the_scores_of_one_evaluation_are_not_those_of_another() -> None:
    other = SPEC.with_overrides(["evaluation.max_tokens=100"])
    search = Search("asha", (RANGE,), 9)
    ids = {search.identity("run", settings_key(spec)) for spec in (SPEC, other, SPEC)}
    assert len(ids) == 2


def test_random_trials_are_those_of_a_sweep_on_any_backend() -> None:
    trials, search = plan_trials(SPEC, Search("random", (RANGE,), 5))
    assert (len(trials), search) == (5, None)
    assert plan_trials(SPEC, Search("asha", (RANGE,), 9)) == ((), Search("asha", (RANGE,), 9))
    with pytest.raises(SpecError, match="is a range, and a grid has values"):
        plan_trials(SPEC, (RANGE,))


def test_values_are_written_as_a_spec_has_them() -> None:
    (axis,) = axes_of((RANGE,))
    assert [axis.text(value) for value in (0.00123456, 9.99999e-6, 0.2)] == ["0.001235", "1e-05", "0.1"]
