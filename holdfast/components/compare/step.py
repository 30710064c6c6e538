"""Comparison of the trials of a sweep: one record and one table from their results in the store.

The same trials give the same bytes in every comparison. A failed trial is listed with its cause and does not affect the
other trials. Nothing is measured here: the train and evaluate steps do that.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from holdfast.scoring import newest_record, settings_key
from holdfast.scoring.comparison import (
    BLESSED,
    Comparison,
    FailedTrial,
    Row,
    Rung,
    StoppedTrial,
    sweep_id,
    sweep_name,
    trials_of,
)
from holdfast.search.log import WHOLE, LogEntries, decisions_of, last_score, read_log, scores_of
from holdfast.spec import ExitCode, HoldfastError, Spec
from holdfast.spec.errors import MissingError
from holdfast.steps.outcomes import KILLED, Outcome
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json_object

UNKNOWN = "it did not end, and nothing says why; its log may"


class NoTrialEndedError(HoldfastError):
    """No trial of a sweep has a verdict to compare."""

    tried_again = True  # by the steps of the trials

    def __init__(self, failed: Sequence[FailedTrial]) -> None:
        super().__init__(
            "\n".join(["no trial of the sweep came to a verdict:", *(f"  {trial.text}" for trial in failed)])
        )
        code = next((trial.exit_code for trial in failed if trial.exit_code), ExitCode.NOT_FOUND)
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.UNEXPECTED


def compare(
    spec: Spec,
    dataset_id: str,
    trials: Sequence[Sequence[str]],
    store: Store,
    salt: str = "",
    outcomes: Sequence[Outcome] = (),
    search: str = "",
) -> Comparison:
    """Compare the `trials` of `spec`, each a list of overrides, and write `sweeps/<id>/comparison.json`. `outcomes` of
    this execution's steps explain why a trial has no verdict. Of the trials of a `search`, those that its log has
    trained to their last step are compared.

    Raises NoTrialEndedError, with the code of the first failed trial, if no trial has a verdict.
    """
    rows, failed, runs, stopped = [], [], [], list[StoppedTrial]()
    entries = read_log(store, search) if search else []
    for number, (changes, trial, identity) in enumerate(trials_of(spec, trials, dataset_id, salt), 1):
        runs.append(identity)
        ended = last_score(entries, number)
        if ended is not None and ended.exit_code:
            code, reason = ended.exit_code, ended.reason or UNKNOWN
            failed.append(
                FailedTrial(changes=changes, run_id=identity, step=ended.failed_step, exit_code=code, reason=reason)
            )
            continue
        if ended is not None and ended.until != WHOLE:
            stopped.append(StoppedTrial(changes=changes, run_id=identity, step=ended.step, loss=ended.loss))
            continue
        row = row_of(changes, trial, identity, store)
        if row is not None:
            rows.append(row)
        else:
            step = "evaluate" if store.stat(layout.result(identity)) is not None else "train"
            failed.append(_failed(changes, identity, step, str(number), outcomes))
    if not rows:
        raise NoTrialEndedError(failed)
    rows.sort(key=lambda row: (row.word != BLESSED, _rank(row, spec), row.run_id))
    comparison = Comparison(
        sweep_id=search or sweep_id(runs),
        name=sweep_name(spec),
        dataset_id=dataset_id,
        rows=tuple(rows),
        failed=tuple(failed),
        stopped=tuple(stopped),
        rungs=_rungs(entries, spec.training.steps),
    )
    store.put(layout.sweep(comparison.sweep_id, "comparison.md"), comparison.markdown.encode())
    store.put(layout.sweep(comparison.sweep_id, "comparison.json"), comparison.model_dump_json(indent=1).encode())
    return comparison


def _rungs(entries: LogEntries, steps: int) -> tuple[Rung, ...]:
    """The rungs of a search by ASHA; empty for another one, whose trials all train to their last step."""
    counts = Counter(until for _, until in scores_of(entries))
    decided = Counter(until for _, until in decisions_of(entries))
    budgets = [*sorted(until for until in decided if until != WHOLE), WHOLE]
    if len(budgets) == 1:
        return ()
    promoted = [*(decided[above] for above in budgets[1:]), 0]
    return tuple(
        Rung(steps=until or steps, trials=counts[until], promoted=count)
        for until, count in zip(budgets, promoted, strict=True)
    )


def _rank(row: Row, spec: Spec) -> float:
    """A number by which trials are in order, the best first."""
    if not row.metric:
        return math.inf if row.loss is None else row.loss
    if row.value is None:
        return math.inf
    return -row.value if spec.evaluation.metrics[0].higher_is_better else row.value


def row_of(changes: tuple[str, ...], trial: Spec, identity: str, store: Store) -> Row | None:
    """The row of a trial; None without a result and a verdict."""
    try:
        result = read_json_object(store, layout.result(identity))
    except MissingError:
        return None
    verdict = _newest_verdict(store, layout.run(identity, f"evaluations/{settings_key(trial)}"))
    if not verdict:
        return None
    if trial.train.script is not None:
        metric = trial.evaluation.metrics[0].label
        return Row(
            changes=changes,
            run_id=identity,
            step=result["step"],
            training_loss=result["loss"],
            metric=metric,
            value=_finite(verdict["metrics"][f"metric.{metric}"]),
            word=verdict["word"],
            state_digest=result["state_digest"],
        )
    return Row(
        changes=changes,
        run_id=identity,
        step=result["step"],
        training_loss=result["loss"],
        loss=_finite(verdict["metrics"]["loss"]),
        perplexity=_finite(verdict["metrics"]["perplexity"]),
        word=verdict["word"],
        state_digest=result["state_digest"],
    )


def _finite(value: float | str) -> float | None:
    """A number of a verdict, which has NaN and infinity as text; None for these."""
    return number if math.isfinite(number := float(value)) else None


def _failed(changes: tuple[str, ...], identity: str, step: str, part: str, outcomes: Sequence[Outcome]) -> FailedTrial:
    """A trial without a verdict, with the outcome of its step. A step without a recorded end was killed."""
    left = next((one for one in outcomes if one.step == step and one.part == part), None)
    code, reason = (None, UNKNOWN) if left is None else (left.exit_code, left.reason or UNKNOWN)
    if left is not None and left.ended is None:
        code, reason = int(ExitCode.KILLED), KILLED
    return FailedTrial(changes=changes, run_id=identity, step=step, exit_code=code, reason=reason)


def _newest_verdict(store: Store, prefix: str) -> dict[str, Any]:
    keys = [info.key for info in store.list(prefix) if info.key.endswith(".json")]
    verdicts = [(key, read_json_object(store, key)) for key in keys]
    return newest_record(verdicts)[1]
