"""The commands that list runs, print their logs and stop them, on any backend.

The record of a run in the store names its backend. `--backend` names it where there is no record.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast import api
from holdfast.pipelines.backends import BACKENDS, VARIABLE, WITH_ENDPOINT
from holdfast.pipelines.cli.options import (
    AsJson,
    BackendOptions,
    Endpoint,
    Namespace,
    RunName,
    StoreRoot,
    err,
    open_chosen,
    out,
    print_json,
    with_options,
)

if TYPE_CHECKING:
    from holdfast.pipelines.backends.record import Record
    from holdfast.pipelines.view.run_record import RunRecord
    from holdfast.store import Store

app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
RUNS_SHOWN = 100  # runs in the table, where no number is given
Where = Annotated[
    str,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Only runs that meet it, such as 'loss < 3 and tag == x'.",
        show_default=False,
    ),
]
Sort = Annotated[str, typer.Option("--sort", metavar="[-]FIELD", help="Sort by a field; -FIELD: the highest first.")]
StepName = Annotated[str, typer.Argument(metavar="[STEP]", help="One step, such as train.", show_default=False)]


@dataclass(frozen=True)
class RankOptions:
    """One process of a training."""

    rank: Annotated[int | None, typer.Option(min=0, help="One rank of the training; see docs/logs.md.")] = None
    attempt: Annotated[int | None, typer.Option(min=1, help="With --rank: in this attempt. Default: its newest.")] = (
        None
    )
    launch: Annotated[int | None, typer.Option(min=1, help="With --rank: in this launch.")] = None

    @property
    def chosen(self) -> bool:
        """Whether any of them is given."""
        return (self.rank, self.attempt, self.launch) != (None, None, None)


@dataclass(frozen=True)
class RunSelection:
    """Which runs are listed, and in which order."""

    limit: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Number of runs; 0 lists all. Default: {RUNS_SHOWN}, with --json all.", show_default=False
        ),
    ] = None
    where: Where = ""
    sort: Sort = ""


@app.callback()
@with_options
def runs(
    context: typer.Context,
    selection: RunSelection,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            "-b",
            metavar="NAME",
            help=f"List what this backend knows, instead of the store: {', '.join(BACKENDS)}.",
            show_default=False,
        ),
    ] = "",
    store: StoreRoot = "",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    as_json: AsJson = False,
) -> None:
    """List the runs in the store, newest first.

    With --backend, list the runs that a backend knows, from any store. Fields of --where and --sort: see
    docs/monitoring.md.

    Example: holdfast runs --where "loss < 3 and tag == baseline" --sort loss
    """
    if context.invoked_subcommand is not None:
        return
    limit, where, sort = selection.limit, selection.where, selection.sort
    if endpoint or namespace:
        backend = backend or os.environ.get(VARIABLE, "") or (WITH_ENDPOINT if endpoint else "")
    if backend or namespace:
        if where or sort:
            raise typer.BadParameter("is not possible with --backend", param_hint="--where" if where else "--sort")
        _list_backend(BackendOptions(backend, store, endpoint, namespace), limit, as_json)
        return
    from holdfast.pipelines.view.catalog import all_runs, some_runs
    from holdfast.pipelines.view.report import print_runs
    from holdfast.pipelines.view.run_filter import select_runs

    opened_store = open_chosen(store)
    count = (0 if as_json else RUNS_SHOWN) if limit is None else limit
    excluded = ""
    if where or sort:
        stored = all_runs(opened_store)
        found = select_runs(stored, where, sort)
        excluded = where if stored else ""
        records = found[: count or None]
        hidden_count = len(found) - len(records)
    else:
        records, hidden_count = some_runs(opened_store, count or None)
    if as_json:
        print_json([record.as_json() for record in records])
    else:
        print_runs(records, opened_store.url, excluded)
    note_unreadable(records)
    if hidden_count:
        err(f"note: {hidden_count} more runs are not shown; --limit 0 lists all")


@app.command()
def tag(
    run: RunName,
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="[TAG]...", help="Tags to add.", show_default=False)
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="TAG", help="Remove a tag. Repeat it for more tags.")
    ] = None,
    note: Annotated[
        str | None, typer.Option("--note", help="Replace the note; an empty text removes it.", show_default=False)
    ] = None,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Add and remove tags of a run, and write its note. Without a change, print them.

    They are in the store, for everyone who reads it, and are no part of the run's identity.

    Example: holdfast runs tag 3f2a baseline --note "the first with the new tokenizer"
    """
    from holdfast.pipelines.view.catalog import find_run
    from holdfast.telemetry.run_metadata import change_labels

    opened_store = open_chosen(store)
    record = find_run(opened_store, run)
    labels = {"tags": record.tags, "note": record.note}
    if tags or remove or note is not None:
        labels = change_labels(opened_store, record.run_id, tags or (), remove or (), note).model_dump()
    if as_json:
        print_json({"run_id": record.run_id, **labels})
        return
    out(f"{record.run_id}: {', '.join(labels['tags']) or 'no tags'}")
    if labels["note"]:
        out(str(labels["note"]))


@app.command()
def compare(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="The runs. Default: all.", show_default=False)
    ] = None,
    where: Where = "",
    sort: Sort = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file of the page. Default: under HOLDFAST_HOME.", show_default=False),
    ] = None,
    store: StoreRoot = "",
) -> None:
    """Write one page that compares runs: their curves, the differences of their specs, and their verdicts.

    The page is one file that loads nothing. It draws the curves of the first eight runs.

    Example: holdfast runs compare --where "tag == sweep-7" --sort loss
    """
    from holdfast.pipelines.view.catalog import all_runs, find_run
    from holdfast.pipelines.view.comparison import write_page
    from holdfast.pipelines.view.run_filter import select_runs
    from holdfast.runtime.environment import home

    opened_store = open_chosen(store)
    records = [find_run(opened_store, name) for name in names] if names else all_runs(opened_store)
    found = select_runs(records, where, sort)
    chosen = found[:RUNS_SHOWN]
    note_unreadable(chosen)
    if len(found) > len(chosen):
        err(f"note: {len(found) - len(chosen)} more runs are not shown; choose fewer with --where")
    out(f"page: {write_page(opened_store, chosen, output or home() / 'reports' / 'runs.html')}")


def _list_backend(where: BackendOptions, limit: int | None, as_json: bool) -> None:
    if not where.backend:
        raise typer.BadParameter("--namespace needs it", param_hint="--backend")
    statuses = api.backend_runs(where.location)
    statuses = statuses[:limit] if limit else statuses
    if as_json:
        print_json(statuses)
        return
    for status in statuses:
        out(f"{status.state:<10}  {status.name}  {status.link}")
    if not statuses:
        out(f"no runs on {where.backend}; start one with `holdfast run SPEC --backend {where.backend}`")


def note_unreadable(records: Sequence[RunRecord]) -> None:
    """Print one note for each record that cannot be read."""
    for message in [message for record in records for message in record.unreadable]:
        err(f"note: {message}")


def logs(
    run: RunName,
    rank: RankOptions,
    where: BackendOptions,
    step: StepName = "",
    step_option: Annotated[str, typer.Option("--step", help="The same as STEP.", show_default=False)] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run has ended.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print everything that the backend has, with its own lines.")
    ] = False,
) -> None:
    """Print the logs of the steps of a run, or of one rank of its training, live or after its end.

    Example: holdfast logs 3f2a train --follow
    """
    from holdfast.pipelines.backends.interface import step_called
    from holdfast.pipelines.backends.step_logs import step_lines
    from holdfast.steps import STEPS

    if step and step_option and step != step_option:
        raise typer.BadParameter(f"is {step_option!r}, and STEP is {step!r}; give one of them", param_hint="--step")
    step = step or step_option
    if rank.chosen:
        if step not in ("", "train"):
            raise typer.BadParameter("only the step train has ranks", param_hint="--step")
        _print_rank(run, rank, where, follow)
        return
    if step and step_called(step) not in STEPS:
        raise typer.BadParameter(f"{step!r} is no step; use one of {', '.join(STEPS)}", param_hint="STEP")
    if raw:
        backend, backend_id = api.find_backend(run, where.location)
        lines = backend.logs(backend_id, step, follow=follow)
    else:
        find = cache(lambda: api.find_backend(run, where.location))
        lines = step_lines(*_kept(run, where.store), find, step, follow=follow)
    for name, line in lines:
        out(line if step else f"[{name}] {line}")


def _kept(run: str, store: str) -> tuple[Store | None, Record | None]:
    """The store, and the record of a run there. An unreachable store does not hide what the backend has."""
    from holdfast.pipelines.backends.record import find_record
    from holdfast.spec.errors import StoreUnreachableError

    try:
        opened_store = open_chosen(store)
        return opened_store, find_record(opened_store, run)
    except StoreUnreachableError as error:
        err(f"note: the logs in the store cannot be read ({error})")
        return None, None


def _print_rank(run: str, rank: RankOptions, where: BackendOptions, follow: bool) -> None:
    from holdfast.pipelines.backends.step_logs import is_active, rank_lines
    from holdfast.pipelines.view.catalog import find_run

    opened_store = open_chosen(where.store)
    run_id = find_run(opened_store, run).run_id
    running = (lambda: is_active(*api.find_backend(run, where.location))) if follow else None
    printed, number = False, rank.rank or 0
    for line in rank_lines(opened_store, run_id, number, attempt=rank.attempt, launch=rank.launch, running=running):
        printed = True
        out(line)
    if not printed:
        err(f"note: rank {number} of run {run_id} has printed nothing yet; --follow waits for its lines")


def stop(run: RunName, where: BackendOptions, as_json: AsJson = False) -> None:
    """Stop a run or a sweep. The training saves a checkpoint first; `holdfast resume` continues from it.

    If the run has ended already, the command ends training jobs that it left on its cluster.

    Example: holdfast stop 3f2a
    """
    stopped = api.stop(run, at=where.location)
    if stopped.unknown:
        err(f"note: whether its training left a job on the cluster is not known ({stopped.unknown})")
    if as_json:
        print_json({"run": stopped.run, "ended": stopped.ended, "jobs": stopped.jobs})
        return
    stopping = stopped.ended or stopped.run.unfinished  # a run that was stopped a moment ago has not ended yet
    out(f"{stopped.run.name}: {'is stopping' if stopping else f'has ended already, {stopped.run.state}'}")
    for job in stopped.jobs:
        out(f"job {job}: is stopping; no launcher followed it any more")
