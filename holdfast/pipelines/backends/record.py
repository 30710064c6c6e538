"""Record of a submission in the store, so that `show`, `logs`, `stop` and `resume` find the run.

It is `runs/<run-id>/backend.json`, or `sweeps/<sweep-id>/backend.json`; the last submission counts. The submitter
cannot read some sources of the steps (`python:stdlib`, a volume). A digest of the request then replaces the run id
until the first step has ended. An unreachable store never fails a submission. No password is kept.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.code.resolve import is_submitted
from holdfast.pipelines.backends.interface import RunStatus, require_one_run
from holdfast.pipelines.backends.request import RunRequest
from holdfast.runtime.secrets import redact
from holdfast.search.method import Search
from holdfast.spec import Spec, dump_spec, parse_spec, run_id
from holdfast.spec.errors import DataError, ExitCode, HoldfastError, MissingError, SpecError
from holdfast.spec.json_parsing import parse_json
from holdfast.spec.load import dump_written
from holdfast.steps.jobs import outcome_of
from holdfast.store import Store, layout, open_store
from holdfast.store.json_reading import read_bounded, read_json_object
from holdfast.store.parallel import in_parallel
from holdfast.telemetry.run_metadata import mark_name

RUNS, SWEEPS, FILE = "runs/", "sweeps/", "backend.json"
LONGEST_ID = 128  # characters
CONCURRENT_READS = 32  # concurrent requests for records of many runs
DEADLINE = 20.0  # seconds for a record, including retries


@dataclass(frozen=True)
class Record:
    """A submission: its backend, its id there, and the request."""

    backend: str
    id: str
    run_id: str  # or the sweep's; before a step has read the sources, `RunRequest.key`
    name: str  # of the spec or the sweep
    spec: str
    submitted: float  # unix seconds
    store: str = ""
    salt: str = ""
    image: str = ""
    service_account: str = ""
    replan: bool = False
    endpoint: str = ""  # of Kubeflow, or of Ray
    namespace: str = ""  # of Kubeflow's users, or of Kubernetes
    host: str = ""  # the machine of a local run; its process follows
    pid: int = 0
    began: float = 0.0  # seconds since boot: pid and start time identify a process
    log: str = ""
    outcomes: str = ""  # folder of its steps' outcomes while it runs
    trials: Sequence[Sequence[str]] = ()  # of a sweep
    search: Search | None = None  # a sweep whose trials depend on results
    concurrent_trials: int = 0
    former: dict[str, Any] | None = None  # the previous submission, which stays valid if this one is refused
    running: dict[str, Any] | None = None  # an earlier submission, whose process ran here when this one was made
    job: str = ""  # the execution id under which its steps keep outcomes
    identified: bool = True  # whether `run_id` was the run's id at submission
    written: str = ""  # the spec as its author wrote it; empty: the same as `spec`
    ran: str = ""  # id of the run that its steps work on, if `find_record` knows it

    @property
    def is_sweep(self) -> bool:
        """Whether it is a submission of a sweep."""
        return bool(self.trials) or self.search is not None

    @property
    def identity(self) -> str:
        """The id of the run in the store, or its substitute until a step has read the sources."""
        return self.ran or self.run_id

    @property
    def request(self) -> RunRequest:
        """The request, to submit it again."""
        spec = parse_spec(self.spec)
        if self.written:
            with suppress(HoldfastError):  # another version has other fields or defaults: the whole spec counts
                written = parse_spec(self.written)
                spec = written if written == spec else spec
        return RunRequest(
            spec,
            self.store,
            self.salt,
            self.run_id if self.identified else "",
            service_account=self.service_account,
            image=self.image,
            replan=self.replan,
            trials=tuple(tuple(trial) for trial in self.trials),
            search=self.search,
            concurrent_trials=self.concurrent_trials,
        )

    @property
    def alive(self) -> bool:
        """Whether a local run is active: its process and its folder, which the run removes at its end, both exist.

        The process alone may be a notebook, which outlives the run. Always False for a run of another machine.
        """
        is_local = self.host == socket.gethostname() and Path(self.outcomes).is_dir()
        return is_local and process_start(self.pid) == self.began

    def write(self, store: Store) -> None:
        """Write it to the folder of the run or sweep."""
        hidden = replace(self, endpoint=redact(self.endpoint))
        store.put(self._key(FILE), json.dumps(asdict(hidden), ensure_ascii=False).encode())
        for name in {self.name, self.job}:
            mark_name(store, name, self.run_id)

    def ending(self, store: Store) -> dict[str, Any]:
        """The exit handler's summary of this submission; empty where it has not written one."""
        try:
            summary = read_json_object(store, self._key("summary.json", self.identity))
            return summary if float(summary.get("ended", 0.0)) >= self.submitted else {}
        except (MissingError, DataError, ValueError, TypeError):
            return {}

    def accepted(self, store: Store) -> Record:
        """This submission, or the previous one if this one's changed plan was refused (`--replan`)."""
        refused = self.former is not None and self.ending(store).get("exit_code") == ExitCode.PLAN_CHANGED
        return (read_record(self.former or {}) if refused else None) or self

    def after(self, store: Store) -> Record:
        """This submission with the previous one attached."""
        try:
            previous = read_record(store.get(self._key(FILE)))
        except MissingError:
            previous = None
        if previous is None:
            return self
        last = previous.accepted(store)
        same = (last.spec, last.image) == (self.spec, self.image)
        former = last.former if same else last.alone
        running = previous.newest_alive
        return replace(self, former=former, running=running.alone if running.alive else None)

    @property
    def alone(self) -> dict[str, Any]:
        """This submission without the earlier ones, as a part of a later one."""
        return {**asdict(self), "former": None, "running": None}

    @property
    def newest_alive(self) -> Record:
        """This submission, or the one whose process ran when it was made, if only that one's still runs."""
        earlier = read_record(self.running or {}) if not self.alive else None
        return earlier if earlier is not None and earlier.backend == self.backend and earlier.alive else self

    def require_known_backend(self) -> None:
        """Raise DataError if this Holdfast has no backend of this name."""
        from holdfast.pipelines.backends import BACKENDS

        if self.backend not in BACKENDS:
            raise DataError(
                f"{self.store}/{self._key(FILE)}: the submission of {self.identity} names the backend "
                f"{self.backend!r}, which this Holdfast does not have ({', '.join(BACKENDS)}); use the Holdfast that "
                "submitted it, or name a backend with --backend"
            )

    def _key(self, file: str, identity: str = "") -> str:
        identity = identity or self.run_id
        return layout.sweep(identity, file) if self.is_sweep else layout.run(identity, file)


def record_of(
    request: RunRequest, backend: str, identity: str, endpoint: str = "", namespace: str = "", job: str = ""
) -> Record:
    """The record of a submission at the current time."""
    return Record(
        backend,
        identity,
        request.key,
        request.title,
        dump_spec(request.spec),
        time.time(),
        request.store,
        request.salt,
        request.image,
        request.service_account,
        request.replan,
        endpoint,
        namespace,
        trials=request.trials,
        search=request.search,
        concurrent_trials=request.concurrent_trials,
        job=job,
        identified=bool(request.run_id),
        written=dump_written(request.spec),
    )


def keep(record: Record, url: str) -> str:
    """Write a record into the store at `url`. Returns the error message; empty on success or without a known store."""
    if not url:
        return ""
    try:
        store = open_store(url, deadline=DEADLINE)
        record.after(store).write(store)
    except (HoldfastError, OSError) as error:
        return str(error)
    return ""


def keep_submission(made: RunStatus, wanted: RunRequest, endpoint: str, namespace: str, url: str) -> str:
    """Record where `wanted` was submitted. Returns the error message as `keep` does.

    A run of this machine writes a more detailed record itself.
    """
    from holdfast.pipelines.backends import BACKENDS

    backend = BACKENDS[made.backend]
    if backend.capabilities.foreground:
        return ""
    endpoint = backend.address(endpoint)
    return keep(record_of(wanted, made.backend, made.id, endpoint, namespace, made.job or made.id), url)


def find_record(store: Store, wanted: str) -> Record | None:
    """The newest submission whose run id or backend id begins with `wanted`, or whose spec has that name.

    A run id and a name are found without reading other runs. Raises MissingError for a beginning that several runs
    share.
    """
    if not wanted:
        return None
    searches: list[Callable[[Store], list[Record]]] = [partial(_of_name, wanted), _all]
    if wanted.isascii() and wanted.isalnum() and len(wanted) <= LONGEST_ID:
        searches.insert(0, partial(_of_id, wanted))
    for search in searches:
        records = search(store)
        matches = [
            record
            for record in records
            if record.run_id.startswith(wanted) or wanted in (record.id, record.job, record.name)
        ]
        if not matches and search is _all:
            matches = [
                record for record in (as_it_ran(store, entry) for entry in records) if record.ran.startswith(wanted)
            ]
        if not matches and search is _all:
            matches = [record for record in records if record.id.startswith(wanted) or record.job.startswith(wanted)]
        require_one_run(wanted, (record.identity for record in matches if record.name != wanted))
        if matches:
            return as_it_ran(store, max(matches, key=lambda one: one.submitted))
    return None


def _of_id(wanted: str, store: Store) -> list[Record]:
    return _records(store, (f"{prefix}{name}" for prefix in (RUNS, SWEEPS) for name in store.folders(prefix + wanted)))


def _of_name(wanted: str, store: Store) -> list[Record]:
    """The latest submissions under a name; older ones are not read."""
    marks = sorted(store.list(layout.named(wanted)), key=lambda info: info.modified, reverse=True)
    ids = [info.key.rpartition("/")[2] for info in marks]
    for start in range(0, len(ids), CONCURRENT_READS // 2):
        batch = ids[start : start + CONCURRENT_READS // 2]
        records = _records(store, (f"{prefix}{name}" for prefix in (RUNS, SWEEPS) for name in batch))
        if any(record.name == wanted for record in records):
            return records
    return []


def _all(store: Store) -> list[Record]:
    return _records(store, (f"{prefix}{name}" for prefix in (RUNS, SWEEPS) for name in store.folders(prefix)))


def as_it_ran(store: Store, record: Record) -> Record:
    """Add the id of the run that its steps work on, once the first step has recorded the dataset id."""
    if not record.job or record.is_sweep or record.ran:
        return record
    from holdfast.model.hub import first_weights_digest

    outcome = outcome_of(store, record.job, "preprocess")
    if outcome is not None and outcome.result:
        with suppress(HoldfastError):  # a spec of another version, or weights that cannot be read from here
            spec = parse_spec(record.spec)
            ran = run_id(spec, outcome.result, record.salt, first_weights_digest(spec))
            return replace(record, ran=ran)
    return record


def sweep_records(store: Store) -> list[Record]:
    """The submissions of sweeps in the store."""
    return _records(store, (f"{SWEEPS}{name}" for name in store.folders(SWEEPS)))


def find_submission(store: Store, run: str, spec: Spec) -> Record | None:
    """A submission that runs `spec` as the run `run`: its own, or one of a sweep with it as a trial. Those with code
    from this machine come first."""
    own = find_record(store, run)
    if own is not None and own.request.spec == spec:
        return own
    found = [record for record in sweep_records(store) if _has_trial(record.request, spec)]
    return next((record for record in found if is_submitted(record.request.executed)), found[0] if found else None)


def _has_trial(request: RunRequest, spec: Spec) -> bool:
    with suppress(SpecError):  # another version had other rules
        return any(request.spec.with_overrides(changes) == spec for changes in request.trials)
    return False


def _records(store: Store, folders: Iterable[str]) -> list[Record]:
    """The readable submissions in folders of runs and sweeps."""

    def read(folder: str) -> Record | None:
        try:
            return read_record(read_bounded(store, f"{folder}/{FILE}"))
        except (MissingError, DataError):
            return None

    return [record for record in in_parallel(read, folders, CONCURRENT_READS) if record is not None]


def read_record(content: bytes | dict[str, Any]) -> Record | None:
    """The record in JSON; None for one of another version."""
    with suppress(DataError):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        return parse_json(data, Record, FILE)
    return None


def process_start(pid: int) -> float | None:
    """The start of a process in seconds since boot, which clock changes do not affect; None if it does not exist."""
    import psutil

    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(pid)
        for _ in range(100):
            booted = psutil.boot_time()  # psutil adds this to the kernel's value
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
