"""This machine as a backend (`holdfast.pipelines.backends.interface`): a run is a process and a log file.

Submitting runs in the foreground, to the end. The store has the state of a run: its record names the process and the
machine, and its objects show the progress.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.pipelines.backends import capabilities
from holdfast.pipelines.backends.interface import CANCELED, FAILED, RUNNING, SUCCEEDED, RunStatus, is_step
from holdfast.pipelines.backends.rank_shell import RankShell
from holdfast.pipelines.backends.record import Record, find_record, log_file, read_record, sweep_records
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.paths import store_root
from holdfast.pipelines.view.catalog import all_runs, find_run
from holdfast.pipelines.view.run_record import RunRecord, read_run
from holdfast.runtime.environment import store_url
from holdfast.runtime.output import CHUNK, LineCutter
from holdfast.spec.errors import HoldfastError, MissingError
from holdfast.steps import STEPS
from holdfast.store import Store, open_store

if TYPE_CHECKING:
    from rich.console import Console

UNFINISHED = "UNFINISHED"  # not running; submitting it again resumes it
POLL_SECONDS = 0.5
_LINE = re.compile(r"\[(?P<name>[a-z][A-Za-z0-9._-]*)\] ?(?P<line>.*)")  # output of a step, see StepProcess
_ENDED = {"failed": FAILED, "cancelled": CANCELED}


class Local:
    """The runs of this machine in one store."""

    name = "local"
    capabilities = capabilities.LOCAL

    def __init__(self, store: str = "") -> None:
        self._url = store_root(store) if store else store_url()
        self.console: Console | None = None  # where a run shows its progress; default: standard output
        self.again = ""  # the command that resumes a run, without its salt; default: `holdfast resume`

    @property
    def hosts(self) -> str:
        """File of the machines that train; empty: this machine."""
        return ""

    def objects(self, request: RunRequest) -> list[dict[str, Any]]:
        """The nodes of the DAG in the order of their start, and the arguments of the steps."""
        from holdfast.pipelines.backends.local.worker import local_plan

        nodes = [{**asdict(node), "name": node.name} for node in local_plan(request.spec, request.trials)]
        if request.search is not None:
            rungs = request.search.rungs(request.spec.training.steps)
            return [{"search": asdict(request.search), "rungs": rungs}, {"arguments": request.parameters()}]
        return [{"nodes": nodes}, {"arguments": request.parameters()}]

    def submit(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """Run `request` in the foreground and show it on the terminal. A run that has finished before is only shown."""
        from holdfast.pipelines.backends.local.run import finished, identified, run_to_end
        from holdfast.pipelines.backends.local.trial_series import run_sweep

        if request.is_sweep:
            return run_sweep(request, self.console)
        local_run = identified(request.spec, request.store, request.salt, request.replan, self.hosts)
        previous = finished(local_run)
        self._url = local_run.store_url
        again = f"{self.again} --salt {local_run.salt}" if self.again and local_run.salt else self.again
        code = run_to_end(local_run, again or f"holdfast resume {local_run.run_id}", self.console)
        try:
            status = self.status(local_run.run_id)
        except HoldfastError as error:  # the store became unreachable
            status = RunStatus(self.name, local_run.run_id, local_run.spec.name, FAILED, message=str(error))
        return replace(status, exit_code=int(code)), previous is None

    def status(self, run: str) -> RunStatus:
        """The current status of a run or sweep, or its progress if it does not run."""
        store = open_store(self._url)
        record = find_record(store, run)
        record = record and record.newest_alive
        if record and record.is_sweep:
            return _sweep_status(record, store)
        run_record = read_run(store, record.run_id) if record else find_run(store, run)
        assert run_record is not None
        return self._status(run_record, record if record and record.backend == self.name else None)

    def logs(self, run: str, step: str = "", *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """The log of the newest try on this machine, or the output of one step.

        For the step `train` of a run, the output of its ranks, launch by launch.
        """
        record = self._record(run)
        files, ranks, has_lines = [log_file(record)], step == "train" and not record.is_sweep, False
        if ranks:
            files = sorted(files[0].parent.glob("launch-*.log"))
        for file in files:
            for name, line in _by_step(_lines(file, record if follow else None)):
                if ranks or is_step(step, name):
                    has_lines = True
                    yield ("train" if ranks else name or "run"), line
        if step and not has_lines:
            raise MissingError(f"{record.run_id}: the step {step} has not begun in the newest try on this machine")

    def cancel(self, run: str) -> tuple[RunStatus, bool]:
        """Send SIGTERM to the run's process. The step saves and exits."""
        record = self._record(run)
        running = record.alive
        if running:
            os.kill(record.pid, signal.SIGTERM)
        return self.status(record.run_id), running

    def list(self) -> list[RunStatus]:
        """The runs in the store that this backend made, newest first."""
        store = open_store(self._url)
        pairs = [
            (run_record, read_record(run_record.submission)) for run_record in all_runs(store) if run_record.submission
        ]
        statuses = [
            (record, self._status(run_record, record.newest_alive))
            for run_record, record in pairs
            if record and record.backend == self.name
        ]
        sweeps = [record.newest_alive for record in sweep_records(store) if record.backend == self.name]
        statuses += [(record, _sweep_status(record, store)) for record in sweeps]
        return [status for _, status in sorted(statuses, key=lambda one: -one[0].submitted)]

    def rank_shell(self, shell: RankShell) -> Sequence[str]:
        """The command itself: the rank is on this machine."""
        return shell.on_node(sys.executable)

    def resume(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """Run it again. It resumes where it was."""
        return self.submit(request)

    def _record(self, run: str) -> Record:
        record = find_record(open_store(self._url), run)
        if record is None or record.backend != self.name:
            raise MissingError(f"{run!r}: no run of this machine in {self._url} has that id or name")
        return record.newest_alive

    def _status(self, found: RunRecord, record: Record | None) -> RunStatus:
        from holdfast.pipelines.backends.local.run import code_of, steps_of

        log, steps = (record.log, steps_of(record)) if record else ("", ())
        if record is not None and record.alive:
            return RunStatus(self.name, found.run_id, found.name, RUNNING, log, "", steps)
        done = found.registration is not None or found.word not in ("", "blessed")
        if done or (not found.is_evaluated and found.result is not None):
            return RunStatus(self.name, found.run_id, found.name, SUCCEEDED, log, "", steps, int(code_of(found)))
        summary = found.summary if record is None or found.summary.get("ended", 0.0) >= record.submitted else {}
        state, reason = _ENDED.get(str(summary.get("status", "")), UNFINISHED), str(summary.get("reason", ""))
        return RunStatus(self.name, found.run_id, found.name, state, log, reason, steps, summary.get("exit_code"))


def _sweep_status(record: Record, store: Store) -> RunStatus:
    from holdfast.pipelines.backends.local.trial_series import sweep_status

    return sweep_status(record, store)


def _by_step(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Each line of the log of a run or sweep, and the step that wrote it; empty for lines of the runner."""
    for line in lines:
        match = _LINE.fullmatch(line)
        is_step_line = match is not None and match["name"].partition("-")[0] in STEPS
        yield (match["name"], match["line"]) if match and is_step_line else ("", line)


def _lines(file: Path, following: Record | None) -> Iterator[str]:
    """The lines of a file; with a run to follow, until it has ended."""
    cutter = LineCutter()
    with file.open(encoding="utf-8", errors="replace") as content:
        while True:
            alive = following is not None and following.alive  # read first, so the last pass misses no line
            while piece := content.read(CHUNK):
                yield from (line.decode(errors="replace") for line in cutter.add(piece.encode()))
            if not alive:
                break
            time.sleep(POLL_SECONDS)
    yield from (line.decode(errors="replace") for line in cutter.rest())
