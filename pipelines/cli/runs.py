"""The commands about runs, wherever they run: start one, watch it, end it, go on with it.

Which backend a run is on stands beside it in the store; `--backend` says it where that is not known.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.components.spec.errors import MissingError, StoreUnreachableError
from holdfast.pipelines.backends import VARIABLE, open_backend
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

if TYPE_CHECKING:
    from holdfast.pipelines.backends.interface import Backend, RunStatus
    from holdfast.pipelines.backends.order import Order
    from holdfast.pipelines.backends.record import Record

BackendName = Annotated[
    str,
    typer.Option(
        "--backend", "-b", metavar="NAME", envvar=VARIABLE, help="local, kubeflow or argo.", show_default=False
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Holdfast's id of the run, its beginning, the backend's id, or a name.", show_default=False
    ),
]  # fmt: skip
DEFAULT = "kubeflow"  # what a spec is submitted to where nothing says otherwise


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

    Example: holdfast submit examples/cluster-cpu.yaml --backend argo
    """
    from holdfast.components.spec.load import load_spec
    from holdfast.pipelines.backends.order import Order, order

    chosen = one_of_fresh_and_salt(fresh, salt)
    checked, name = load_spec(spec, overrides or ()), backend or DEFAULT
    if name == "local":
        wanted = Order(checked, store, chosen, replan=replan)
    else:
        wanted = order(checked, store=store, salt=chosen, service_account=service_account, image=image, replan=replan)
        if not wanted.run_id:
            err(
                "note: the sources cannot be read from here, so only a run that has not ended counts as the same "
                f"({wanted.unread})"
            )
    target = open_backend(name, store=store, endpoint=endpoint, namespace=namespace)
    if dry_run:
        _print_objects(target, wanted)
        return
    made, created = _kept(target.submit(wanted), wanted, endpoint, namespace)
    _say_submitted(made, created, wanted, as_json)
    raise typer.Exit(made.exit_code)


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
    wanted = replace(record.order, replan=replan)  # what was allowed once is not allowed for ever
    target = _open(backend or record.backend, store, endpoint, namespace, record)
    made, created = _kept(target.resume(wanted), wanted, endpoint or record.endpoint, namespace or record.namespace)
    _say_submitted(made, created, wanted, as_json)
    raise typer.Exit(made.exit_code)


def status(
    run: Run, backend: BackendName = "", store: StoreRoot = "", endpoint: Endpoint = "", namespace: Namespace = "",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show what became of a run, step by step.

    Example: holdfast status 3f2a
    """
    from holdfast.pipelines.view.terminal import duration

    target, there = _find(run, backend, store, endpoint, namespace)
    found = target.status(there)
    if as_json:
        print_json(found)
        return
    out(f"{found.name}: {found.state}")
    for step in found.steps:
        took = "" if step.seconds is None else duration(step.seconds)
        out(f"  {step.name:<10}  {step.state:<9}  {took:>12}{'  ' + step.error if step.error else ''}")
    for line in filter(None, (found.message, found.link)):
        out(f"  {line}")


def logs(
    run: Run,
    step: Annotated[str, typer.Option(help="Only this step: preprocess, train, evaluate, register or notify.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    backend: BackendName = "",
    store: StoreRoot = "",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
) -> None:
    """Print what the steps of a run wrote.

    Example: holdfast logs 3f2a --step train --follow
    """
    from holdfast.components.steps import STEPS

    if step and step not in STEPS:
        raise typer.BadParameter(f"{step!r} is no step; use one of {', '.join(STEPS)}", param_hint="--step")
    target, there = _find(run, backend, store, endpoint, namespace)
    for name, line in target.logs(there, step, follow=follow):
        out(line if step or target.name == "local" else f"[{name}] {line}")


def cancel(
    run: Run, backend: BackendName = "", store: StoreRoot = "", endpoint: Endpoint = "", namespace: Namespace = "",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """End a run. Its training saves a checkpoint first, and `holdfast resume` goes on from there.

    Example: holdfast cancel 3f2a
    """
    target, there = _find(run, backend, store, endpoint, namespace)
    found, ended = target.cancel(there)
    if as_json:
        print_json({"run": found, "ended": ended})
        return
    out(f"{found.name}: {'is being ended' if ended else f'has ended already, {found.state}'}")


def list_(
    backend: BackendName = "", store: StoreRoot = "", endpoint: Endpoint = "", namespace: Namespace = "",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """List the runs that a backend knows, newest first: Kubeflow where one is known here, else this machine. `holdfast
    runs` lists those in the store.

    Example: holdfast list --backend argo
    """
    name = backend or (DEFAULT if endpoint or os.environ.get("KFP_ENDPOINT") else "local")
    found = open_backend(name, store=store, endpoint=endpoint, namespace=namespace).list()
    if as_json:
        print_json(found)
        return
    for one in found:
        out(f"{one.state:<10}  {one.name}  {one.link}")
    if not found:
        out(f"no runs on {name}; start one with `holdfast submit SPEC --backend {name}`")


def runs(store: StoreRoot = "", as_json: AsJson = False) -> None:
    """List the runs in the store, newest first.

    Example: holdfast runs --store s3://bucket/prefix
    """
    from holdfast.pipelines.view.catalog import all_runs
    from holdfast.pipelines.view.report import print_runs

    opened = open_chosen(store)
    if as_json:
        print_json([record.as_json() for record in all_runs(opened)])
        return
    print_runs(all_runs(opened), opened.url)


def show(
    wanted: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, its beginning, or a name.", show_default=False)
    ],
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Show one run: its state, figures, verdict, spec, and where everything is.

    Example: holdfast show 3f2a
    """
    from holdfast.pipelines.view.catalog import find_run
    from holdfast.pipelines.view.report import print_run

    opened = open_chosen(store)
    record = find_run(opened, wanted)
    if as_json:
        print_json({**record.as_json(), "spec": record.spec, "verdict": record.verdict, "result": record.result})
        return
    print_run(record, opened)


def _find(run: str, backend: str, store: str, endpoint: str, namespace: str) -> tuple[Backend, str]:
    """The backend that a run is on, and what the run is called there: as its record says, unless the command does."""
    from holdfast.pipelines.backends.record import find_record

    record = None
    if not endpoint:
        try:
            record = find_record(open_chosen(store), run)
        except StoreUnreachableError as error:
            if not backend:
                raise
            err(f"note: the run's own record cannot be read ({error})")  # the backend knows it too
    if record is not None and backend in ("", record.backend):
        return _open(record.backend, store, endpoint, namespace, record), record.id
    if backend or endpoint or os.environ.get("KFP_ENDPOINT"):
        return open_backend(backend or DEFAULT, store=store, endpoint=endpoint, namespace=namespace), run
    raise MissingError(
        f"{run!r}: the store {open_chosen(store).url} does not say where it runs; give --store with the one that it "
        f"was submitted with, or --backend ({VARIABLE}), or --endpoint or KFP_ENDPOINT for Kubeflow"
    )


def _open(name: str, store: str, endpoint: str, namespace: str, record: Record) -> Backend:
    same = name == record.backend  # another backend's places are not in the record
    return open_backend(
        name, store=store, endpoint=endpoint or (record.endpoint if same else ""),
        namespace=namespace or (record.namespace if same else ""),
    )  # fmt: skip


def _kept(made: tuple[RunStatus, bool], wanted: Order, endpoint: str, namespace: str) -> tuple[RunStatus, bool]:
    """A submission, after keeping its record."""
    from holdfast.pipelines.backends.record import keep_submission

    where = wanted.store or wanted.spec.store or os.environ.get("HOLDFAST_STORE", "")
    if unkept := keep_submission(made[0], wanted, endpoint, namespace, where):
        err(f"note: where it runs is not kept in {where}, so name it with --backend ({unkept})")
    return made


def _say_submitted(made: RunStatus, created: bool, wanted: Order, as_json: bool) -> None:
    if as_json:
        print_json({"run": made, "created": created, "run_id": wanted.run_id, "salt": wanted.salt})
        return
    if made.backend == "local":
        return  # the terminal has said everything
    out(f"{made.name}: {'submitted' if created else f'is there already, {made.state}'}")
    out(f"  {made.link}\n  holdfast status {made.id}")
    if wanted.salt:
        out(f"  to submit the same again: --salt {wanted.salt}")


def _print_objects(target: Backend, wanted: Order) -> None:
    objects = target.objects(wanted)
    if objects:
        print_yaml(objects)
    else:
        out("# nothing would be changed")


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
