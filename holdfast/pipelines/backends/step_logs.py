"""Logs of steps on any backend: from the store, and from the engine only what the store lacks.

The steps of all backends keep their logs in the store, live and after their pods are gone (`holdfast.steps.step_logs`).
The engine has the log of a step that died before it could write one.
"""

import time
from collections.abc import Callable, Iterator

from holdfast.pipelines.backends import capabilities_of
from holdfast.pipelines.backends.interface import NOT_BEGUN, PENDING, SKIPPED, UNFINISHED, Backend, RunStatus, is_step
from holdfast.pipelines.backends.record import Record
from holdfast.runtime.logs import plain
from holdfast.spec.errors import HoldfastError, MissingError
from holdfast.steps.jobs import is_job
from holdfast.steps.step_logs import StepLogReader, local_job
from holdfast.store import Store
from holdfast.telemetry import rank_logs

# Logs of single ranks. On every backend the ranks keep them in the store, so all backends share this code.


def rank_lines(
    store: Store,
    run_id: str,
    rank: int,
    *,
    attempt: int | None = None,
    launch: int | None = None,
    running: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """The log lines of a rank, for a person. See `telemetry.rank_logs.rank_lines`."""
    lines = rank_logs.rank_lines(store, run_id, rank, attempt=attempt, launch=launch, running=running)
    return (text for line in lines for text in plain(line).splitlines() or [""])


def is_active(backend: Backend, run: str) -> bool:
    """Whether a run is unfinished according to its backend, and so may still print."""
    try:
        return backend.status(run).unfinished
    except MissingError:
        return False


POLL_SECONDS = 2.0
WITHOUT_LOG = (PENDING, NOT_BEGUN, SKIPPED.upper())  # states of steps without output


def job_of(record: Record | None, status: RunStatus | None = None) -> str:
    """The execution id of a submission's steps; empty where neither its record nor its backend has it."""
    if record is not None:
        return local_job(record.log) if record.log else record.job or record.id
    if status is None or capabilities_of(status.backend).foreground:
        return ""
    return status.job or status.id


def step_lines(
    store: Store | None,
    record: Record | None,
    find: Callable[[], tuple[Backend, str]],
    step: str = "",
    *,
    follow: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[str, str]]:
    """Yield (step, line) of the steps of a run, or only of `step`; with `follow`, until the run has ended.

    `find` returns the run's backend and its id there. A backend that no longer knows the run, or cannot be reached,
    hides nothing that the store has. Raises MissingError without any log, and the backend's error if the store has
    nothing.
    """

    def wanted(name: str) -> bool:
        return is_step(step, name) or name.startswith(f"{step}-")

    if record is not None and not record.is_sweep and step == "compare":
        raise MissingError(f"{record.name} is a run and not a sweep: only a sweep has the step {step}; leave it out")
    reader: StepLogReader | None = None
    engine_steps: set[str] = set()  # steps whose log came from the engine
    while True:
        status, failure = _status(find)  # read first: later output is read again
        unfinished = follow and status is not None and status.unfinished
        job = job_of(record, status)
        if reader is None and store is not None and is_job(job):
            reader = StepLogReader(store, job)
        if reader is not None:
            last = status is None or not status.unfinished
            for name, line in reader.new_lines(wanted, last=last, ended=status is not None and last):
                yield from ((name, text) for text in plain(line).splitlines() or [""])
        stored_steps = reader.steps if reader is not None else set()
        for name in _missing(status, stored_steps, unfinished) - engine_steps if stored_steps or unfinished else ():
            if wanted(name):
                engine_steps.add(name)
                yield from _of_engine(find, name)
        if unfinished:
            pause(POLL_SECONDS)
            continue
        if follow and failure is not None and not isinstance(failure, MissingError):
            raise failure  # the run may not have ended
        if stored_steps or engine_steps:
            return
        if failure is not None:
            raise failure
        backend, backend_id = find()
        yield from backend.logs(backend_id, step)
        return


def _status(find: Callable[[], tuple[Backend, str]]) -> tuple[RunStatus | None, HoldfastError | None]:
    try:
        backend, backend_id = find()
        return backend.status(backend_id), None
    except HoldfastError as error:
        return None, error


def _missing(status: RunStatus | None, kept: set[str], is_active: bool) -> set[str]:
    """The steps without a log in the store that have begun and, if the run is followed, have ended.

    In the store, each part of a step has a separate name.
    """
    steps = status.steps if status is not None else ()
    begun_steps = {
        step.name for step in steps if step.state not in WITHOUT_LOG and not (is_active and step.state in UNFINISHED)
    }
    return {
        name
        for name in begun_steps
        if not any(log_name == name or log_name.startswith(f"{name}-") for log_name in kept)
    }


def _of_engine(find: Callable[[], tuple[Backend, str]], step: str) -> Iterator[tuple[str, str]]:
    """The engine's log of a step; one line if it has none, so that other steps still appear."""
    backend, backend_id = find()
    try:
        yield from backend.logs(backend_id, step)
    except MissingError as error:
        yield step, f"[holdfast: the store has no log of this step, and {backend.name} neither: {error}]"
