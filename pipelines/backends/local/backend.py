"""This machine behind the protocol of `holdfast.pipelines.backends.interface`: a run is a process and a log file.

Submitting runs in the foreground, to the end. What is known of a run afterwards stands in the store: its record says
which process of which machine made it, and the rest of its objects how far it came.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.components.runtime.environment import store_url
from holdfast.components.runtime.outcomes import read_outcomes
from holdfast.components.spec.errors import MissingError
from holdfast.components.store import open_store
from holdfast.pipelines.backends.interface import CANCELED, FAILED, RUNNING, SUCCEEDED, RunStatus, StepStatus
from holdfast.pipelines.backends.order import Order
from holdfast.pipelines.backends.record import Record, find_record, log_file, read_record
from holdfast.pipelines.paths import store_root
from holdfast.pipelines.view.catalog import RunRecord, all_runs, find_run, read_run

UNFINISHED = "UNFINISHED"  # it is not running, and submitting it again goes on with it
POLL_SECONDS = 0.5
_ENDED = {"failed": FAILED, "cancelled": CANCELED}


class Local:
    """The runs of this machine that are kept in one store."""

    name = "local"

    def __init__(self, store: str = "") -> None:
        self._url = store_root(store) if store else store_url()

    def objects(self, order: Order) -> list[dict[str, Any]]:
        """The compiled pipeline that `kfp.local` executes, and the arguments of this run."""
        from holdfast.pipelines.backends.kubeflow.compile import pipeline_ir

        return [*pipeline_ir(order.spec, order.image or None), {"arguments": order.parameters()}]

    def submit(self, order: Order) -> tuple[RunStatus, bool]:
        """Run `order` here and now, and show it on the terminal. A run that was finished before is only shown."""
        from holdfast.pipelines.backends.local.run import finished, go_on, identified

        made = identified(order.spec, order.store, order.salt, order.replan)
        before = finished(made)
        self._url = made.store_url
        code = go_on(made, again=f"holdfast resume {made.run_id}")
        return replace(self.status(made.run_id), exit_code=int(code)), before is None

    def status(self, run: str) -> RunStatus:
        """Whether it runs now, and if not how far it came."""
        store = open_store(self._url)
        record = find_record(store, run)
        found = read_run(store, record.run_id) if record else find_run(store, run)
        assert found is not None
        return _status(found, record if record and record.backend == self.name else None)

    def logs(self, run: str, step: str = "", *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """The log of the newest try on this machine. For the step `train`: what its ranks wrote, launch by launch."""
        record = self._record(run)
        files = [log_file(record)]
        if step == "train":
            files = sorted(files[0].parent.glob("launch-*.log"))
        elif step:
            raise MissingError(f"{step}: on one machine its lines stand in the log of the run; leave --step out")
        if not files:
            raise MissingError(f"{record.run_id}: the train step has not begun on this machine")
        for file in files:
            yield from ((step or "run", line) for line in _lines(file, record if follow else None))

    def cancel(self, run: str) -> tuple[RunStatus, bool]:
        """Send SIGTERM to the run's process: the step saves and leaves."""
        record = self._record(run)
        running = record.alive
        if running:
            os.kill(record.pid, signal.SIGTERM)
        return self.status(record.run_id), running

    def list(self) -> list[RunStatus]:
        """The runs in the store that this backend made, newest first."""
        found = [(one, read_record(one.submission)) for one in all_runs(open_store(self._url)) if one.submission]
        return [_status(one, record) for one, record in found if record and record.backend == self.name]

    def resume(self, order: Order) -> tuple[RunStatus, bool]:
        """Run it again: it goes on where it was."""
        return self.submit(order)

    def _record(self, run: str) -> Record:
        record = find_record(open_store(self._url), run)
        if record is None or record.backend != self.name:
            raise MissingError(f"{run!r}: no run of this machine in {self._url} has that id or name")
        return record


def _status(found: RunRecord, record: Record | None) -> RunStatus:
    alive = record is not None and record.alive
    done = found.registration is not None or found.verdict is not None
    if alive:
        state = RUNNING
    elif done:
        state = SUCCEEDED
    else:
        state = _ENDED.get(str(found.summary.get("status", "")), UNFINISHED)
    message = "" if alive or done else str(found.summary.get("reason", ""))
    steps = _steps(Path(record.outcomes)) if record and alive else ()
    return RunStatus("local", found.run_id, found.name, state, record.log if record else "", message, steps)


def _steps(outcomes: Path) -> tuple[StepStatus, ...]:
    """The steps of a run that is running now."""
    return tuple(
        StepStatus(
            one.step,
            RUNNING if one.ended is None else SUCCEEDED if one.exit_code == 0 else FAILED,
            (one.ended or time.time()) - one.started,
            one.reason,
        )
        for one in (read_outcomes(outcomes) if outcomes.is_dir() else ())
    )


def _lines(file: Path, following: Record | None) -> Iterator[str]:
    """The lines of a file; with a run to follow, until that has ended."""
    with file.open(encoding="utf-8", errors="replace") as content:
        rest = ""
        while True:
            alive = following is not None and following.alive  # asked before reading: what comes later is read again
            for line in content:
                rest += line
                if rest.endswith("\n"):
                    yield rest.rstrip("\n")
                    rest = ""
            if not alive:
                break
            time.sleep(POLL_SECONDS)
        if rest:
            yield rest
