"""`holdfast plan`: layouts of a spec that fit, with their speed, and the duration and cost of the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.api import planning
from holdfast.api.planning import MAX_ACCELERATORS, spot_of
from holdfast.pipelines.cli.options import AsJson, SpecOptions, err, print_json

if TYPE_CHECKING:
    from holdfast.planning import Candidate, Found, Spot, Task
    from holdfast.spec import Spec

SHOWN = 5  # layouts


@dataclass(frozen=True)
class HardwareOptions:
    """The accelerators to plan for."""

    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_ACCELERATORS, help="Number of accelerators. Default: that of the spec."),
    ] = None
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
    ] = ""
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Plan for the machine that `holdfast calibrate` measured.", show_default=False
        ),
    ] = None
    price: Annotated[
        float | None,
        typer.Option(
            min=0, help="Price of an accelerator-hour. Default: cluster.prices of the spec.", show_default=False
        ),
    ] = None


@dataclass(frozen=True)
class SearchOptions:
    """What to search for, and what to do with the result."""

    budget: Annotated[
        float | None,
        typer.Option(min=0, help="Choose the number of accelerators: that of the fastest run that costs no more."),
    ] = None
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Tokens of a tokenizer's file. Default: 128,256.")] = (
        None
    )
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=100, help="Number of layouts to show.")] = SHOWN
    timeline: Annotated[bool, typer.Option("--timeline", help="Draw the pipeline schedule of the best layout.")] = False
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure the layers and the head of the spec's pipeline here, and balance its stages."
        ),
    ] = False
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the best layout that the engines support into the spec's file.")
    ] = False
    any_: Annotated[
        bool, typer.Option("--any", help="With --apply: the best layout, even if no engine supports it yet.")
    ] = False


def plan(spec: SpecOptions, hardware: HardwareOptions, search: SearchOptions, as_json: AsJson = False) -> None:
    """Show the best layouts of a spec on some accelerators, before anything is paid for.

    It counts memory term by term, communication by the alpha-beta model, and the pipeline by its schedule. It prints
    for each layout what limits it; for the first one also the reasons, what the whole run takes, and how often to save.
    docs/planner.md compares the predictions with measurements.

    Example: holdfast plan examples/cluster-h100.yaml --gpus 64 --accelerator H100
    """
    from holdfast.pipelines.view.planning import print_plan
    from holdfast.planning.auto import fields_of, refused

    checked_spec = spec.load()
    if search.measure:
        _measure(checked_spec, spec.path, hardware, search, as_json)
        return
    target = planning.Hardware(hardware.accelerator, hardware.calibration, hardware.price, hardware.gpus)
    result = planning.plan(
        checked_spec, target, layouts=search.count, budget=search.budget, vocabulary=search.vocabulary
    )
    task, layouts = result.task, result.found
    if result.vocabulary_assumed and not as_json:
        _note_vocabulary(result.vocabulary)
    selected = layouts.best[0] if search.any_ and layouts.best else layouts.today
    if as_json:
        print_json(_as_json(checked_spec, task, layouts))
    else:
        reasons = refused(checked_spec, task, layouts.best[0].layout) if layouts.best else []
        print_plan(checked_spec.name, task, layouts, reasons, spot_of(checked_spec, layouts), timeline=search.timeline)
        if candidates := planning.candidates_of(checked_spec):
            err(f"{planning.micro_batch_trial(candidates)}; --apply writes a number instead")
        if spares := checked_spec.cluster.spares:
            processes, price = checked_spec.parallel.processes, result.accelerator.price
            hourly = f", {spares * processes * price:g} an hour" if price else ""
            err(
                f"cluster.spares: {spares} nodes of {processes} stand by, in none of these figures; they cost "
                f"too{hourly}"
            )
    if not search.apply:
        return
    if selected is None:
        from holdfast.spec.errors import Problem, SpecError

        message = "no layout fits" if not layouts.best else "no layout that fits is run by the engines today"
        remedy = "use more accelerators" if not layouts.best else "add --any to write the best one all the same"
        raise SpecError([Problem("parallel", None, message, remedy)], str(spec.path))
    _write(spec.path, fields_of(task, selected.layout), check=not search.any_, quiet=as_json)


def _measure(spec: Spec, path: Path, hardware: HardwareOptions, search: SearchOptions, as_json: bool) -> None:
    """Measure the stages of the spec's pipeline, print them, and write them if requested."""
    options = {
        "--gpus": hardware.gpus,
        "--accelerator": hardware.accelerator or None,
        "--budget": search.budget,
        "--any": search.any_ or None,
        "--count": None if search.count == SHOWN else search.count,
    }
    if unused := [name for name, value in options.items() if value is not None]:
        raise typer.BadParameter(f"it searches no layouts; leave out {', '.join(unused)}", param_hint="--measure")
    stages = _measured(spec, search.vocabulary, timeline=search.timeline, as_json=as_json)
    if search.apply:
        parallel = spec.parallel
        layout = {"parallel.pipeline": parallel.pipeline, "parallel.schedule": parallel.schedule}
        _write(path, {**layout, "parallel.stages": stages}, check=True, quiet=as_json)


def _write(spec: Path, fields: dict[str, Any], *, check: bool, quiet: bool) -> None:
    from holdfast.pipelines.documents import write_fields

    changes = write_fields(spec, fields, check=check)
    if not quiet:
        err(f"{spec}: {', '.join(changes) or 'nothing to change'}")


def _note_vocabulary(tokens: int) -> None:
    err(f"the tokenizer is a file: {tokens:,} tokens are assumed; set the number with --vocabulary")


def _measured(spec: Spec, vocabulary: int | None, *, timeline: bool, as_json: bool) -> list[int]:
    """Measure the stages and print the costs. Returns the proposed number of layers of each stage."""
    from holdfast.pipelines.measure import stage_costs
    from holdfast.pipelines.view.planning import print_stages

    parallel = spec.parallel
    tokens, assumed = planning.vocabulary_of(spec) if vocabulary is None else (vocabulary, False)
    if assumed and not as_json:
        _note_vocabulary(tokens)
    costs = stage_costs(spec, tokens)
    count = parallel.pipeline * (2 if parallel.schedule == "interleaved" else 1)
    stages = costs.balanced(spec.model.layers, count)
    if as_json:
        print_json({**costs.model_dump(), "stages": stages, "seconds": costs.of_stages(stages)})
    else:
        print_stages(spec, costs, stages, timeline=timeline)
    return stages


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
        "spot": None if (mixes := spot_of(spec, found)) is None else _mixes(mixes),
        "least_memory": {"layout": asdict(found.smallest.layout), "bytes": found.smallest.memory.total},
    }


def _mixes(found: Spot) -> dict[str, Any]:
    """The spot mixes for JSON, with null for infinite values, which JSON lacks."""
    fields = asdict(found)
    fields["shown"] = [
        {name: None if isinf(value) else value for name, value in row.items()} for row in fields["shown"]
    ]
    return fields


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
