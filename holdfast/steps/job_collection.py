"""Garbage collection of jobs: removes step logs and outcomes of old executions of the DAG.

Each execution leaves `logs/<job>/` and `jobs/<job>/`, and its exit handler collects those of others. Nothing that
changed in the last KEEP_SECONDS is removed. Nor is what `holdfast logs` shows of a run or a sweep that is still in the
store: the job of its newest submission. Outcomes of a failed job stay: a schedule reads them to decide whether a
retraining would fail again. LOOKS jobs, drawn at random, are examined, so that the exit handler takes no longer in a
store of 10,000 jobs. Each execution adds one job, so old ones are removed after a number of executions.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence

from pydantic import BaseModel

from holdfast.spec.errors import DataError, MissingError
from holdfast.steps.jobs import is_job, outcomes_in
from holdfast.steps.step_logs import local_job
from holdfast.store import layout
from holdfast.store.interface import ObjectInfo, Store
from holdfast.store.json_reading import read_json

KEEP_SECONDS = 30 * 86_400.0
LOOKS = 50  # jobs
BATCH = 1000  # objects that one request deletes
_LOCAL = re.compile(r"(.+)-run-[^-]+-\d+")  # see `local_job`


class _Submission(BaseModel):
    """The job of a run's or a sweep's newest submission, from `backend.json`."""

    job: str = ""
    id: str = ""
    log: str = ""


def collect_jobs(store: Store, mine: str = "", now: float | None = None) -> list[str]:
    """Delete logs and outcomes of old jobs, never those of the job `mine`. Return the jobs of which objects were
    deleted. `now` is in Unix seconds. Raises what the store raises."""
    found = {*store.folders("logs/"), *store.folders("jobs/")} - {mine}
    jobs = sorted(job for job in found if is_job(job))
    since = (time.time() if now is None else now) - KEEP_SECONDS
    some = random.sample(jobs, min(LOOKS, len(jobs)))
    return [job for job in some if _collect(store, job, since)]


def _collect(store: Store, job: str, since: float) -> bool:
    logs, outcomes = list(store.list(layout.step_log(job))), list(store.list(layout.job(job)))
    if any(info.modified > since for info in [*logs, *outcomes]):
        return False
    told = outcomes_in(store, job)
    ids = {outcome.result for outcome in told if outcome.step == "train" and outcome.result}
    ids |= {info.key.rpartition("/")[2] for info in store.list(layout.named(job))}
    if match := _LOCAL.fullmatch(job):
        ids.add(match[1])
    if any(_shows(store, key, job) for key in _records_of(ids)):
        return False
    failed = any(outcome.exit_code != 0 for outcome in told)
    gone = [*logs] if failed else [*logs, *outcomes, *store.list(layout.named(job))]
    for some in _batches(gone):
        store.delete_many([info.key for info in some])
    return bool(gone)


def _records_of(ids: Iterable[str]) -> Iterator[str]:
    for each in ids:
        yield layout.run(each, "backend.json")
        yield layout.sweep(each, "backend.json")


def _shows(store: Store, key: str, job: str) -> bool:
    """Whether `holdfast logs` shows this job for the record's run or sweep. True for an unreadable record, since it
    may."""
    try:
        told = read_json(store, key, _Submission)
    except MissingError:
        return False
    except DataError:
        return True
    return job in (told.job or told.id, local_job(told.log))


def _batches(items: Sequence[ObjectInfo]) -> Iterator[Sequence[ObjectInfo]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))
