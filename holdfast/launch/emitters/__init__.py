"""Emitters: the same job as an object of every scheduler that can run it. Pure functions that send nothing."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import yaml

from holdfast.launch.emitters import pytorchjob, trainjob, volcano
from holdfast.launch.emitters.pod import LAUNCH_LABEL, RUN_LABEL, Owner, has_key, key_name, key_secret
from holdfast.launch.interface import Job
from holdfast.launch.node.spot_notice import CLOUD
from holdfast.launch.processes import PRELOAD_VARIABLE
from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.functions import code_arguments, rank_functions
from holdfast.spec.tree import Spec

__all__ = [
    "LAUNCH_LABEL",
    "RUN_LABEL",
    "Owner",
    "Target",
    "has_key",
    "key_secret",
    "objects_for",
    "render",
    "training_job",
]

Target = Literal["pytorchjob", "trainjob", "volcano"]

_KINDS: Mapping[str, Callable[[Job, Owner | None], list[dict[str, Any]]]] = {
    "pytorchjob": lambda job, owner: [pytorchjob.emit(job, owner)],
    "trainjob": lambda job, owner: [trainjob.emit_runtime(job, owner), trainjob.emit(job, owner)],
    "volcano": lambda job, owner: [volcano.emit(job, owner)],
}


class _PlainDumper(yaml.SafeDumper):
    """Writes no anchors, so that repeated values are readable."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


def training_job(
    spec: Spec,
    run_id: str,
    launch: int,
    store: str,
    excluded_nodes: frozenset[str] = frozenset(),
    leaving_nodes: frozenset[str] = frozenset(),
) -> Job:
    """The job that trains a run, as its launcher starts it for a launch that is recorded in the store."""
    module, own = "holdfast.rank.worker", code_arguments(spec.code, rank_functions(spec))
    environment: dict[str, str] = {CLOUD: spec.cluster.spot} if spec.cluster.spot else {}
    if spec.train.script is not None:
        # What runs is on the command line, so write access to the store changes neither the code nor its arguments.
        module, own = "holdfast.script.process", script_arguments(spec)
        environment |= script_environment(spec)
    worker = ["-m", module, "--run-id", run_id, "--launch", str(launch), "--store", store, *own]
    return Job(
        name=f"holdfast-{run_id}-{launch}",
        run_id=run_id,
        launch=launch,
        command=worker,
        processes=spec.parallel.processes,
        threads=spec.parallel.threads,
        grace_seconds=spec.checkpoint.grace_seconds,
        cluster=spec.cluster,
        metrics_port=spec.telemetry.metrics_port,
        environment=environment,
        excluded_nodes=excluded_nodes,
        leaving_nodes=leaving_nodes,
    )


def script_arguments(spec: Spec) -> list[str]:
    """The arguments of a rank that name its script: the code, the file, the inputs, and the script's own."""
    own = ["--code", str(spec.code), "--entry", str(spec.train.script), *spec.train.input_arguments]
    return [*own, "--", *spec.train.arguments]


def script_environment(spec: Spec) -> dict[str, str]:
    """The environment variables of the ranks of a script."""
    preload = {PRELOAD_VARIABLE: " ".join(spec.train.preload)} if spec.train.preload else {}
    return {"PYTHONHASHSEED": "0", **preload}


def objects_for(job: Job, owner: Owner | None = None) -> list[dict[str, Any]]:
    """The Kubernetes objects of a job in the order of their creation; the last one is the job itself."""
    return _KINDS[job.cluster.job](job, owner)


def render(spec: Spec, target: Target, run_id: str = "run-id", launch: int = 1, store: str | None = None) -> str:
    """The training job of a spec for `target`, as YAML documents.

    To run the text, its launch must be recorded in the store; the defaults only show its form. Raises SpecError if the
    spec has no store, or needs what the target cannot do.
    """
    root = store or spec.store or os.environ.get("HOLDFAST_STORE")
    if not root:
        remedy = "name it: --set store=s3://bucket/prefix, or HOLDFAST_STORE"
        raise SpecError([Problem("store", None, "is needed by a job on a cluster", remedy)])
    _check(spec, target)
    job = training_job(spec, run_id, launch, root)
    if target == "volcano":  # no launcher follows it
        objects = [volcano.emit(job, restarts=spec.cluster.restarts.budget)]
    else:
        objects = _KINDS[target](job, None)
    text = yaml.dump_all(objects, Dumper=_PlainDumper, sort_keys=False, width=120)
    return f"{_NEEDS_KEY.format(name=key_name(job))}{text}" if has_key(job) else text


# The Secret itself is not emitted: many people may be able to read the text.
_NEEDS_KEY = """# The nodes know each other by a key, which no launcher makes here. Make it first:
#   kubectl create secret generic {name} --from-literal=key="$(openssl rand -hex 32)"
"""


def _check(spec: Spec, target: str) -> None:
    """Refuse what the target cannot do, also if `cluster.job` names another one. Raises SpecError."""
    from holdfast.spec import rules
    from holdfast.spec.rules.operations import check_collector_address

    if target not in get_args(Target):
        raise SpecError([Problem("--target", target, "is not known", f"use one of {', '.join(get_args(Target))}")])
    changed = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"job": target})})
    if problems := [*rules.problems(changed), *check_collector_address(spec)]:
        raise SpecError(problems, f"target {target}")
