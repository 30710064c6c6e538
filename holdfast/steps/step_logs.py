"""Logs of steps: the output of each process of a step, in the store under `logs/<job>/<step>/<stream>/`, as it grows.

A job is one execution of the DAG, under the name that its steps know before they know their run. Log records are lines
of JSON; other output of Python stands between them unchanged. A step never waits for its log, and never fails because
of it. Lines reach the store FLUSH_SECONDS after they were written. When the step ends or is stopped, they are written
immediately, within CLOSE_SECONDS. The guarantees of `log_stream` hold as well. The output of child processes is not
copied: the ranks of a training have their own logs.
"""

from __future__ import annotations

import logging
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from holdfast.runtime.environment import outcomes_folder
from holdfast.runtime.exits import join_within
from holdfast.spec.errors import DataError, MissingError
from holdfast.steps.jobs import is_job, outcomes_in
from holdfast.steps.outcomes import LOG_FILE, POD
from holdfast.store import layout
from holdfast.store.interface import ObjectInfo, Store
from holdfast.store.json_reading import read_json
from holdfast.store.log_stream import (
    CLOSE_SECONDS,
    DEADLINE,
    DESCRIPTION,
    LogStream,
    StreamReader,
    StreamWriter,
    stream_name,
)
from holdfast.store.open import open_store

FLUSH_SECONDS = 3.0  # delay from a line to the store, plus the time of the put itself
RETRY_SECONDS = 1.0  # pause after a store error, when the step has ended

log = logging.getLogger("holdfast.logs")


class StepStream(LogStream):
    """One process of a step, and the place of its log."""

    step: str
    part: str = ""  # which one, for a step with several parts
    pod: str = ""  # its pod on a cluster

    @property
    def writer(self) -> str:
        """See LogStream."""
        return f"the step {self.folder}"

    @property
    def folder(self) -> str:
        """One name for each step, or for each part of it: that of its outcome."""
        return f"{self.step}-{self.part}" if self.part else self.step


def local_job(log_file: str) -> str:
    """The job of a run of this machine, whose log is this file: `<home>/logs/<run>/run-<time>-<process>.log`."""
    path = Path(log_file)
    return f"{path.parent.name}-{path.stem}" if log_file else ""


def step_log(job: str, step: str, part: str, fallback: Callable[[], str]) -> ShippedLog | None:
    """The log of this process, which works on a step of `job`. None if no job is known, as when a person runs a step
    alone. `fallback` gives the URL of the store, if it can, for a step that ends before it opened one."""
    if outcomes_folder() is not None:
        job = local_job(os.environ.get(LOG_FILE, ""))
    return ShippedLog(job, step, part, fallback) if is_job(job) else None


class ShippedLog:
    """Keeps the log of a step in the store, by a thread. See `steps.runner.StepLog`."""

    def __init__(self, job: str, step: str, part: str, fallback: Callable[[], str]) -> None:
        stream = StepStream(
            name=stream_name(),
            step=step,
            part=part,
            pod=os.environ.get(POD, ""),
            node=socket.gethostname(),
            pid=os.getpid(),
            began=time.time(),
        )
        self._url, self._fallback = "", fallback
        self._opened = cache(lambda: open_store(self._url, deadline=DEADLINE))
        self._writer = StreamWriter(self._opened, layout.step_log(job, stream.folder), stream)
        self._changed = threading.Condition()
        self._hurried = self._closing = self._kept = False
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """See StepLog."""
        if text:
            self._writer.add(text.encode("utf-8", "replace"))

    def open(self, url: str) -> None:
        """See StepLog."""
        if self._thread is None and url:
            self._url = url
            self._thread = threading.Thread(target=self._ship, name="step log", daemon=True)
            self._thread.start()

    def hurry(self) -> None:
        """See StepLog."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def close(self, code: int) -> None:
        """See StepLog."""
        update = {"ended": time.time(), "code": code}
        self._writer.describe(self._writer.stream.model_copy(update=update))
        if self._thread is None:
            with suppress(Exception):  # a refused spec names no store, and a log must not fail its step
                self.open(self._fallback())
        if self._thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        join_within(self._thread, CLOSE_SECONDS)
        if not self._kept:
            log.warning("the last lines of this step did not reach the store in %g s", CLOSE_SECONDS)

    def _ship(self) -> None:
        while not self._kept:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._hurried, FLUSH_SECONDS)
                closing, self._hurried = self._closing, False
            try:
                self._kept = self._writer.flush(last=closing) and closing
            except Exception as error:  # noqa: BLE001 - a log must not fail its step
                log.warning("the log of this step is not kept in the store: %s: %s", type(error).__name__, error)
                return
            if closing and not self._kept:
                time.sleep(RETRY_SECONDS)


class StepLogReader:
    """Reads the logs of the steps of a job, while it runs and afterwards."""

    def __init__(self, store: Store, job: str) -> None:
        self._store, self._job = store, job
        self._readers: dict[tuple[str, str], StreamReader] = {}

    @property
    def steps(self) -> set[str]:
        """The names of the steps, or parts of steps, with any output so far."""
        return {step for step, _ in self._readers}

    def new_lines(
        self, wanted: Callable[[str], bool], *, last: bool = False, ended: bool = False
    ) -> Iterator[tuple[str, str]]:
        """(step, line) since the last call, of the steps with wanted names; each step's processes in the order of time.
        With `last`, lines without an end as well. `ended`: the run has ended, and with it every process."""
        for (step, stream), objects in sorted(self._listed(wanted), key=lambda one: one[0][1]):
            folder = layout.step_log(self._job, step, stream)
            reader = self._readers.setdefault((step, stream), StreamReader(self._store, folder))
            yield from ((step, line) for line in reader.new_lines(objects))
            if last:
                yield from ((step, line) for line in reader.rest())
                if ended and not self._has_ended(step, stream):
                    yield step, "[holdfast: this process ended without a word; its last seconds may be missing here]"

    def _listed(self, wanted: Callable[[str], bool]) -> Sequence[tuple[tuple[str, str], list[ObjectInfo]]]:
        by_stream: dict[tuple[str, str], list[ObjectInfo]] = {}
        folder = layout.step_log(self._job)
        for info in self._store.list(folder):
            step, _, rest = info.key[len(folder) :].partition("/")
            stream, _, name = rest.partition("/")
            if name and wanted(step):
                by_stream.setdefault((step, stream), []).append(info)
        return list(by_stream.items())

    def _has_ended(self, step: str, stream: str) -> bool:
        with suppress(MissingError, DataError):
            return (
                read_json(self._store, layout.step_log(self._job, step, stream, DESCRIPTION), StepStream).ended
                is not None
            )
        return False


# Garbage collection of jobs: removes step logs and outcomes of old executions of the DAG.
#
# Each execution leaves `logs/<job>/` and `jobs/<job>/`, and its exit handler collects those of others. Nothing that
# changed in the last KEEP_SECONDS is removed. Nor is what `holdfast logs` shows of a run or a sweep that is still in
# the store: the job of its newest submission. Outcomes of a failed job stay: a schedule reads them to decide whether a
# retraining would fail again. LOOKS jobs, drawn at random, are examined, so that the exit handler takes no longer in a
# store of 10,000 jobs. Each execution adds one job, so old ones are removed after a number of executions.

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
    folders = {*store.folders("logs/"), *store.folders("jobs/")} - {mine}
    jobs = sorted(job for job in folders if is_job(job))
    since = (time.time() if now is None else now) - KEEP_SECONDS
    sampled = random.sample(jobs, min(LOOKS, len(jobs)))
    return [job for job in sampled if _collect(store, job, since)]


def _collect(store: Store, job: str, since: float) -> bool:
    logs, outcomes = list(store.list(layout.step_log(job))), list(store.list(layout.job(job)))
    if any(info.modified > since for info in [*logs, *outcomes]):
        return False
    recorded = outcomes_in(store, job)
    ids = {outcome.result for outcome in recorded if outcome.step == "train" and outcome.result}
    ids |= {info.key.rpartition("/")[2] for info in store.list(layout.named(job))}
    if match := _LOCAL.fullmatch(job):
        ids.add(match[1])
    if any(_shows(store, key, job) for key in _records_of(ids)):
        return False
    has_failed = any(outcome.exit_code != 0 for outcome in recorded)
    removed = [*logs] if has_failed else [*logs, *outcomes, *store.list(layout.named(job))]
    for batch in _batches(removed):
        store.delete_many([info.key for info in batch])
    return bool(removed)


def _records_of(ids: Iterable[str]) -> Iterator[str]:
    for identity in ids:
        yield layout.run(identity, "backend.json")
        yield layout.sweep(identity, "backend.json")


def _shows(store: Store, key: str, job: str) -> bool:
    """Whether `holdfast logs` shows this job for the record's run or sweep. True for an unreadable record, since it
    may."""
    try:
        submission = read_json(store, key, _Submission)
    except MissingError:
        return False
    except DataError:
        return True
    return job in (submission.job or submission.id, local_job(submission.log))


def _batches(items: Sequence[ObjectInfo]) -> Iterator[Sequence[ObjectInfo]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))
