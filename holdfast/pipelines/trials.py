"""Trials of a sweep: a grid over fields of a spec, with one shared dataset.

The DAG is preprocess, then train and evaluate for each trial, then compare, and register for the best one if it is
blessed. Every backend renders it from here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

from holdfast.spec import Spec, SpecError, dump_spec
from holdfast.spec.errors import Problem

MAX_TRIALS = 64
SHARED = ("data", "name", "store", "registration", "evaluation", "cluster")  # equal in all trials
Trials = tuple[tuple[str, ...], ...]
PARAMETERS = ("spec", "store", "salt", "replan")  # of the DAG; overrides belong to the trials


def grid(spec: Spec, over: Sequence[str]) -> Trials:
    """Every combination of `over`, whose items are `FIELD=VALUE,VALUE`, as the overrides of each trial.

    Raises SpecError for invalid trials of `spec`, and for trials that would be the same run.
    """
    axes = []
    for item in over:
        field, equals, values = item.partition("=")
        if not equals or not all(values.split(",")):
            _refuse(item, "is not FIELD=VALUE,VALUE", "write it as training.optimizer.learning_rate=1e-3,3e-3")
        if field.split(".")[0] in SHARED:
            _refuse(item, "is the same for all trials of a sweep", "sweep over fields of model and training")
        axes.append([f"{field}={value}" for value in values.split(",")])
    trials = tuple(itertools.product(*axes))
    if not 2 <= len(trials) <= MAX_TRIALS:
        _refuse(" ".join(over), f"makes {len(trials)} trials", f"give values for 2 to {MAX_TRIALS} trials")
    specs = [_trial(spec, trial) for trial in trials]
    if len(set(specs)) < len(specs):
        _refuse(" ".join(over), "names the same trial twice", "give each value, and each field, once")
    return trials


def _trial(spec: Spec, changes: Sequence[str]) -> str:
    """The spec of a trial. Its problems name --over."""
    try:
        return dump_spec(spec.with_overrides(changes))
    except SpecError as error:
        problems = [
            replace(problem, place="--over") if problem.place == "--set" else problem for problem in error.problems
        ]
        raise SpecError(problems, f"sweep, trial {', '.join(changes)}") from None


def text_of(trials: Trials) -> str:
    """The trials as input of the compare step."""
    return json.dumps(trials)


def _refuse(value: str, message: str, remedy: str) -> None:
    raise SpecError([Problem("--over", value, message, remedy)], "sweep")
