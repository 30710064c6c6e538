"""`holdfast plan`: which layout of a spec fits, how fast it is, how long the run takes and what it costs."""

from __future__ import annotations

from dataclasses import asdict
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.pipelines.cli.options import AsJson, Overrides, SpecFile, err, print_json

if TYPE_CHECKING:
    from holdfast.planning import Accelerator, Candidate, Found, Spot, Task
    from holdfast.spec import Spec

HOUR_SECONDS = 3600.0
MOST = 2**15  # accelerators that --budget looks at
SHOWN = 5  # layouts


def plan(
    spec: SpecFile,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Accelerators in all. Default: those of the spec.")
    ] = None,
    accelerator: Annotated[
        str,
        typer.Option(
            "--accelerator",
            "-a",
            metavar="NAME",
            show_default=False,
            help="A100, H100, H200, B200, MI300X, … or a YAML file that describes one. Default: the product that "
            "cluster.node_selector names.",
        ),
    ] = "",
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plan for the machine that `holdfast calibrate` measured, with what it measured.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0, help="Choose the number of accelerators: the fastest run that costs no more.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            min=0, help="Price of an accelerator's hour. Default: cluster.prices of the spec.", show_default=False
        ),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a tokenizer's file. Default: 128,256.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=100, help="How many layouts to show.")] = SHOWN,
    timeline: Annotated[bool, typer.Option("--timeline", help="Draw the pipeline schedule of the best one.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure layers and head of the spec's pipeline here, and balance its stages."),
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the best layout that the engines run today into the spec's file.")
    ] = False,
    any_: Annotated[
        bool, typer.Option("--any", help="With --apply: the best one, though no engine runs it yet.")
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say what fits before anything is paid for: the best layouts of a spec on some accelerators.

    Memory is counted term by term, communication by the alpha-beta model, the pipeline by its schedule. Each layout
    comes with what limits it; the first one with why it is as it is, what the whole run takes, and how often to save
    it. What the figures were checked against, and how far off they are: docs/planner.md.

    Example: holdfast plan examples/cluster-h100.yaml --gpus 64 --accelerator H100
    """
    from holdfast.pipelines.view.planning import print_plan
    from holdfast.planning.auto import fields_of, refused, task_of
    from holdfast.spec.load import load_spec

    checked = load_spec(spec, overrides or [])
    if measure:
        given = {"--gpus": gpus, "--accelerator": accelerator or None, "--budget": budget, "--any": any_ or None}
        given["--count"] = None if count == SHOWN else count
        if unused := [name for name, value in given.items() if value is not None]:
            raise typer.BadParameter(f"it searches no layouts; leave out {', '.join(unused)}", param_hint="--measure")
        stages = _measured(checked, vocabulary, timeline=timeline, as_json=as_json)
        if apply:
            parallel = checked.parallel
            layout = {"parallel.pipeline": parallel.pipeline, "parallel.schedule": parallel.schedule}
            _write(spec, {**layout, "parallel.stages": stages}, check=True, quiet=as_json)
        return
    here = _accelerator(checked, accelerator, calibration, price)
    if vocabulary is None:
        vocabulary = _vocabulary(checked, quiet=as_json)
    if budget is None:
        task = task_of(checked, here, gpus or checked.world_size, vocabulary)
        found = _search(checked, task, count)
    else:
        if gpus is not None:
            raise typer.BadParameter("it chooses the number; give one of --budget and --gpus", param_hint="--budget")
        task, found = _within(budget, checked, here, vocabulary, count)
    chosen = found.best[0] if any_ and found.best else found.today
    if as_json:
        print_json(_as_json(checked, task, found))
    else:
        why = refused(checked, task, found.best[0].layout) if found.best else []
        print_plan(checked.name, task, found, why, _spot(checked, found), timeline=timeline)
        if spares := checked.cluster.spares:
            each = checked.parallel.processes
            hourly = f", {spares * each * here.price:g} an hour" if here.price else ""
            err(f"cluster.spares: {spares} nodes of {each} stand by, in none of these figures; they cost too{hourly}")
    if not apply:
        return
    if chosen is None:
        from holdfast.spec.errors import Problem, SpecError

        what = "no layout fits" if not found.best else "no layout that fits is run by the engines today"
        remedy = "use more accelerators" if not found.best else "add --any to write the best one all the same"
        raise SpecError([Problem("parallel", None, what, remedy)], str(spec))
    _write(spec, fields_of(task, chosen.layout), check=not any_, quiet=as_json)


def _write(spec: Path, fields: dict[str, Any], *, check: bool, quiet: bool) -> None:
    from holdfast.pipelines.documents import write_fields

    written = write_fields(spec, fields, check=check)
    if not quiet:
        err(f"{spec}: {', '.join(written) or 'nothing to change'}")


def _measured(spec: Spec, vocabulary: int | None, *, timeline: bool, as_json: bool) -> list[int]:
    """Measure, say, and give the layers of each stage that are proposed."""
    from holdfast.pipelines.measure import stage_costs
    from holdfast.pipelines.view.planning import print_stages

    parallel = spec.parallel
    costs = stage_costs(spec, vocabulary or _vocabulary(spec, quiet=as_json))
    count = parallel.pipeline * (2 if parallel.schedule == "interleaved" else 1)
    stages = costs.balanced(spec.model.layers, count)
    if as_json:
        print_json({**costs.model_dump(), "stages": stages, "seconds": costs.of_stages(stages)})
    else:
        print_stages(spec, costs, stages, timeline=timeline)
    return stages


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
            raise typer.BadParameter(str(error), param_hint="--accelerator") from None
    if name:
        raise typer.BadParameter("it says which; give one of it and --accelerator", param_hint="--calibration")
    from holdfast.planning.calibration import read

    return read(calibration).accelerator().model_copy(update=figures)


def _prices(spec: Spec, hour: float | None) -> dict[str, float]:
    """Those of the spec, which come before the table's; `hour` before both."""
    told = spec.cluster.prices
    known = {
        "price": told.accelerator_hour if hour is None else hour,
        "spot_price": told.spot_accelerator_hour,
        "spot_interruptions": told.spot_interruptions,
        "kilowatt_hour": told.kilowatt_hour,
        "carbon": told.carbon_per_kilowatt_hour,
    }
    return {name: value for name, value in known.items() if value is not None}


def _vocabulary(spec: Spec, quiet: bool) -> int:
    from holdfast.planning.auto import UNKNOWN_VOCABULARY, vocabulary_of

    if (known := vocabulary_of(spec)) is not None:
        return known
    if not quiet:
        err(f"the tokenizer is a file: {UNKNOWN_VOCABULARY:,} tokens are assumed; --vocabulary says how many there are")
    return UNKNOWN_VOCABULARY


def _search(spec: Spec, task: Task, count: int) -> Found:
    from holdfast.planning import search
    from holdfast.planning.auto import refused

    return search(task, lambda layout: not refused(spec, task, layout), count)


def _within(budget: float, spec: Spec, accelerator: Accelerator, vocabulary: int, count: int) -> tuple[Task, Found]:
    """The number of accelerators (whole nodes, a power of two of them) whose best layout is done first for so much."""
    from holdfast.planning import estimate_run, search
    from holdfast.planning.auto import task_of
    from holdfast.spec.errors import Problem, SpecError

    if not accelerator.price:
        raise typer.BadParameter(f"{accelerator.name} has no price; give --price", param_hint="--budget")
    tried = []
    gpus = accelerator.node
    while gpus <= MOST:
        task = task_of(spec, accelerator, gpus, vocabulary)
        try:
            found = search(task, count=1)
        except SpecError:
            break  # the batch cannot be divided any further
        if found.best:
            tried.append((estimate_run(found.best[0]), task))
        gpus *= 2
    fitting = [each for each in tried if each[0].cost <= budget]
    if not fitting:
        least = min((each[0].cost for each in tried), default=None)
        remedy = "give fewer steps or a smaller model" if least is None else f"the cheapest run costs {least:,.0f}"
        raise SpecError([Problem("budget", budget, "suffices for no number of accelerators", remedy)])
    _, task = min(fitting, key=lambda each: each[0].seconds)
    return task, _search(spec, task, count)


def _as_json(spec: Spec, task: Task, found: Found) -> dict[str, Any]:
    return {
        "name": spec.name,
        "accelerator": task.accelerator.name,
        "gpus": task.gpus,
        "parameters": task.shape.parameters,
        "active_parameters": task.shape.active_parameters,
        "tried": found.tried,
        "fitting": found.fitting,
        "layouts": [_of(candidate) for candidate in found.best],
        "today": None if found.today is None else _of(found.today),
        "spot": None if (mixes := _spot(spec, found)) is None else _mixes(mixes),
        "least_memory": {"layout": asdict(found.smallest.layout), "bytes": found.smallest.memory.total},
    }


def _spot(spec: Spec, found: Found) -> Spot | None:
    """What spot nodes mean for the best layout."""
    from holdfast.planning import spot

    if not found.best:
        return None
    hours = spec.cluster.deadline_hours
    return spot(
        found.best[0], notice=spec.cluster.spot is not None, limit=None if hours is None else hours * HOUR_SECONDS
    )


def _mixes(found: Spot) -> dict[str, Any]:
    """With null for what is infinite, which JSON has no word for."""
    told = asdict(found)
    told["shown"] = [{name: None if isinf(value) else value for name, value in one.items()} for one in told["shown"]]
    return told


def _of(candidate: Candidate) -> dict[str, Any]:
    from holdfast.planning import estimate_run, reasons
    from holdfast.planning.auto import fields_of

    memory, speed = candidate.memory, candidate.speed
    return {
        "layout": asdict(candidate.layout),
        "fields": fields_of(candidate.task, candidate.layout),
        "memory": {"bytes": memory.total, "moment": memory.moment, "terms": dict(memory.terms)},
        "step": {"seconds": speed.seconds, "terms": dict(speed.terms), "mfu": speed.mfu, "hfu": speed.hfu},
        "tokens_per_second": speed.tokens_per_second,
        "limit": candidate.limit,
        "reasons": reasons(candidate),
        "run": asdict(estimate_run(candidate)),
    }
