"""Where a run was submitted, kept beside the run in the store, so that `status`, `logs`, `cancel` and `resume` find it.

`runs/<run-id>/backend.json`, or `sweeps/<sweep-id>/backend.json`; the last submission counts. Where the steps read
other sources than the submitter can (`python:stdlib`, a volume), a digest of what was asked for stands for the id of
the run, which is known when the first step has ended. Promises that a store which cannot be reached from here never
fails a submission, and that no password is kept.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.pipelines.backends.interface import RunStatus, require_one_run
from holdfast.pipelines.backends.request import RunRequest
from holdfast.runtime.secrets import redact
from holdfast.spec import dump_spec, parse_spec, run_id
from holdfast.spec.errors import DataError, ExitCode, HoldfastError, MissingError
from holdfast.spec.json_parsing import parse_json
from holdfast.spec.load import dump_written
from holdfast.store import Store, layout, open_store
from holdfast.store.bounded_read import read_bounded
from holdfast.store.jobs import outcome_of
from holdfast.store.json_reading import read_json_object
from holdfast.store.parallel import in_parallel
from holdfast.store.run_metadata import mark_name

RUNS, SWEEPS, FILE = "runs/", "sweeps/", "backend.json"
LONGEST_ID = 128  # characters
AT_ONCE = 32  # requests for records of many runs
DEADLINE = 20.0  # seconds for a record, all retries included


@dataclass(frozen=True)
class Record:
    """A submission: to which backend, what it is called there, and what was asked for."""

    backend: str
    id: str
    run_id: str  # or the sweep's; while no step has read the sources, `RunRequest.key`
    name: str  # of the spec, or of the sweep
    spec: str
    submitted: float  # unix seconds
    store: str = ""
    salt: str = ""
    image: str = ""
    service_account: str = ""
    replan: bool = False
    endpoint: str = ""  # of Kubeflow, or of Ray
    namespace: str = ""  # of Kubeflow's users, or of Kubernetes
    host: str = ""  # the machine of a local run, and its process there
    pid: int = 0
    began: float = 0.0  # seconds after the machine: a process is known by its number and its start
    log: str = ""
    outcomes: str = ""  # the folder where its steps say how they are, while it runs
    trials: Sequence[Sequence[str]] = ()  # of a sweep
    at_once: int = 0
    former: dict[str, Any] | None = None  # the submission before, which is gone on with when this one is refused
    job: str = ""  # what the steps call it, where they keep their outcomes
    identified: bool = True  # whether `run_id` is the id of the run, as far as one knew when it was submitted
    written: str = ""  # what a person wrote of the spec; empty: all of it
    ran: str = ""  # the run that its steps work on, where `find_record` knows it

    @property
    def identity(self) -> str:
        """The id of the run in the store, or what stands for it until a step has read the sources."""
        return self.ran or self.run_id

    @property
    def request(self) -> RunRequest:
        """What was asked for, to ask for it again."""
        spec = parse_spec(self.spec)
        if self.written:
            with suppress(HoldfastError):  # another version has other fields, or other defaults: the whole spec counts
                written = parse_spec(self.written)
                spec = written if written == spec else spec
        return RunRequest(
            spec, self.store, self.salt, self.run_id if self.identified else "", service_account=self.service_account,
            image=self.image, replan=self.replan, trials=tuple(tuple(trial) for trial in self.trials),
            at_once=self.at_once,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        """Whether a local run goes on: its process is there, and so is the folder that it removes at its end (the
        process may be somebody's notebook, which stays). False for another machine's, of which nothing is known."""
        here = self.host == socket.gethostname() and Path(self.outcomes).is_dir()
        return here and process_start(self.pid) == self.began

    def write(self, store: Store) -> None:
        """Keep it beside the run or the sweep."""
        hidden = replace(self, endpoint=redact(self.endpoint))
        store.put(self._key(FILE), json.dumps(asdict(hidden), ensure_ascii=False).encode())
        for name in {self.name, self.job}:
            mark_name(store, name, self.run_id)

    def ending(self, store: Store) -> dict[str, Any]:
        """What the exit handler told of this submission; empty where it has told nothing yet, or never will."""
        try:
            told = read_json_object(store, self._key("summary.json", self.identity))
            return told if float(told.get("ended", 0.0)) >= self.submitted else {}
        except (MissingError, DataError, ValueError, TypeError):
            return {}

    def accepted(self, store: Store) -> Record:
        """This submission, or the one before if the run may not go on as this one asks (`--replan`)."""
        refused = self.former is not None and self.ending(store).get("exit_code") == ExitCode.PLAN_CHANGED
        return (read_record(self.former or {}) if refused else None) or self

    def after(self, store: Store) -> Record:
        """This submission, which knows the one before it."""
        try:
            before = read_record(store.get(self._key(FILE)))
        except MissingError:
            before = None
        if before is None:
            return self
        last = before.accepted(store)
        same = (last.spec, last.image) == (self.spec, self.image)
        return replace(self, former=last.former if same else {**asdict(last), "former": None})

    def _key(self, file: str, identity: str = "") -> str:
        identity = identity or self.run_id
        return layout.sweep(identity, file) if self.trials else layout.run(identity, file)


def record_of(
    request: RunRequest, backend: str, identity: str, endpoint: str = "", namespace: str = "", job: str = ""
) -> Record:
    """The record of a submission that was made now."""
    return Record(
        backend, identity, request.key, request.title, dump_spec(request.spec), time.time(), request.store,
        request.salt,
        request.image, request.service_account, request.replan, endpoint, namespace, trials=request.trials,
        at_once=request.at_once, job=job, identified=bool(request.run_id), written=dump_written(request.spec),
    )  # fmt: skip


def keep(record: Record, url: str) -> str:
    """Write a record into the store at `url`. Returns why that failed; empty if it did not, or if no store is
    known here."""
    if not url:
        return ""
    try:
        store = open_store(url, deadline=DEADLINE)
        record.after(store).write(store)
    except (HoldfastError, OSError) as error:
        return str(error)
    return ""


def keep_submission(made: RunStatus, wanted: RunRequest, endpoint: str, namespace: str, url: str) -> str:
    """Write down where `wanted` was submitted. Returns why that failed, as `keep` does. A run of this machine keeps its
    own record, which says more."""
    if made.backend == "local":
        return ""
    if made.backend == "kubeflow":
        endpoint = endpoint or os.environ.get("KFP_ENDPOINT", "")
    if made.backend == "ray":
        from holdfast.pipelines.backends.ray.client import address_of

        endpoint = address_of(endpoint)
    return keep(record_of(wanted, made.backend, made.id, endpoint, namespace, made.job or made.id), url)


def find_record(store: Store, wanted: str) -> Record | None:
    """The newest submission whose run id or backend's id begins with `wanted`, or whose spec is so called. A run id and
    a name are found without a look at other runs. Raises MissingError for a beginning that several runs share."""
    if not wanted:
        return None
    searches: list[Callable[[Store], list[Record]]] = [partial(_of_name, wanted), _all]
    if wanted.isascii() and wanted.isalnum() and len(wanted) <= LONGEST_ID:
        searches.insert(0, partial(_of_id, wanted))
    for search in searches:
        found = search(store)
        fitting = [one for one in found if one.run_id.startswith(wanted) or wanted in (one.id, one.job, one.name)]
        if not fitting and search is _all:
            fitting = [one for one in (as_it_ran(store, each) for each in found) if one.ran.startswith(wanted)]
        if not fitting and search is _all:
            fitting = [one for one in found if one.id.startswith(wanted) or one.job.startswith(wanted)]
        require_one_run(wanted, (one.identity for one in fitting if one.name != wanted))
        if fitting:
            return as_it_ran(store, max(fitting, key=lambda one: one.submitted))
    return None


def _of_id(wanted: str, store: Store) -> list[Record]:
    return _records(store, (f"{prefix}{name}" for prefix in (RUNS, SWEEPS) for name in store.folders(prefix + wanted)))


def _of_name(wanted: str, store: Store) -> list[Record]:
    """The submissions under a name that were made last; older ones are not read."""
    marks = sorted(store.list(layout.named(wanted)), key=lambda info: info.modified, reverse=True)
    ids = [info.key.rpartition("/")[2] for info in marks]
    for start in range(0, len(ids), AT_ONCE // 2):
        some = ids[start : start + AT_ONCE // 2]
        found = _records(store, (f"{prefix}{name}" for prefix in (RUNS, SWEEPS) for name in some))
        if any(one.name == wanted for one in found):
            return found
    return []


def _all(store: Store) -> list[Record]:
    return _records(store, (f"{prefix}{name}" for prefix in (RUNS, SWEEPS) for name in store.folders(prefix)))


def as_it_ran(store: Store, record: Record) -> Record:
    """With the id of the run that its steps work on, once the first of them has said which dataset that is of."""
    if not record.job or record.trials or record.ran:
        return record
    from holdfast.model.imported import weights_digest

    outcome = outcome_of(store, record.job, "preprocess")
    if outcome is not None and outcome.result:
        with suppress(HoldfastError):  # a spec that another version wrote, weights that cannot be read from here
            spec = parse_spec(record.spec)
            ran = run_id(spec, outcome.result, record.salt, weights_digest(spec.model.init_from))
            return replace(record, ran=ran)
    return record


def sweep_records(store: Store) -> list[Record]:
    """The submissions of sweeps that the store knows."""
    return _records(store, (f"{SWEEPS}{name}" for name in store.folders(SWEEPS)))


def _records(store: Store, folders: Iterable[str]) -> list[Record]:
    """The submissions in folders of runs and sweeps, where there is one that can be read."""

    def read(folder: str) -> Record | None:
        try:
            return read_record(read_bounded(store, f"{folder}/{FILE}"))
        except (MissingError, DataError):
            return None

    return [one for one in in_parallel(read, folders, AT_ONCE) if one is not None]


def read_record(content: bytes | dict[str, Any]) -> Record | None:
    """The record that JSON holds; None for one that another version wrote."""
    with suppress(DataError):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        return parse_json(data, Record, FILE)
    return None


def process_start(pid: int) -> float | None:
    """When a process of this machine began, in seconds after the machine did, which no step of the clock changes; None
    if there is none of that number."""
    import psutil

    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(pid)
        for _ in range(100):
            booted = psutil.boot_time()  # what psutil adds to the number that the kernel has of a process
            began = process.create_time() - booted
            if pid and process.status() != psutil.STATUS_ZOMBIE and psutil.boot_time() == booted:
                return round(began, 2)
    return None


def log_file(record: Record) -> Path:
    """The log of a local run on this machine. Raises MissingError."""
    path = Path(record.log)
    if not path.is_file():
        raise MissingError(f"{record.log}: is not there; the run was made on {record.host}")
    return path
