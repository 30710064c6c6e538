"""The commands about a spec: is it right, what is it called, what becomes of it."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from holdfast.pipelines.cli.options import AsJson, Image, Overrides, Salt, SpecFile, out, print_json

if TYPE_CHECKING:
    from holdfast.spec import Spec


def validate(spec: SpecFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a spec and say everything that is wrong with it.

    Example: holdfast validate examples/quickstart.yaml --set training.steps=50
    """
    from holdfast.spec.load import load_spec

    checked = load_spec(spec, overrides or ())
    if as_json:
        print_json({"name": checked.name, "steps": checked.training.steps, "processes": checked.world_size})
        return
    processes = "one process" if checked.world_size == 1 else f"{checked.world_size} processes"
    out(f"{spec}: fine ({checked.name}, {checked.training.steps} steps, {processes})")


def schema() -> None:
    """Print the JSON Schema of the spec, for editors that complete and check it.

    Example: holdfast schema > spec.schema.json, then in the first line of a spec:
    # yaml-language-server: $schema=spec.schema.json
    """
    from holdfast.spec.schema import json_schema

    out(json.dumps(json_schema(), indent=2, ensure_ascii=False))


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
    spec: SpecFile,
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
    overrides: Overrides = None,
) -> None:
    """Write the pipeline of a spec for Kubeflow, or what another system takes.

    The spec and overrides are parameters of the pipeline, which the UI of Kubeflow shows.

    Example: holdfast compile examples/quickstart.yaml -o pipeline.yaml
    """
    from holdfast.spec.load import load_spec

    checked = load_spec(spec, overrides or ())
    if image and target not in (Target.KFP, Target.ARGO):
        raise typer.BadParameter(f"--target {target} takes its image from cluster.image", param_hint="--image")
    text = _compiled(checked, target, image or None)
    output = output or Path("pipeline.yaml" if target is Target.KFP else "-")
    if str(output) == "-":
        out(text.rstrip("\n"))
        return
    from holdfast.pipelines.documents import write_whole

    write_whole(output, text)
    out(f"{output}: written")


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


def identity(spec: SpecFile, overrides: Overrides = None, salt: Salt = "", as_json: AsJson = False) -> None:
    """Print the dataset id and the run id of a spec, without running anything.

    Example: holdfast id examples/quickstart.yaml
    """
    from holdfast.pipelines.backends.local.run import identified
    from holdfast.spec.load import load_spec

    made = identified(load_spec(spec, overrides or ()), salt=salt)
    if as_json:
        print_json({"dataset_id": made.dataset_id, "run_id": made.run_id})
        return
    out(f"dataset {made.dataset_id}\nrun     {made.run_id}")


def _deepspeed(spec: Spec) -> str:
    """What the DeepSpeed engine is given. Raises SpecError for another engine."""
    from holdfast.engines.deepspeed.config import deepspeed_config
    from holdfast.spec.errors import Problem, SpecError

    if spec.parallel.engine != "deepspeed":
        remedy = "use zero1, zero2 or zero3"
        raise SpecError([Problem("parallel.strategy", spec.parallel.strategy, "is not DeepSpeed's", remedy)])
    return json.dumps(deepspeed_config(spec.training, spec.parallel, spec.accumulation), indent=2)
