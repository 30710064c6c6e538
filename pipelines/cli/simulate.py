"""`holdfast simulate`: which scheduling policy fills a cluster, how long its jobs wait, and what they lose."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.options import out

if TYPE_CHECKING:
    from holdfast.components.simulation import ClusterModel, Job

SYNTHETIC = "synthetic:"


def simulate(
    cluster: Annotated[
        Path, typer.Argument(help="The cluster: a YAML file such as examples/clusters/mixed-1000.yaml.")
    ],
    trace: Annotated[
        str, typer.Argument(help="The jobs: a trace (Philly, Helios, Alibaba, or CSV), or synthetic:JOBS[:LOAD].")
    ] = f"{SYNTHETIC}5000:0.95",
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help="A policy; repeat it for more. None takes all of them.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of synthetic jobs and of failures.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Also write a report with pictures there, as HTML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Simulate a cluster under scheduling policies, side by side and beside what no policy can beat.

    Example: holdfast simulate examples/clusters/mixed-1000.yaml synthetic:20000:1.1 -p fifo -p easy --report sim.html
    """
    from holdfast.components.simulation import POLICIES, bounds, load_cluster
    from holdfast.components.simulation import simulate as simulated
    from holdfast.pipelines.view.simulation import print_outcomes, progress, write_report

    if unknown := set(policy or ()) - set(POLICIES):
        known = ", ".join(POLICIES)
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: known are {known}", param_hint="--policy")
    model = load_cluster(cluster)
    jobs = _jobs(model, trace, seed)
    least = bounds(model, jobs)
    outcomes = [
        simulated(model, jobs, POLICIES[name](), seed) for name in progress(policy or list(POLICIES), quiet=as_json)
    ]
    if report is not None:
        write_report(report, model, trace, outcomes, least)
    if as_json:
        shown = [{name: value for name, value in asdict(each).items() if name != "curve"} for each in outcomes]
        out(json.dumps({"cluster": model.name, "bounds": asdict(least), "policies": shown}, indent=2))
    else:
        print_outcomes(model, jobs, outcomes, least)


def _jobs(model: ClusterModel, trace: str, seed: int) -> list[Job]:
    from holdfast.components.simulation import synthetic_jobs
    from holdfast.components.simulation.traces import load_trace

    if not trace.startswith(SYNTHETIC):
        return load_trace(trace)
    count, _, load = trace.removeprefix(SYNTHETIC).partition(":")
    try:
        jobs, asked = int(count), float(load or 0.95)
        if not (0 < jobs <= 10_000_000 and 0 < asked <= 100):
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"{trace}: write synthetic:JOBS or synthetic:JOBS:LOAD", param_hint="TRACE") from None
    return synthetic_jobs(jobs, model.gpus, asked, seed=seed)
