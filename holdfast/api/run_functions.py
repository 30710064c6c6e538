"""Functions of runs: start one, list those of a store or a backend, and compare two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.api.run_handle import Progress, Run, silent
from holdfast.api.submission import (
    AS_RECORDED,
    NO_OPTIONS,
    ClusterOptions,
    Location,
    Overrides,
    RunFailedError,
    default_backend,
    find_backend,
    new_salt,
    open_store_at,
    request,
    submit,
)
from holdfast.pipelines.backends import capabilities_of, open_backend
from holdfast.spec import ExitCode, HoldfastError, Spec
from holdfast.spec.errors import MissingError
from holdfast.store import Store

if TYPE_CHECKING:
    from holdfast.checkpoint.tools import Divergence
    from holdfast.pipelines.backends.interface import RunStatus
    from holdfast.scoring.comparison import Comparison
    from holdfast.telemetry.event_log import Reached


@dataclass(frozen=True)
class RunState:
    """The status of a run by its backend, with what the store adds."""

    status: RunStatus
    run_id: str = ""  # empty until the steps have read the sources
    progress: Reached | None = None  # None before the first step
    note: str = ""  # why the store could not be read


def run(
    spec: Spec | str | Path,
    *,
    overrides: Overrides = (),
    backend: str = "",
    store: str = "",
    salt: str = "",
    fresh: bool = False,
    replan: bool = False,
    options: ClusterOptions = NO_OPTIONS,
) -> Run:
    """Run a spec, and return the run.

    On this machine (the default, unless HOLDFAST_BACKEND names another backend) it runs to the end and shows its
    progress. On a cluster it submits the run and returns; see `Run.wait`. Finished work is not repeated: the same call
    resumes the run, or returns it. `salt` separates runs of the same inputs, `fresh` draws a new salt, and `replan`
    lets an unfinished run continue under another plan. A model that is not blessed is no failure: see `Run.verdict`.
    Raises RunFailedError if a run of this machine fails.
    """
    run_request = request(
        spec,
        backend=backend,
        overrides=overrides,
        store=store,
        salt=new_salt() if fresh else salt,
        replan=replan,
        options=options,
    )
    submission = submit(run_request, backend=backend, options=options)
    status, store_url = submission.run, store or run_request.spec.store or ""
    if capabilities_of(default_backend(backend)).foreground:
        code = ExitCode(status.exit_code or 0)
        if code not in (ExitCode.OK, ExitCode.NOT_BLESSED):
            reason = status.message or code.name.lower().replace("_", " ")
            raise RunFailedError(f"run {status.id}: {reason}. The log: {status.link}", code)
    elif submission.record_error or not submission.store:
        raise MissingError(
            f"{status.name} is submitted to {status.backend} ({status.link}), but "
            f"{submission.store or 'no store that is known here'} has no record of it"
            + (f": {submission.record_error}" if submission.record_error else "; give store=")
        )
    return Run(status.id, store_url)


def runs(store: str | Store = "") -> list[Run]:
    """The runs in a store, newest first."""
    from holdfast.pipelines.view.catalog import all_runs

    opened_store = open_store_at(store)
    return [Run._of(opened_store, record) for record in all_runs(opened_store)]


def backend_runs(at: Location) -> list[RunStatus]:
    """The runs that a backend knows, newest first, from any store."""
    return open_backend(at.backend, store=at.store, endpoint=at.endpoint, namespace=at.namespace).list()


def run_state(run: str, at: Location = AS_RECORDED) -> RunState:
    """The status of a run or a sweep by its backend, its progress, and its exit code. Needs no store."""
    from holdfast.pipelines.backends.record import find_record
    from holdfast.telemetry.event_log import reached

    backend, backend_id = find_backend(run, at)
    status = backend.status(backend_id)
    if at.endpoint and not at.store:
        return RunState(status)  # an endpoint alone names no store
    try:
        opened_store = open_store_at(at.store)
        record = find_record(opened_store, run)
        if record is None or not record.run_id:
            return RunState(status)
        if status.exit_code is None and not status.unfinished:
            status = replace(status, exit_code=record.ending(opened_store).get("exit_code"))
        known_id = record.identity if record.identified or record.ran else ""
        return RunState(status, known_id, reached(opened_store, record.identity))
    except HoldfastError as error:
        return RunState(status, note=str(error))


def comparison(sweep: str, store: str | Store = "") -> Comparison | None:
    """The comparison of the trials of a sweep, by its id or name; None while it has none. Raises MissingError."""
    from holdfast.pipelines.backends.record import find_record
    from holdfast.pipelines.view.comparison import find_comparison

    opened_store = open_store_at(store)
    try:
        return find_comparison(opened_store, sweep)
    except MissingError:
        record = find_record(opened_store, sweep)
        if record is None or not record.is_sweep:
            raise
        return None


def diff_runs(one: Run, other: Run, progress: Progress | None = None) -> Divergence:
    """Where two runs diverge, to the bit: the first step, tensor and element. `progress` receives read bytes."""
    from holdfast.checkpoint.tools import Side, find_divergence

    return find_divergence(Side(one.store, one.id), Side(other.store, other.id), progress or silent)
