"""Trials of a sweep: a grid or a search over fields of a spec, with one shared dataset.

The DAG is preprocess, then train and evaluate for each trial, then compare, and register for the best one if it is
blessed. Every backend renders it from here.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from holdfast.search.method import DEFAULT_REDUCTION, Search, random_trials
from holdfast.search.space import split_values
from holdfast.spec import Spec, SpecError, dump_spec, run_id
from holdfast.spec.errors import Problem, require_package

MAX_TRIALS = 64
MAX_SEARCHED = 1000  # trials of tpe and asha, which are no nodes of a compiled DAG
MOST_BYTES = 100_000  # of all trials as text; Linux takes 131,071 in one argument
MAX_CORNERS = 256  # combinations of values that are checked before a search whose trials are not known yet
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
        if not equals or not all(split_values(values)):
            _refuse(item, "is not FIELD=VALUE,VALUE", "write it as training.optimizer.learning_rate=1e-3,3e-3")
        if ".." in values and "[" not in values:
            _refuse(item, "is a range, and a grid has values", "add --search random, tpe or asha, or list values")
        _require_searchable(field)
        axes.append([f"{field}={value}" for value in split_values(values)])
    trials = tuple(itertools.product(*axes))
    if not 2 <= len(trials) <= MAX_TRIALS:
        _refuse(" ".join(over), f"makes {len(trials)} trials", f"give values for 2 to {MAX_TRIALS} trials")
    _require_distinct(spec, trials, " ".join(over))
    return trials


def require_comparable(spec: Spec, over: Sequence[str] | Search) -> None:
    """Refuse a sweep whose trials cannot be ranked: those that pause, and those of a script without a metric. Raises
    SpecError."""
    if spec.training.pause_at is not None:
        problem = Problem("training.pause_at", spec.training.pause_at, "gives no trial a verdict", "remove it")
        raise SpecError([problem], "sweep")
    if spec.train.script is None:
        return
    if isinstance(over, Search) and over.method != "random":
        _refuse(over.method, "reads held-out losses, and a script has none", "use --search random", "--search")
    if not spec.evaluation.metrics:
        remedy = "add evaluation.metrics, whose first metric ranks the trials"
        raise SpecError([Problem("evaluation.metrics", None, "is needed by a sweep over a script", remedy)], "sweep")


def _require_searchable(field: str) -> None:
    if field.split(".", maxsplit=1)[0] in SHARED or field == "training.pause_at":
        _refuse(field, "is the same for all trials of a sweep", "sweep over fields of model and training")


def _require_distinct(spec: Spec, trials: Trials, shown: str) -> None:
    specs = [_trial(spec, trial) for trial in trials]
    if len(set(map(dump_spec, specs))) < len(specs):
        _refuse(shown, "names the same trial twice", "give each value, and each field, once")
    first: dict[str, tuple[str, ...]] = {}
    for trial, changes in zip(specs, trials, strict=True):
        other = first.setdefault(run_id(trial, dataset_id=""), changes)
        if other is not changes:
            message = f"{', '.join(other)} and {', '.join(changes)} would be one run: they change no bit of the model"
            _refuse(shown, message, "sweep over fields of model and training that do")


def _trial(spec: Spec, changes: Sequence[str]) -> Spec:
    """The spec of a trial. Its problems name --over."""
    try:
        return spec.with_overrides(changes)
    except SpecError as error:
        problems = [
            replace(problem, place="--over") if problem.place == "--set" else problem for problem in error.problems
        ]
        raise SpecError(problems, f"sweep, trial {', '.join(changes)}") from None


def plan_trials(spec: Spec, over: Sequence[str] | Search) -> tuple[Trials, Search | None]:
    """The trials of a grid or of a random search, or the search whose trials depend on results. Raises SpecError before
    anything is spent."""
    if not isinstance(over, Search):
        return grid(spec, over), None
    if not over.over:
        _refuse("", "has no field to search", "give --over FIELD=LOW..HIGH")
    for axis in over.axes:
        _require_searchable(axis.field)
    most = MAX_TRIALS if over.method == "random" else MAX_SEARCHED
    if not 2 <= over.trials <= most:
        _refuse(str(over.trials), "is no number of trials", f"give 2 to {most}", "--trials")
    if over.method == "asha":
        _check_rungs(spec, over)
    elif over.min_steps or over.reduction != DEFAULT_REDUCTION:
        _refuse(over.method, "has no rungs", "leave out --min-steps and --reduction, or use --search asha", "--search")
    if over.method == "tpe":
        require_package("optuna", "--search tpe")
        checked: Trials = tuple(itertools.islice(_corners(over), MAX_CORNERS))
    else:
        checked = random_trials(over)
        if len(checked) < over.trials:
            _refuse(str(over.trials), f"is more than the values give: {len(checked)}", "give fewer", "--trials")
    if (size := over.trials * max(len(text_of((trial,))) for trial in checked)) > MOST_BYTES:
        message = f"take {size} bytes in an argument of the steps, and {MOST_BYTES} is the most"
        _refuse(str(over.trials), message, "give fewer trials, or search fewer fields", "--trials")
    _require_distinct(spec, checked, " ".join(over.over))
    return (checked, None) if over.method == "random" else ((), over)


def _corners(search: Search) -> Iterator[tuple[str, ...]]:
    """The ends of all ranges, and the values of all lists, in each combination."""
    return itertools.product(*([f"{axis.field}={value}" for value in axis.ends] for axis in search.axes))


def _check_rungs(spec: Spec, search: Search) -> None:
    """Refuse a spec whose trials cannot be paused and measured, and rungs from which no trial reaches the end."""
    if any(axis.field == "training.steps" for axis in search.axes):
        _refuse("training.steps", "is the budget of asha", "leave it out: trials of asha end early")
    if spec.data.kind == "prompts" or spec.training.lora.rank is not None:
        what = "data.kind: prompts" if spec.data.kind == "prompts" else "training.lora"
        _refuse("asha", f"measures checkpoints, and those of {what} cannot be", "use random or tpe", "--search")
    if spec.evaluation.stop_after is not None:
        _refuse("asha", "ends trials by their rank, and evaluation.stop_after by itself", "remove one", "--search")
    if search.reduction < 2 or search.min_steps < 0:
        _refuse(str(search.reduction), "promotes all trials", "give 2 or more", "--reduction")
    rungs = search.rungs(spec.training.steps)
    if len(rungs) == 1:
        remedy = f"give less than training.steps = {spec.training.steps}"
        _refuse(str(search.min_steps), "leaves no rung", remedy, "--min-steps")
    if search.trials < (least := search.reduction ** (len(rungs) - 1)):
        message = f"are too few: no trial of {len(rungs) - 1} promotions reaches the last step"
        _refuse(str(search.trials), message, f"give at least {least}, or a larger --min-steps", "--trials")


def text_of(trials: Trials, search_id: str = "") -> str:
    """The trials as input of steps; those of a search with its id."""
    return json.dumps({"search": search_id, "trials": trials} if search_id else trials)


def _refuse(value: str, message: str, remedy: str, place: str = "--over") -> None:
    raise SpecError([Problem(place, value, message, remedy)], "sweep")
