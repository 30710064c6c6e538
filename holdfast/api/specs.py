"""Specs: their ids and schema, manifests for every system, triggers, and Kubeflow's pipelines and schedules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from holdfast.api.submission import NO_OPTIONS, ClusterOptions, publish_request_code
from holdfast.code.resolve import resolve_code
from holdfast.pipelines.backends import WITH_ENDPOINT
from holdfast.spec import Spec
from holdfast.spec.errors import UsageError

if TYPE_CHECKING:
    from holdfast.components.trigger import Decision
    from holdfast.corpus.overview import Overview
    from holdfast.pipelines.backends.kubeflow.connection import Server
    from holdfast.pipelines.backends.kubeflow.schedule import Entry, Scheduled
    from holdfast.pipelines.backends.kubeflow.submit import Uploaded
    from holdfast.pipelines.backends.local.run import LocalRun


class Target(StrEnum):
    """Systems that a spec can be compiled for."""

    KFP = "kfp"
    ARGO = "argo"
    PYTORCHJOB = "pytorchjob"
    TRAINJOB = "trainjob"
    VOLCANO = "volcano"
    SLURM = "slurm"
    RAYJOB = "rayjob"
    KSERVE = "kserve"
    DEPLOYMENT = "deployment"
    DEEPSPEED = "deepspeed"
    FORM = "form"
    COMPONENT = "component"


WITH_SWEEPS = (Target.KFP, Target.ARGO)  # they also take an image
WITH_IMAGE = (*WITH_SWEEPS, Target.COMPONENT)


def schema() -> dict[str, Any]:
    """The JSON Schema of specs."""
    from holdfast.spec.schema import json_schema

    return json_schema()


def identify(spec: Spec, salt: str = "") -> LocalRun:
    """The dataset id and the run id of a spec, without running it. Reads the sources."""
    from holdfast.pipelines.backends.local.run import identified

    return identified(spec, salt=salt)


def missing_sources(spec: Spec) -> list[str]:
    """A sentence about each source of a spec that names no file on this machine. Lists folders, and reads no file."""
    from holdfast.corpus.sources import missing_sources as missing

    return missing(spec.data)


def describe_data(spec: Spec, *, store: str = "", samples: int = 8) -> Overview:
    """What is in the dataset of a spec, with samples of its first batches. Prepares the dataset if it does not exist,
    and trains nothing."""
    from holdfast.corpus.overview import overview
    from holdfast.pipelines.paths import store_root, with_absolute_paths
    from holdfast.runtime.environment import store_url
    from holdfast.store import open_store

    absolute_spec = with_absolute_paths(resolve_code(spec, Path.cwd()))
    if not absolute_spec.data.sources:
        raise UsageError("reads its own data in its script", "SPEC", "name a spec with data.sources")
    return overview(absolute_spec, open_store(store_root(store) if store else store_url(absolute_spec)), samples)


def target_of(name: str) -> Target:
    """The target `name`. Raises UsageError, which lists the targets."""
    try:
        return Target(name)
    except ValueError:
        raise UsageError(f"{name!r} is no target", "--target", f"use one of {', '.join(Target)}") from None


def compile_spec(
    spec: Spec,
    target: Target | str = Target.KFP,
    *,
    image: str = "",
    over: Sequence[str] = (),
    concurrent_trials: int = 0,
) -> str:
    """The manifests of a spec for a system, or with `over` those of a sweep, as YAML or JSON. Sends nothing,
    except your own code to the store of the spec."""
    from holdfast.pipelines.backends.request import RunRequest

    system = target_of(target)
    if image and system not in WITH_IMAGE:
        raise UsageError(f"the target {system} takes its image from cluster.image", "--image", "leave it out")
    if over and system not in WITH_SWEEPS:
        raise UsageError(f"the target {system} has no sweeps", "--over", f"use one of {', '.join(WITH_SWEEPS)}")
    if concurrent_trials and not (over and system is Target.ARGO):
        raise UsageError("is used only with --over and --target argo", "--concurrent-trials", "leave it out")
    spec = resolve_code(spec, Path.cwd())
    if spec.code is not None:
        publish_request_code(RunRequest(spec), WITH_ENDPOINT)
    if over:
        return _sweep(spec, system, over, concurrent_trials, image)
    if system in _WRITERS:
        return _WRITERS[system](spec, image or None)
    from holdfast.launch import emitters

    return emitters.render(spec, cast("emitters.Target", system.value))


def trigger(spec: Spec, *, store: str = "", salt: str = "") -> Decision:
    """Decide whether a retraining of a spec is due, and why. Trains nothing."""
    from holdfast.components.trigger import run
    from holdfast.pipelines.paths import store_root, with_absolute_paths
    from holdfast.runtime.environment import store_url
    from holdfast.store import open_store

    absolute_spec = with_absolute_paths(spec)
    return run(absolute_spec, open_store(store_root(store) if store else store_url(absolute_spec)), salt)


def connect(options: ClusterOptions = NO_OPTIONS, *, dry_run: bool = False) -> Server:
    """The KFP server of this environment, or of `options`. With `dry_run` it collects requests and sends none."""
    from holdfast.pipelines.backends.kubeflow.connection import Access, Server

    return Server(Access.from_environment(options.endpoint, options.namespace), dry=dry_run)


def upload(spec: Spec, server: Server, image: str = "") -> Uploaded:
    """Upload the pipeline of a spec. New content becomes a new version; the same content is never uploaded twice."""
    from holdfast.pipelines.backends.kubeflow.submit import upload as uploaded

    return uploaded(server, spec, image or None)


def schedule(
    spec: Spec, server: Server, *, store: str = "", options: ClusterOptions = NO_OPTIONS, timezone: str = "UTC"
) -> Scheduled:
    """Run a spec periodically, as its section `schedule` sets. Replaces the schedule if the spec has changed."""
    from holdfast.pipelines.backends.kubeflow import schedule as schedules
    from holdfast.pipelines.backends.request import RunRequest, identify_request

    schedules.trigger_of(spec, timezone)  # refuses a schedule that KFP cannot have, before anything else
    run_request = identify_request(
        RunRequest(resolve_code(spec, Path.cwd()), store, service_account=options.service_account, image=options.image)
    )
    publish_request_code(run_request, WITH_ENDPOINT)
    return schedules.schedule(server, run_request, controller_timezone=timezone)


def schedules(server: Server) -> list[Entry]:
    """All schedules of a server."""
    from holdfast.pipelines.backends.kubeflow.schedule import entries

    return entries(server)


def pause_schedule(spec: Spec, server: Server) -> list[str]:
    """Start no run until `schedule` is called again. Returns the ids of the paused schedules."""
    from holdfast.pipelines.backends.kubeflow.schedule import pause

    return pause(server, spec.name)


def delete_schedule(spec: Spec, server: Server) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Remove the schedule of a spec. Returns the removed ids, and those kept until their active runs have ended."""
    from holdfast.pipelines.backends.kubeflow.schedule import delete

    return delete(server, spec.name)


def _sweep(spec: Spec, target: Target, over: Sequence[str], concurrent_trials: int, image: str) -> str:
    from holdfast.pipelines.trials import grid

    trials = grid(spec, over)
    if target is Target.KFP:
        from holdfast.pipelines.backends.kubeflow.compile import order_text
        from holdfast.pipelines.backends.request import RunRequest

        return order_text(RunRequest(spec, image=image, trials=trials))
    from holdfast.pipelines.backends.argo.emit import sweep_objects
    from holdfast.pipelines.documents import as_yaml

    return as_yaml(*sweep_objects(spec, trials, concurrent_trials=concurrent_trials, image=image or None))


def _kfp(spec: Spec, image: str | None) -> str:
    from holdfast.pipelines.backends.kubeflow.compile import pipeline_text

    return pipeline_text(spec, image)


def _argo(spec: Spec, image: str | None) -> str:
    from holdfast.pipelines.backends.argo import argo_text

    return argo_text(spec, image=image)


def _slurm(spec: Spec, _image: str | None) -> str:
    from holdfast.pipelines.backends.slurm.emit import slurm_text

    return slurm_text(spec)


def _rayjob(spec: Spec, _image: str | None) -> str:
    from holdfast.pipelines.backends.ray.rayjob import rayjob_text

    return rayjob_text(spec)


def _kserve(spec: Spec, _image: str | None) -> str:
    from holdfast.pipelines.documents import as_yaml
    from holdfast.runtime.environment import store_url
    from holdfast.serving import inference_service
    from holdfast.store import layout

    export = layout.export("run-id", spec.training.steps, "state-digest")  # known once it is trained
    return as_yaml(inference_service(spec, f"{store_url(spec).rstrip('/')}/{export}", {}))


def _deployment(spec: Spec, image: str | None) -> str:
    from holdfast.pipelines.documents import as_yaml
    from holdfast.runtime.environment import store_url
    from holdfast.serving import deployment
    from holdfast.store import layout

    if image is not None:
        spec = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"image": image})})
    export = layout.export("run-id", spec.training.steps, "state-digest")  # known once it is trained
    return as_yaml(*deployment(spec, store_url(spec).rstrip("/"), export, "export-digest", {}))


def _form(spec: Spec, _image: str | None) -> str:
    from holdfast.pipelines.backends.request import RunRequest

    return json.dumps(RunRequest(spec).escaped_parameters()["spec"], indent=2, ensure_ascii=False)


def _component(spec: Spec, image: str | None) -> str:
    from holdfast.pipelines.backends.kubeflow.compile import component_text

    return component_text(spec, image)


def _deepspeed(spec: Spec, _image: str | None) -> str:
    """The configuration of the DeepSpeed engine. Raises SpecError for another engine."""
    from holdfast.engines.deepspeed.config import deepspeed_config
    from holdfast.spec.errors import Problem, SpecError

    if spec.parallel.engine != "deepspeed":
        remedy = "use zero1, zero2 or zero3"
        raise SpecError([Problem("parallel.strategy", spec.parallel.strategy, "is not DeepSpeed's", remedy)])
    return json.dumps(deepspeed_config(spec.training, spec.parallel, spec.accumulation), indent=2)


_WRITERS = {
    Target.KFP: _kfp,
    Target.ARGO: _argo,
    Target.SLURM: _slurm,
    Target.RAYJOB: _rayjob,
    Target.KSERVE: _kserve,
    Target.DEPLOYMENT: _deployment,
    Target.DEEPSPEED: _deepspeed,
    Target.FORM: _form,
    Target.COMPONENT: _component,
}
