"""The commands that look at runs, wherever they are, and end them.

Which backend a run is on stands beside it in the store; `--backend` says it where that is not known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.backends import open_backend
from holdfast.pipelines.cli.options import AsJson, Endpoint, Namespace, StoreRoot, err, open_chosen, out, print_json
from holdfast.pipelines.cli.run_lookup import DEFAULT, BackendName, Run, find_backend

if TYPE_CHECKING:
    from holdfast.pipelines.backends.interface import Backend, RunStatus
    from holdfast.pipelines.backends.progress import Reached
    from holdfast.pipelines.backends.record import Record
    from holdfast.pipelines.view.catalog import RunRecord
    from holdfast.store import Store

RUNS_SHOWN = 100  # runs in the table, where no number is given


def status(
    run: Run, backend: BackendName = "", store: StoreRoot = "", endpoint: Endpoint = "", namespace: Namespace = "",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show what became of a run, step by step, and how far its training is.

    Example: holdfast status 3f2a
    """
    from holdfast.pipelines.view.terminal import duration

    target, there = find_backend(run, backend, store, endpoint, namespace)
    found = target.status(there)
    # An endpoint alone says no store.
    reached, code, run_id = _told(run, store) if store or not endpoint else (None, None, "")
    if found.exit_code is None and not found.unfinished:
        found = replace(found, exit_code=code)
    if as_json:
        print_json({**asdict(found), "run_id": run_id, "progress": reached and asdict(reached)})
        return
    out(f"{found.name}: {found.state}")
    if run_id and run_id not in found.name:
        out(f"  run {run_id}")
    for step in found.steps:
        took = "" if step.seconds is None else duration(step.seconds)
        out(f"  {step.name:<10}  {step.state:<9}  {took:>12}{'  ' + step.error if step.error else ''}")
    if reached is not None and found.unfinished:
        out(f"  {reached.text}")
    for line in filter(None, (found.message, found.link)):
        out(f"  {line}")


def _told(run: str, store: str) -> tuple[Reached | None, int | None, str]:
    """How far the training is, the exit code that its exit handler told, and the run id once it is known, where the
    store knows the run by that name. A store that is away hides nothing else."""
    from holdfast.pipelines.backends.progress import reached
    from holdfast.pipelines.backends.record import find_record
    from holdfast.spec.errors import HoldfastError

    try:
        opened = open_chosen(store)
        record = find_record(opened, run)
        if record is None or not record.run_id:
            return None, None, ""
        run_id = record.identity if record.identified or record.ran else ""
        return reached(opened, record.identity), record.ending(opened).get("exit_code"), run_id
    except HoldfastError as error:
        err(f"note: how far the training is cannot be read ({error})")
        return None, None, ""


def logs(
    run: Run,
    step: Annotated[
        str, typer.Argument(metavar="[STEP]", help="Only this step, such as train.", show_default=False)
    ] = "",
    step_option: Annotated[str, typer.Option("--step", help="The same as STEP.", show_default=False)] = "",
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank of the training; see docs/logs.md.")] = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="With --rank: in this attempt. Default: its newest.")
    ] = None,
    launch: Annotated[int | None, typer.Option(min=1, help="With --rank: in this launch.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run has ended.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Everything that the engine has of the steps' pods, its own lines too.")
    ] = False,
    backend: BackendName = "",
    store: StoreRoot = "",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
) -> None:
    """Print what the steps of a run wrote, or one rank of its training, live or after its death.

    Example: holdfast logs 3f2a train --follow
    """
    from holdfast.pipelines.backends.interface import step_called
    from holdfast.pipelines.backends.step_logs import step_lines
    from holdfast.steps import STEPS

    if step and step_option and step != step_option:
        raise typer.BadParameter(f"says {step_option!r}, and STEP {step!r}; write one of them", param_hint="--step")
    step = step or step_option
    if rank is not None or attempt is not None or launch is not None:
        if step not in ("", "train"):
            raise typer.BadParameter("only the step train has ranks", param_hint="--step")
        _print_rank(
            run,
            rank or 0,
            attempt,
            launch,
            store,
            follow,
            lambda: find_backend(run, backend, store, endpoint, namespace),
        )
        return
    if step and step_called(step) not in STEPS:
        raise typer.BadParameter(f"{step!r} is no step; use one of {', '.join(STEPS)}", param_hint="STEP")
    if raw:
        target, there = find_backend(run, backend, store, endpoint, namespace)
        lines = target.logs(there, step, follow=follow)
    else:
        found = cache(lambda: find_backend(run, backend, store, endpoint, namespace))
        lines = step_lines(*_kept(run, store), found, step, follow=follow)
    for name, line in lines:
        out(line if step else f"[{name}] {line}")


def _kept(run: str, store: str) -> tuple[Store | None, Record | None]:
    """The store, and the record of a run there. A store that is away hides nothing of what the engine has."""
    from holdfast.pipelines.backends.record import find_record
    from holdfast.spec.errors import StoreUnreachableError

    try:
        opened = open_chosen(store)
        return opened, find_record(opened, run)
    except StoreUnreachableError as error:
        err(f"note: the logs in the store cannot be read ({error})")
        return None, None


def _print_rank(
    run: str, rank: int, attempt: int | None, launch: int | None, store: str, follow: bool,
    find: Callable[[], tuple[Backend, str]],
) -> None:  # fmt: skip
    from holdfast.pipelines.backends.rank_logs import goes_on, rank_lines
    from holdfast.pipelines.view.catalog import find_run

    opened = open_chosen(store)
    found = find_run(opened, run).run_id
    running = (lambda: goes_on(*find())) if follow else None
    for line in rank_lines(opened, found, rank, attempt=attempt, launch=launch, running=running):
        out(line)


def cancel(
    run: Run, backend: BackendName = "", store: StoreRoot = "", endpoint: Endpoint = "", namespace: Namespace = "",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """End a run. Its training saves a checkpoint first, and `holdfast resume` goes on from there. Of one that has ended
    already, a training job that nobody follows any more is ended.

    Example: holdfast cancel 3f2a
    """
    target, there = find_backend(run, backend, store, endpoint, namespace)
    found, ended = target.cancel(there)
    jobs = [] if ended else _end_leftovers(run, store, found)
    if as_json:
        print_json({"run": found, "ended": ended, "jobs": jobs})
        return
    going = ended or found.unfinished  # one that was cancelled a moment ago has not ended yet
    out(f"{found.name}: {'is being ended' if going else f'has ended already, {found.state}'}")
    for job in jobs:
        out(f"job {job}: is being ended, no launcher followed it any more")


def list_(
    backend: BackendName = "", store: StoreRoot = "", endpoint: Endpoint = "", namespace: Namespace = "",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """List the runs that a backend knows, newest first; `holdfast runs` lists those in the store.

    Without --backend: Kubeflow's where one is known here, else those of this machine.

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


def runs(
    limit: Annotated[
        int | None,
        typer.Option(min=0, help=f"How many; 0 lists all. Default: {RUNS_SHOWN}, with --json all.", show_default=False),
    ] = None,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """List the runs in the store, newest first: those that were started or submitted last.

    Example: holdfast runs --store s3://bucket/prefix
    """
    from holdfast.pipelines.view.catalog import some_runs
    from holdfast.pipelines.view.report import print_runs

    opened = open_chosen(store)
    most = (0 if as_json else RUNS_SHOWN) if limit is None else limit
    found, left = some_runs(opened, most or None)
    if as_json:
        print_json([record.as_json() for record in found])
    else:
        print_runs(found, opened.url)
    _tell_unreadable(found)
    if left:
        err(f"note: {left} older runs are not shown; --limit 0 lists all")


def _tell_unreadable(records: Sequence[RunRecord]) -> None:
    """One line about each record that cannot be read."""
    for said in [said for record in records for said in record.unreadable]:
        err(f"note: {said}")


def show(
    wanted: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, its beginning, or a name.", show_default=False)
    ],
    spec: Annotated[bool, typer.Option("--spec", help="All of its spec, the defaults too.")] = False,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Show one run: its state, figures, verdict, what its spec says, and where everything is.

    Example: holdfast show 3f2a
    """
    from holdfast.pipelines.view.catalog import find_run
    from holdfast.pipelines.view.report import accounts, print_run
    from holdfast.telemetry.audit_records import read_audits

    opened = open_chosen(store)
    record = find_run(opened, wanted)
    _tell_unreadable([record])
    if as_json:
        told = {"spec": record.spec, "verdict": record.verdict, "result": record.result}
        audits = read_audits(opened, record.run_id)
        print_json({**record.as_json(), **told, "audits": audits, **accounts(record, opened)})
        return
    print_run(record, opened, spec)


def _end_leftovers(run: str, store: str, status: RunStatus) -> list[str]:
    from holdfast.pipelines.backends.cleanup import CLUSTERS, clean_up_cluster
    from holdfast.pipelines.backends.record import find_record
    from holdfast.spec.errors import HoldfastError

    try:
        record = find_record(open_chosen(store), run) if status.backend in CLUSTERS else None
        return clean_up_cluster(record, status) if record is not None and record.id == status.id else []
    except HoldfastError as error:
        err(f"note: whether its training left a job on the cluster is not known ({error})")
        return []
