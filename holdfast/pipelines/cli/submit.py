"""The commands that start a run, here or on a cluster, and go on with it."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

import typer

from holdfast.pipelines.backends import SHARED_FOLDERS, SHARED_VOLUMES, SWEEPING, open_backend
from holdfast.pipelines.cli.options import (
    AsJson,
    DryRun,
    Endpoint,
    Fresh,
    Image,
    Namespace,
    Overrides,
    Replan,
    Salt,
    ServiceAccount,
    SpecFile,
    StoreRoot,
    err,
    one_of_fresh_and_salt,
    open_chosen,
    out,
    print_json,
    print_yaml,
)
from holdfast.pipelines.cli.run_lookup import DEFAULT, BackendName, Run, open_recorded
from holdfast.spec.errors import ExitCode, MissingError

if TYPE_CHECKING:
    from holdfast.pipelines.backends.interface import Backend, RunStatus
    from holdfast.pipelines.backends.request import RunRequest
    from holdfast.pipelines.trials import Trials
    from holdfast.spec import Spec


def run(
    spec: SpecFile, overrides: Overrides = None, store: StoreRoot = "", fresh: Fresh = False, salt: Salt = "",
    replan: Replan = False,
) -> None:  # fmt: skip
    """Run a spec on this machine, from raw text to a registered model.

    The same command again goes on where it was, or answers at once when the work is done.

    Example: holdfast run examples/quickstart.yaml --set training.steps=50
    """
    from holdfast.pipelines.backends.local.run import run_locally

    if fresh and salt:
        raise typer.BadParameter("--fresh draws a new salt; give one of --fresh and --salt")
    again = shlex.join(["holdfast", *_without_salt(sys.argv[1:])])
    code = run_locally(spec, overrides or (), store=store, fresh=fresh, salt=salt, replan=replan, again=again)
    raise typer.Exit(int(code))


def submit(
    spec: SpecFile, overrides: Overrides = None, backend: BackendName = "", store: StoreRoot = "", image: Image = "",
    service_account: ServiceAccount = "", fresh: Fresh = False, salt: Salt = "", replan: Replan = False,
    endpoint: Endpoint = "", namespace: Namespace = "", dry_run: DryRun = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Run a spec on a cluster, and print where to watch it. The same again gives the run that is there.

    Without --backend: Kubeflow.

    Example: holdfast submit examples/cluster-cpu.yaml --backend argo
    """
    from holdfast.spec.load import load_spec

    submit_order(
        load_spec(spec, overrides or ()), backend or DEFAULT, store=store, salt=one_of_fresh_and_salt(fresh, salt),
        image=image, service_account=service_account, replan=replan, endpoint=endpoint, namespace=namespace,
        dry_run=dry_run, as_json=as_json,
    )  # fmt: skip


def submit_order(
    checked: Spec, name: str, *, store: str, salt: str, image: str, service_account: str, replan: bool, endpoint: str,
    namespace: str, dry_run: bool, as_json: bool, trials: Trials = (), at_once: int = 0,
) -> None:  # fmt: skip
    """Submit a spec, or a sweep over it, to the backend `name`, and say so; or print what would be sent."""
    from holdfast.pipelines.backends.request import RunRequest, build_request

    if name == "local":
        wanted = RunRequest(checked, store, salt, replan=replan, trials=trials)
    else:
        wanted = build_request(
            checked, store=store, salt=salt, service_account=service_account, image=image, replan=replan,
            shared_folders=name in SHARED_FOLDERS, shared_volumes=name in SHARED_VOLUMES, trials=trials,
            at_once=at_once,
        )  # fmt: skip
        if not wanted.run_id:
            err(
                "note: the run id is known when preprocess has ended, and `holdfast status` shows it then; only a run "
                f"that has not ended counts as the same ({wanted.unread})"
            )
    if trials and name not in SWEEPING:
        raise typer.BadParameter(f"{name} runs no sweeps; use one of {', '.join(SWEEPING)}", param_hint="--backend")
    target = _for_json(open_backend(name, store=store, endpoint=endpoint, namespace=namespace), as_json)
    if dry_run:
        objects = _print_objects(target, wanted)
        if objects and name in ("kubeflow", "argo"):
            _say_validated(objects, wanted, namespace)
        return
    made, created = _kept(target.submit(wanted), wanted, endpoint, namespace)
    _say_submitted(made, created, wanted, as_json)
    raise typer.Exit(made.exit_code or int(ExitCode.OK))


def resume(
    run: Run, backend: BackendName = "", store: StoreRoot = "", replan: Replan = False, endpoint: Endpoint = "",
    namespace: Namespace = "", as_json: AsJson = False,
) -> None:  # fmt: skip
    """Go on with a run that has stopped, from its newest checkpoint, where it was submitted or on another backend.

    Example: holdfast resume 3f2a
    """
    from dataclasses import replace

    from holdfast.pipelines.backends.record import find_record

    opened = open_chosen(store)
    record = find_record(opened, run)
    if record is None:
        raise MissingError(
            f"{run!r}: {opened.url} does not say how it was submitted; submit its spec again, which goes on with it"
        )
    asked = record if replan else record.accepted(opened)
    if asked is not record:
        err("note: the last submission was refused for its plan; going on with the one before (--replan: the last)")
    wanted = replace(asked.request, replan=replan)  # what was allowed once is not allowed for ever
    target = _for_json(open_recorded(backend or record.backend, store, endpoint, namespace, record), as_json)
    made, created = _kept(target.resume(wanted), wanted, endpoint or record.endpoint, namespace or record.namespace)
    _say_submitted(made, created, wanted, as_json)
    raise typer.Exit(made.exit_code or int(ExitCode.OK))


def _for_json(target: Backend, as_json: bool) -> Backend:
    """The backend, which shows how a run of this machine goes where it disturbs no JSON."""
    from holdfast.pipelines.backends.local.backend import Local

    if as_json and isinstance(target, Local):
        from holdfast.pipelines.view.console import SafeConsole

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
        return  # the terminal has said everything
    out(f"{made.name}: {'submitted' if created else f'is there already, {made.state}'}")
    from holdfast.runtime.environment import store_url

    # The record of where it runs is in its store; another shell finds that one only if it is told.
    store = wanted.store or wanted.spec.store
    elsewhere = f" --store {store}" if store and store != store_url() else ""
    out(f"  {made.link}\n  holdfast status {made.id}{elsewhere}")
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
    """Hold what would be sent, and what steps would make later, against the cluster."""
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
    """The command line without --fresh and --salt, which the advice on how to go on adds itself."""
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
