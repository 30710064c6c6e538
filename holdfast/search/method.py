"""Methods of a search. `next_decision` is a pure function of the search and its log."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from holdfast.search.log import (
    WHOLE,
    LogEntries,
    LogEntry,
    SearchLog,
    decisions_of,
    pending,
    scores_of,
    trials_begun,
)
from holdfast.search.space import Axis, axes_of, draw
from holdfast.spec.identity import digest

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

METHODS = ("random", "tpe", "asha")
Method = Literal["random", "tpe", "asha"]
STARTUP = 10  # random trials of TPE before it models the losses, at most
DEFAULT_REDUCTION = 3


@dataclass(frozen=True)
class Search:
    """A search over fields of a spec."""

    method: Method
    over: tuple[str, ...]  # FIELD=LOW..HIGH, FIELD=LOW..HIGH log, or FIELD=VALUE,VALUE
    trials: int  # at most
    seed: int = 0
    reduction: int = DEFAULT_REDUCTION  # of asha: the best of this many trials is promoted
    min_steps: int = 0  # of asha: steps of the first rung; 0: those that give two promotions

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The search space. Raises SpecError."""
        return axes_of(self.over)

    def rungs(self, steps: int) -> tuple[int, ...]:
        """The budgets of trials with this many `steps`. The last one is WHOLE."""
        if self.method != "asha":
            return (WHOLE,)
        rung, budgets = self.min_steps or -(-steps // self.reduction**2), []
        while rung < steps:
            budgets.append(rung)
            rung *= self.reduction
        return (*budgets, WHOLE)

    def identity(self, base_run: str, settings: str) -> str:
        """The id of the search over the spec whose run is `base_run`. `settings`: a digest of how its trials are
        evaluated, as the scores of its log depend on them."""
        return digest(["search", base_run, settings, asdict(self)])


def random_trials(search: Search) -> tuple[tuple[str, ...], ...]:
    """The overrides of all trials of a random search. Fewer than `search.trials` if there are not as many values."""
    trials: list[tuple[str, ...]] = []
    for number in range(1, search.trials + 1):
        changes = draw(search.axes, search.seed, number, trials)
        if changes is None:
            break
        trials.append(changes)
    return tuple(trials)


def next_decision(search: Search, steps: int, entries: LogEntries) -> LogEntry | None:
    """What to train next. None if the search has no more to train, apart from decisions without a score.

    `asha` promotes before it begins a trial (Li et al. 2020, algorithm 2): from the highest rung down, the best of the
    top 1/reduction of a rung that was not promoted. A failed trial counts in its rung and is never promoted.
    """
    rungs, decided, begun = search.rungs(steps), decisions_of(entries), trials_begun(entries)
    for rung, above in reversed(list(pairwise(rungs))):
        for trial in promotable(search, rung, entries):
            if (trial, above) not in decided:
                return LogEntry(kind="decision", trial=trial, until=above, changes=decided[trial, rung].changes)
    number = len(begun) + 1
    if number > search.trials:
        return None
    drawn = draw(search.axes, search.seed, number, begun)
    changes = _suggestion(search, number, entries) if search.method == "tpe" else drawn
    if changes in begun:  # a list of few values
        changes = drawn
    return None if changes is None else LogEntry(kind="decision", trial=number, until=rungs[0], changes=changes)


def decide(search: Search, steps: int, log: SearchLog) -> LogEntry | None:
    """What to train next, with its entry in the log. None if the search has ended."""
    while (decision := pending(log.entries) or next_decision(search, steps, log.entries)) is not None:
        if (decision.trial, decision.until) in decisions_of(log.entries) or log.add(decision):
            return decision
    return None


def promotable(search: Search, rung: int, entries: LogEntries) -> list[int]:
    """The trials in the top 1/reduction of a rung, best first. Equal losses are in the order of the trials."""
    in_rung = [score for (_, until), score in scores_of(entries).items() if until == rung]
    losses = sorted((score.loss, score.trial) for score in in_rung if score.loss is not None)
    return [trial for _, trial in losses[: len(in_rung) // search.reduction]]


def _suggestion(search: Search, number: int, entries: LogEntries) -> tuple[str, ...]:
    """The values that Optuna's TPE sampler suggests after the scores of the log. It is made anew for each trial with a
    seed of the trial, so that it has no state but the log."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces = {axis.field: _distribution(axis) for axis in search.axes}
    sampler = optuna.samplers.TPESampler(
        seed=int(digest([search.seed, number])[:8], 16), n_startup_trials=min(STARTUP, max(2, search.trials // 3))
    )
    study = optuna.create_study(sampler=sampler)
    decided = decisions_of(entries)
    for key, score in scores_of(entries).items():
        values = dict(change.split("=", 1) for change in decided[key].changes)
        state = optuna.trial.TrialState.FAIL if score.loss is None else optuna.trial.TrialState.COMPLETE
        parameters = {axis.field: _parameter(axis, values[axis.field]) for axis in search.axes}
        study.add_trial(
            optuna.trial.create_trial(state=state, params=parameters, distributions=spaces, value=score.loss)
        )
    suggested = study.ask(spaces).params
    return tuple(
        f"{axis.field}={suggested[axis.field] if axis.values else axis.text(suggested[axis.field])}"
        for axis in search.axes
    )


def _distribution(axis: Axis) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if axis.values:
        return CategoricalDistribution(axis.values)
    if axis.whole:
        return IntDistribution(round(axis.low), round(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def _parameter(axis: Axis, text: str) -> str | int | float:
    return text if axis.values else int(text) if axis.whole else float(text)
