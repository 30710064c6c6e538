"""`holdfast compile`: the pipeline of a spec as manifests for every system that can run it."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from holdfast.pipelines.cli.options import Image, SpecOptions, out
from holdfast.pipelines.cli.sweep import AtOnce, Over

if TYPE_CHECKING:
    from holdfast.spec import Spec


class Target(StrEnum):
    """What a spec can be compiled to."""

    KFP = "kfp"
    ARGO = "argo"
    PYTORCHJOB = "pytorchjob"
    TRAINJOB = "trainjob"
    VOLCANO = "volcano"
    SLURM = "slurm"
    RAYJOB = "rayjob"
    KSERVE = "kserve"
    DEEPSPEED = "deepspeed"
    FORM = "form"


def compile_(
    spec: SpecOptions,
    target: Annotated[
        Target,
        typer.Option(
            help="kfp, argo, slurm and rayjob: the whole pipeline; kserve: the service of its champion; deepspeed: the "
            "configuration of its engine; form: the spec as JSON, to paste into Kubeflow's form; the others: the "
            "training job."
        ),
    ] = Target.KFP,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where to write it; - prints it.", show_default="pipeline.yaml for kfp, else -"
        ),
    ] = None,
    image: Image = "",
    over: Over = None,
    at_once: AtOnce = 0,
) -> None:
    """Write the pipeline of a spec for Kubeflow, or the manifests for another system. Sends nothing.

    The spec and overrides are parameters of the pipeline, which the UI of Kubeflow shows. With --over, it writes the
    pipeline of a sweep.

    Example: holdfast compile examples/quickstart.yaml -o pipeline.yaml
    """
    checked = spec.load()
    if (image or over) and target not in (Target.KFP, Target.ARGO):
        if image:
            raise typer.BadParameter(f"--target {target} takes its image from cluster.image", param_hint="--image")
        raise typer.BadParameter(f"--target {target} has no sweeps; use kfp or argo", param_hint="--over")
    text = _sweep(checked, target, over, at_once, image) if over else _compiled(checked, target, image or None)
    output = output or Path("pipeline.yaml" if target is Target.KFP else "-")
    if str(output) == "-":
        out(text.rstrip("\n"))
        return
    from holdfast.pipelines.documents import write_whole

    write_whole(output, text)
    out(f"{output}: written")


def _sweep(spec: Spec, target: Target, over: list[str], at_once: int, image: str) -> str:
    from holdfast.pipelines.trials import grid

    trials = grid(spec, over)
    if target is Target.KFP:
        from holdfast.pipelines.backends.kubeflow.compile import order_text
        from holdfast.pipelines.backends.request import RunRequest

        return order_text(RunRequest(spec, image=image, trials=trials))
    from holdfast.pipelines.backends.argo.emit import sweep_objects
    from holdfast.pipelines.documents import as_yaml

    return as_yaml(*sweep_objects(spec, trials, at_once=at_once, image=image or None))


def _form(spec: Spec) -> str:
    from holdfast.pipelines.backends.request import RunRequest

    return json.dumps(RunRequest(spec).escaped_parameters()["spec"], indent=2, ensure_ascii=False)


def _kfp(spec: Spec, image: str | None) -> str:
    from holdfast.pipelines.backends.kubeflow.compile import pipeline_text

    return pipeline_text(spec, image)


def _argo(spec: Spec, image: str | None) -> str:
    from holdfast.pipelines.backends.argo import argo_text

    return argo_text(spec, image=image)


def _slurm(spec: Spec) -> str:
    from holdfast.pipelines.backends.slurm.emit import slurm_text

    return slurm_text(spec)


def _rayjob(spec: Spec) -> str:
    from holdfast.pipelines.backends.ray.rayjob import rayjob_text

    return rayjob_text(spec)


def _kserve(spec: Spec) -> str:
    from holdfast.pipelines.documents import as_yaml
    from holdfast.runtime.environment import store_url
    from holdfast.serving import inference_service
    from holdfast.store import layout

    export = layout.export("run-id", spec.training.steps, "state-digest")  # known once it is trained
    return as_yaml(inference_service(spec, f"{store_url(spec).rstrip('/')}/{export}", {}))


def _compiled(spec: Spec, target: Target, image: str | None) -> str:
    if target in (Target.KFP, Target.ARGO):
        return (_kfp if target is Target.KFP else _argo)(spec, image)
    makers = {
        Target.SLURM: _slurm, Target.RAYJOB: _rayjob, Target.KSERVE: _kserve, Target.DEEPSPEED: _deepspeed,
        Target.FORM: _form,
    }  # fmt: skip
    if target in makers:
        return makers[target](spec)
    from holdfast.launch import emitters

    return emitters.render(spec, cast("emitters.Target", target.value))


def _deepspeed(spec: Spec) -> str:
    """What the DeepSpeed engine is given. Raises SpecError for another engine."""
    from holdfast.engines.deepspeed.config import deepspeed_config
    from holdfast.spec.errors import Problem, SpecError

    if spec.parallel.engine != "deepspeed":
        remedy = "use zero1, zero2 or zero3"
        raise SpecError([Problem("parallel.strategy", spec.parallel.strategy, "is not DeepSpeed's", remedy)])
    return json.dumps(deepspeed_config(spec.training, spec.parallel, spec.accumulation), indent=2)
