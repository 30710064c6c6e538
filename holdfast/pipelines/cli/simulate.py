"""`holdfast simulate`: utilization, waiting times and lost work of a cluster under scheduling policies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.options import out

if TYPE_CHECKING:
    from holdfast.simulation import Bounds, ClusterModel, Job, Outcome
    from holdfast.simulation.engines import Configuration

SYNTHETIC = "synthetic:"
EFFECT = ("wait_mean", "wait_p50", "wait_p99", "utilisation", "goodput", "slowdown_mean", "fairness", "evictions")


class EmitEngine(StrEnum):
    """Engines that a policy can be written for."""

    kueue = "kueue"
    volcano = "volcano"


def simulate(
    cluster: Annotated[
        Path,
        typer.Argument(metavar="CLUSTER", help="The cluster: a YAML file such as examples/clusters/mixed-1000.yaml."),
    ],
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="The jobs: a trace (Philly, Helios, Alibaba, or CSV), or synthetic:JOBS[:LOAD]."
        ),
    ] = f"{SYNTHETIC}5000:0.95",
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help="A policy; repeat it for more. None takes all of them.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of synthetic jobs and of failures.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Also write a report with pictures there, as HTML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
    emit: Annotated[
        EmitEngine | None, typer.Option(help="Also write the configuration of an engine for the one policy named.")
    ] = None,
    to: Annotated[Path, typer.Option(help="The folder that --emit writes to.")] = Path("scheduler"),
) -> None:
    """Simulate a cluster under scheduling policies, and compare them with the bound that no policy can beat.

    Example: holdfast simulate examples/clusters/mixed-1000.yaml synthetic:20000:1.1 -p fifo -p easy --report sim.html

    With --emit, it also writes the policy as a configuration of Kueue or Volcano, with the simulated effect against
    fifo. A policy that the engine cannot express is refused.
    """
    from holdfast.pipelines.view.simulation import print_outcomes, progress, write_report
    from holdfast.simulation import POLICIES, bounds, load_cluster
    from holdfast.simulation import simulate as simulated

    if unknown := set(policy or ()) - set(POLICIES):
        policy_names = ", ".join(POLICIES)
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: known are {policy_names}", param_hint="--policy")
    if emit is not None and len(set(policy or ())) != 1:
        raise typer.BadParameter("name the one policy to write: -p NAME", param_hint="--emit")
    model = load_cluster(cluster)
    jobs = _jobs(model, trace, seed)
    engine_config = None
    if emit is not None and policy:
        from holdfast.simulation.engines import configuration

        engine_config = configuration(emit.value, policy[0], model, jobs)  # refused before anything is simulated
        policy = list(dict.fromkeys(("fifo", *policy)))
    bound = bounds(model, jobs)
    outcomes = [
        simulated(model, jobs, POLICIES[name](), seed) for name in progress(policy or list(POLICIES), quiet=as_json)
    ]
    if report is not None:
        write_report(report, model, trace, outcomes, bound)
    if as_json:
        policies = [{name: value for name, value in asdict(outcome).items() if name != "curve"} for outcome in outcomes]
        out(json.dumps({"cluster": model.name, "bounds": asdict(bound), "policies": policies}, indent=2))
    else:
        print_outcomes(model, jobs, outcomes, bound)
    if emit is not None and engine_config is not None:
        _write(to, emit.value, engine_config, trace, outcomes, bound)
        if not as_json:
            out(f"\n{emit.value} differs: {engine_config.differs}\nwritten to {to}")


def _write(
    folder: Path, engine: str, made: Configuration, trace: str, outcomes: Sequence[Outcome], least: Bounds
) -> None:
    """Write the objects, the settings of the engine's controller and the expected effect into a folder."""
    from holdfast.pipelines.documents import write_whole
    from holdfast.simulation.engines import GROUP_LABEL, text_of

    first, last = outcomes[0], outcomes[-1]
    effect = {
        "policy": last.policy,
        "engine": engine,
        "trace": trace,
        "differs": made.differs,
        "expected": {outcome.policy: {name: getattr(outcome, name) for name in EFFECT} for outcome in (last, first)},
        "bound": asdict(least),
    }
    comment = (
        f"{engine} for the policy {last.policy}, by `holdfast simulate --emit {engine}`. It differs: {made.differs}.\n"
        f"Simulated on {trace}, against fifo: mean wait {last.wait_mean:.0f} s ({first.wait_mean:.0f}), p99 "
        f"{last.wait_p99:.0f} s ({first.wait_p99:.0f}), used {last.utilisation:.1%} ({first.utilisation:.1%})."
    )
    label = f"\nNodes carry the label {GROUP_LABEL} with the name of their group." if engine == "kueue" else ""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{engine}.yaml", text_of(made.objects, comment + label))
    if made.settings is not None:
        note = "Goes into controller_manager_config.yaml of the ConfigMap kueue-manager-config; merge it with yours."
        write_whole(folder / "settings.yaml", text_of([made.settings], note))
    write_whole(folder / "effect.json", json.dumps(effect, indent=2) + "\n")


def _jobs(model: ClusterModel, trace: str, seed: int) -> list[Job]:
    from holdfast.simulation import synthetic_jobs
    from holdfast.simulation.traces import load_trace

    if not trace.startswith(SYNTHETIC):
        return load_trace(trace)
    count, _, load = trace.removeprefix(SYNTHETIC).partition(":")
    try:
        jobs, target_load = int(count), float(load or 0.95)
        if not (0 < jobs <= 10_000_000 and 0.001 <= target_load <= 100):
            raise ValueError
    except ValueError:
        message = (
            f"{trace}: write synthetic:JOBS or synthetic:JOBS:LOAD, JOBS from 1 to 10000000, LOAD from 0.001 to 100"
        )
        raise typer.BadParameter(message, param_hint="TRACE") from None
    return synthetic_jobs(jobs, model.gpus, target_load, seed=seed)
