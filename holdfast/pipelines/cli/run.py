"""The commands that start and resume a run or a sweep, on any backend."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

import typer

from holdfast.pipelines.backends import SHARED_FOLDERS, SHARED_VOLUMES, SWEEPING, open_backend
from holdfast.pipelines.cli.options import (
    AsJson,
    BackendOptions,
    DryRun,
    Fresh,
    Replan,
    RunName,
    RunOptions,
    SpecOptions,
    err,
    open_chosen,
    out,
    print_json,
    print_yaml,
)
from holdfast.pipelines.cli.run_lookup import open_recorded
from holdfast.spec.errors import ExitCode, MissingError

if TYPE_CHECKING:
    from holdfast.pipelines.backends.interface import Backend, RunStatus
    from holdfast.pipelines.backends.request import RunRequest
    from holdfast.pipelines.trials import Trials
    from holdfast.spec import Spec

DEFAULT = "local"


def run(
    spec: SpecOptions, where: BackendOptions, options: RunOptions, fresh: Fresh = False, dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Run a spec: on this machine, or with --backend on a cluster. It ends with a registered model.

    The same command resumes the run, or shows the result if the run has finished. On this machine it shows the progress
    until the end. On a cluster it submits the run, and prints its link and the command that shows its state.

    Example: holdfast run examples/quickstart.yaml --set training.steps=50
    """
    from dataclasses import replace
    from secrets import token_hex

    if fresh and options.salt:
        raise typer.BadParameter("--fresh draws a new salt; give one of --fresh and --salt")
    if fresh:
        options = replace(options, salt=token_hex(4))
    name = where.backend or DEFAULT
    if name == "local" and not dry_run and not as_json:
        from holdfast.pipelines.backends.local.run import run_locally

        _require_options_of_this_machine(where, options)
        again = shlex.join(["holdfast", *_without_salt(sys.argv[1:])])
        code = run_locally(
            spec.path, spec.overrides or (), store=where.store, salt=options.salt, replan=options.replan, again=again
        )
        raise typer.Exit(int(code))
    submit(spec.load(), where, options, dry_run=dry_run, as_json=as_json)


def submit(
    checked: Spec, where: BackendOptions, options: RunOptions, *, dry_run: bool, as_json: bool, trials: Trials = (),
    at_once: int = 0,
) -> None:  # fmt: skip
    """Submit a spec, or a sweep over it, and print where it runs; or print what would be sent."""
    from holdfast.pipelines.backends.request import RunRequest, identify_request

    name = where.backend or DEFAULT
    if name == "local":
        _require_options_of_this_machine(where, options)
    wanted = RunRequest(
        checked, where.store, options.salt, service_account=options.service_account, image=options.image,
        replan=options.replan, trials=trials, at_once=at_once,
    )  # fmt: skip
    if name != "local":
        wanted = identify_request(wanted, shared_folders=name in SHARED_FOLDERS, shared_volumes=name in SHARED_VOLUMES)
        if not wanted.run_id:
            err(
                "note: the run id is known when preprocess has ended, and `holdfast show` prints it then; only a run "
                f"that has not ended counts as the same ({wanted.unread})"
            )
    if trials and name not in SWEEPING:
        raise typer.BadParameter(f"{name} runs no sweeps; use one of {', '.join(SWEEPING)}", param_hint="--backend")
    backend = open_backend(name, store=where.store, endpoint=where.endpoint, namespace=where.namespace)
    target = _for_json(backend, as_json)
    if dry_run:
        objects = _print_objects(target, wanted)
        if objects and name in ("kubeflow", "argo"):
            _say_validated(objects, wanted, where.namespace)
        return
    made, created = _kept(target.submit(wanted), wanted, where.endpoint, where.namespace)
    _say_submitted(made, created, wanted, as_json)
    raise typer.Exit(made.exit_code or int(ExitCode.OK))


def resume(run: RunName, where: BackendOptions, replan: Replan = False, as_json: AsJson = False) -> None:
    """Resume a run or a sweep that has stopped, from its newest checkpoint.

    It resumes where it was submitted, or on the backend that you name. A run that has not ended continues unchanged.

    Example: holdfast resume 3f2a
    """
    from dataclasses import replace

    from holdfast.pipelines.backends.record import find_record

    opened = open_chosen(where.store)
    record = find_record(opened, run)
    if record is None:
        raise MissingError(
            f"{run!r}: {opened.url} does not say how it was submitted; run its spec again, which resumes it"
        )
    last = record if replan else record.accepted(opened)
    if last is not record:
        err("note: the last submission was refused for its plan; resuming the one before it (--replan: the last one)")
    wanted = replace(last.request, replan=replan)  # a permission counts once
    target = _for_json(open_recorded(where, record), as_json)
    made, created = _kept(
        target.resume(wanted), wanted, where.endpoint or record.endpoint, where.namespace or record.namespace
    )
    _say_submitted(made, created, wanted, as_json)
    raise typer.Exit(made.exit_code or int(ExitCode.OK))


def _require_options_of_this_machine(where: BackendOptions, options: RunOptions) -> None:
    """Refuse options that only a cluster has. Raises BadParameter."""
    given = {
        "--image": options.image, "--service-account": options.service_account, "--endpoint": where.endpoint,
        "--namespace": where.namespace,
    }  # fmt: skip
    if unused := [name for name, value in given.items() if value]:
        raise typer.BadParameter(
            f"this machine has no use for it; add --backend with a cluster, such as --backend kubeflow, or leave out "
            f"{', '.join(unused)}",
            param_hint=unused[0],
        )


def _for_json(target: Backend, as_json: bool) -> Backend:
    """The backend. With --json, a run of this machine shows its progress on standard error."""
    from holdfast.pipelines.backends.local.backend import Local

    if as_json and isinstance(target, Local):
        from holdfast.pipelines.view.terminal import SafeConsole

        target.console = SafeConsole(stderr=True)
    return target


def _kept(made: tuple[RunStatus, bool], wanted: RunRequest, endpoint: str, namespace: str) -> tuple[RunStatus, bool]:
    """A submission, after keeping its record."""
    from holdfast.pipelines.backends.record import keep_submission
    from holdfast.runtime.environment import store_url

    where = wanted.store or wanted.spec.store or os.environ.get("HOLDFAST_STORE", "")
    if not where and made[0].backend in SHARED_FOLDERS:  # its jobs use the default one
        where = store_url()
    if unkept := keep_submission(made[0], wanted, endpoint, namespace, where):
        err(f"note: where it runs is not kept in {where}, so name it with --backend ({unkept})")
    return made


def _say_submitted(made: RunStatus, created: bool, wanted: RunRequest, as_json: bool) -> None:
    if as_json:
        known = wanted.run_id or (made.id if made.backend == "local" else "")
        print_json({"run": made, "created": created, "run_id": known, "salt": wanted.salt})
        return
    if made.backend == "local":
        return  # the terminal has shown everything
    out(f"{made.name}: {'submitted' if created else f'exists already, {made.state}'}")
    from holdfast.runtime.environment import store_url

    # The record of where it runs is in its store, which another shell does not know.
    store = wanted.store or wanted.spec.store
    elsewhere = f" --store {store}" if store and store != store_url() else ""
    out(f"  {made.link}\n  holdfast show {made.id}{elsewhere}")
    if wanted.salt:
        out(f"  to submit the same again: --salt {wanted.salt}")


def _print_objects(target: Backend, wanted: RunRequest) -> list[dict[str, Any]]:
    objects = target.objects(wanted)
    if objects:
        print_yaml(objects)
    else:
        out("# nothing would be changed")
    return objects


def _say_validated(objects: list[dict[str, Any]], wanted: RunRequest, namespace: str) -> None:
    """Check what would be sent, and what steps would create later, against the cluster."""
    from holdfast.launch.emitters import objects_for, training_job
    from holdfast.pipelines.backends.validate import validate
    from holdfast.serving import inference_service

    spec = wanted.spec
    store = wanted.store or spec.store or "s3://bucket/prefix"
    later = objects_for(training_job(spec, wanted.run_id or "run-id", 1, store))
    if spec.serving.kserve is not None:
        later.append(inference_service(spec, f"{store.rstrip('/')}/export", {}))
    found = validate([*objects, *later], namespace or spec.cluster.namespace)
    err(f"checked by {found.by}: objects: {found.checked}, problems: {len(found.problems)}")
    if found.unseen:
        err(f"not checked: {', '.join(dict.fromkeys(found.unseen))}")
    for problem in found.problems:
        err(problem)
    if found.problems:
        raise typer.Exit(int(ExitCode.BAD_SPEC))


def _without_salt(arguments: list[str]) -> list[str]:
    """The command line without --fresh and --salt, which the advice on how to resume adds itself."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument == "--fresh" or argument.startswith("--salt="):
            skip = False
        elif argument == "--salt":
            skip = True
        else:
            kept.append(argument)
    return kept
