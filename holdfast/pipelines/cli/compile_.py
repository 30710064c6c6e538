"""`holdfast compile`: the pipeline of a spec as manifests for every system that can run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.api.specs import Target, compile_spec, target_of
from holdfast.pipelines.cli.options import Image, SpecOptions, out
from holdfast.pipelines.cli.sweep import ConcurrentTrials, Over


def compile_(
    spec: SpecOptions,
    target: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            autocompletion=lambda: [one.value for one in Target],
            help="kfp, argo, slurm and rayjob: the whole pipeline; kserve and deployment: what serves its champion; "
            "deepspeed: the configuration of its engine; form: the spec as JSON, to paste into Kubeflow's form; "
            "component: the train step for another Kubeflow pipeline; "
            "pytorchjob, trainjob and volcano: the training job.",
        ),
    ] = "kfp",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where to write it; - prints it.", show_default="pipeline.yaml for kfp, else -"
        ),
    ] = None,
    image: Image = "",
    over: Over = None,
    concurrent_trials: ConcurrentTrials = 0,
) -> None:
    """Write the pipeline of a spec for Kubeflow, or the manifests for another system. Sends nothing.

    The spec and overrides are parameters of the pipeline, which the UI of Kubeflow shows. With --over, it writes the
    pipeline of a sweep.

    Example: holdfast compile examples/quickstart.yaml -o pipeline.yaml
    """
    system = target_of(target)
    text = compile_spec(spec.load(), system, image=image, over=over or (), concurrent_trials=concurrent_trials)
    output = output or Path("pipeline.yaml" if system is Target.KFP else "-")
    if str(output) == "-":
        out(text.rstrip("\n"))
        return
    from holdfast.pipelines.documents import write_whole

    write_whole(output, text)
    out(f"{output}: written")
