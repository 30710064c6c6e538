"""Where a run was submitted, kept beside the run in the store, so that `status`, `logs`, `cancel` and `resume` find it.

`runs/<run-id>/backend.json`; the last submission counts. Promises that a store which cannot be reached from here never
fails a submission, and that no password is kept.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.components.runtime.secrets import redact
from holdfast.components.spec import dump_spec, parse_spec
from holdfast.components.spec.errors import HoldfastError, MissingError
from holdfast.components.store import Store, layout, open_store
from holdfast.pipelines.backends.interface import RunStatus, require_one_run
from holdfast.pipelines.backends.order import Order

RUNS, FILE = "runs/", "backend.json"
DEADLINE = 20.0  # seconds for a record, all retries included


@dataclass(frozen=True)
class Record:
    """A submission: to which backend, what it is called there, and what was asked for."""

    backend: str
    id: str
    run_id: str
    name: str  # of the spec
    spec: str
    submitted: float  # unix seconds
    store: str = ""
    salt: str = ""
    image: str = ""
    service_account: str = ""
    replan: bool = False
    endpoint: str = ""  # of Kubeflow
    namespace: str = ""  # of Kubeflow's users, or of Kubernetes
    host: str = ""  # the machine of a local run, and its process there
    pid: int = 0
    began: float = 0.0  # unix seconds: a process is known by its number and its start
    log: str = ""
    outcomes: str = ""  # the folder where its steps say how they are, while it runs

    @property
    def order(self) -> Order:
        """What was asked for, to ask for it again."""
        return Order(
            parse_spec(self.spec), self.store, self.salt, self.run_id, service_account=self.service_account,
            image=self.image, replan=self.replan,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        """Whether a local run goes on: its process is there, and so is the folder that it removes at its end (the
        process may be somebody's notebook, which stays). False for another machine's, of which nothing is known."""
        here = self.host == socket.gethostname() and Path(self.outcomes).is_dir()
        return here and process_start(self.pid) == self.began

    def write(self, store: Store) -> None:
        """Keep it beside the run."""
        hidden = replace(self, endpoint=redact(self.endpoint))
        store.put(layout.run(self.run_id, FILE), json.dumps(asdict(hidden), ensure_ascii=False).encode())


def record_of(order: Order, backend: str, identity: str, endpoint: str = "", namespace: str = "") -> Record:
    """The record of a submission that was made now."""
    return Record(
        backend, identity, order.run_id, order.spec.name, dump_spec(order.spec), time.time(), order.store, order.salt,
        order.image, order.service_account, order.replan, endpoint, namespace,
    )  # fmt: skip


def keep(record: Record, url: str) -> str:
    """Write a record into the store at `url`. Returns why that failed; empty if it did not, or if there is nothing to
    keep it under: a run that could not be identified here."""
    if not record.run_id or not url:
        return ""
    try:
        record.write(open_store(url, deadline=DEADLINE))
    except (HoldfastError, OSError) as error:
        return str(error)
    return ""


def keep_submission(made: RunStatus, wanted: Order, endpoint: str, namespace: str, url: str) -> str:
    """Write down where `wanted` was submitted. Returns why that failed, as `keep` does. A run of this machine keeps its
    own record, which says more."""
    if made.backend == "local":
        return ""
    if made.backend == "kubeflow":
        endpoint = endpoint or os.environ.get("KFP_ENDPOINT", "")
    return keep(record_of(wanted, made.backend, made.id, endpoint, namespace), url)


def find_record(store: Store, wanted: str) -> Record | None:
    """The newest submission whose run id begins with `wanted`, or which is so called by its backend or its spec."""
    near = [store.list(f"{RUNS}{wanted}")] if wanted.isalnum() else []
    for listing in (*near, store.list(RUNS)) if wanted else ():
        found = [read_record(store.get(info.key)) for info in listing if info.key.endswith(f"/{FILE}")]
        fitting = [one for one in found if one and (one.run_id.startswith(wanted) or wanted in (one.id, one.name))]
        require_one_run(wanted, (one.run_id for one in fitting if one.name != wanted))
        if fitting:
            return max(fitting, key=lambda one: one.submitted)
    return None


def read_record(content: bytes | dict[str, Any]) -> Record | None:
    """The record that JSON holds; None for one that another version wrote."""
    with suppress(ValueError, TypeError):
        return Record(**(json.loads(content) if isinstance(content, bytes) else content))
    return None


def process_start(pid: int) -> float | None:
    """When a process of this machine began, in unix seconds; None if there is none of that number."""
    import psutil

    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(pid)
        if pid and process.status() != psutil.STATUS_ZOMBIE:
            return process.create_time()
    return None


def log_file(record: Record) -> Path:
    """The log of a local run on this machine. Raises MissingError."""
    path = Path(record.log)
    if not path.is_file():
        raise MissingError(f"{record.log}: is not there; the run was made on {record.host}")
    return path
