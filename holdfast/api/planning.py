"""Plans: the layouts of a spec that fit, their speed, and the duration and cost of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.spec import Spec
from holdfast.spec.errors import UsageError

if TYPE_CHECKING:
    from holdfast.planning import Accelerator, Found, Spot, Task

HOUR_SECONDS = 3600.0
MAX_ACCELERATORS = 2**15  # that a budget considers


@dataclass(frozen=True)
class Hardware:
    """The accelerators to plan for."""

    accelerator: str = ""  # H100, … or a YAML file; default: the product of cluster.node_selector
    calibration: Path | None = None  # measured by `calibrate`, instead of a name
    price: float | None = None  # of an accelerator-hour; default: cluster.prices
    count: int | None = None  # default: that of the spec


AS_IN_THE_SPEC = Hardware()


@dataclass(frozen=True)
class PlannedLayouts:
    """The result of a search for layouts."""

    task: Task
    found: Found
    accelerator: Accelerator
    vocabulary: int
    vocabulary_assumed: bool  # the tokenizer is a file whose size is unknown


def plan(
    spec: Spec,
    hardware: Hardware = AS_IN_THE_SPEC,
    *,
    layouts: int = 5,
    budget: float | None = None,
    vocabulary: int | None = None,
) -> PlannedLayouts:
    """The best layouts of a spec on some accelerators. With `budget`, also the number of accelerators."""
    from holdfast.corpus.starting_model import teacher_of
    from holdfast.planning.auto import task_of

    accelerator = _accelerator(spec, hardware.accelerator, hardware.calibration, hardware.price)
    tokens, assumed = vocabulary_of(spec) if vocabulary is None else (vocabulary, False)
    if budget is None:
        task = task_of(spec, accelerator, hardware.count or spec.world_size, tokens, teacher_of(spec))
        layouts_found = _search(spec, task, layouts)
    else:
        if hardware.count is not None:
            raise UsageError("it chooses the number; give one of --budget and --gpus", "--budget")
        task, layouts_found = _within(budget, spec, accelerator, tokens, layouts)
    return PlannedLayouts(task, layouts_found, accelerator, tokens, assumed)


def vocabulary_of(spec: Spec) -> tuple[int, bool]:
    """The number of tokens of a spec's tokenizer, and whether it is assumed because the tokenizer is a file."""
    from holdfast.planning.auto import UNKNOWN_VOCABULARY
    from holdfast.planning.auto import vocabulary_of as known

    vocabulary = known(spec)
    return (UNKNOWN_VOCABULARY, True) if vocabulary is None else (vocabulary, False)


def candidates_of(spec: Spec) -> tuple[int, ...]:
    """The sizes that the trial of `training.micro_batch: auto` measures; empty for a number."""
    from holdfast.planning.auto import micro_batch_candidates

    if not spec.training.auto_micro_batch:
        return ()
    return micro_batch_candidates(spec, vocabulary_of(spec)[0], here=True)


def micro_batch_trial(candidates: Sequence[int]) -> str:
    """The trial in words."""
    return f"training.micro_batch: auto, by a trial of {', '.join(map(str, candidates))} before the first step"


def spot_of(spec: Spec, found: Found) -> Spot | None:
    """The effect of spot nodes on the best layout."""
    from holdfast.planning import spot

    if not found.best:
        return None
    hours = spec.cluster.deadline_hours
    return spot(
        found.best[0], notice=spec.cluster.spot is not None, limit=None if hours is None else hours * HOUR_SECONDS
    )


def _accelerator(spec: Spec, name: str, calibration: Path | None, price: float | None) -> Accelerator:
    from holdfast.planning import accelerator
    from holdfast.planning.auto import accelerator_of
    from holdfast.spec.errors import SpecError

    figures = _prices(spec, price)
    if calibration is None:
        if name:
            return accelerator(name, **figures)
        try:
            return accelerator_of(spec, here=True).model_copy(update=figures)
        except SpecError as error:
            remedy = "; ".join(problem.remedy for problem in error.problems)
            raise UsageError(
                "is needed: the spec names no accelerator", "--accelerator", f"give it, or {remedy}"
            ) from None
    if name:
        raise UsageError("it says which; give one of it and --accelerator", "--calibration")
    from holdfast.planning.calibration import read

    return read(calibration).accelerator().model_copy(update=figures)


def _prices(spec: Spec, hour: float | None) -> dict[str, float]:
    """The prices of the spec, which override those of the table; `hour` overrides both."""
    prices = spec.cluster.prices
    figures = {
        "price": prices.accelerator_hour if hour is None else hour,
        "spot_price": prices.spot_accelerator_hour,
        "spot_interruptions": prices.spot_interruptions,
        "kilowatt_hour": prices.kilowatt_hour,
        "carbon": prices.carbon_per_kilowatt_hour,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _search(spec: Spec, task: Task, count: int) -> Found:
    from holdfast.planning import search
    from holdfast.planning.auto import refused

    return search(task, lambda layout: not refused(spec, task, layout), count)


def _within(budget: float, spec: Spec, accelerator: Accelerator, vocabulary: int, count: int) -> tuple[Task, Found]:
    """The number of accelerators (whole nodes, a power of two of them) whose best layout is fastest within a budget."""
    from holdfast.corpus.starting_model import teacher_of
    from holdfast.planning import estimate_run, search
    from holdfast.planning.auto import task_of
    from holdfast.spec.errors import Problem, SpecError

    if not accelerator.price:
        raise UsageError(f"{accelerator.name} has no price; give --price", "--budget")
    tried, teacher = [], teacher_of(spec)
    gpus = accelerator.node
    while gpus <= MAX_ACCELERATORS:
        task = task_of(spec, accelerator, gpus, vocabulary, teacher)
        try:
            result = search(task, count=1)
        except SpecError:
            break  # the batch cannot be divided any further
        if result.best:
            tried.append((estimate_run(result.best[0]), task))
        gpus *= 2
    affordable = [candidate for candidate in tried if candidate[0].cost <= budget]
    if not affordable:
        cheapest = min((candidate[0].cost for candidate in tried), default=None)
        remedy = (
            "give fewer steps or a smaller model" if cheapest is None else f"the cheapest run costs {cheapest:,.0f}"
        )
        raise SpecError([Problem("budget", budget, "suffices for no number of accelerators", remedy)])
    _, task = min(affordable, key=lambda each: each[0].seconds)
    return task, _search(spec, task, count)
