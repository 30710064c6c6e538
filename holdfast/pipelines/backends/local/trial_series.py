"""A sweep on this machine, one trial after another.

A sweep is shown from the store if its comparison has all trials and its best model, if blessed, is registered. A sweep
that was interrupted, or that has failed trials, resumes: trained or judged work is not repeated.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from holdfast.launch.choose import require_this_machine
from holdfast.pipelines.backends.interface import CANCELED, FAILED, RUNNING, SUCCEEDED, RunStatus
from holdfast.pipelines.backends.local import worker
from holdfast.pipelines.backends.local.follow import Signals, follow
from holdfast.pipelines.backends.local.run import (
    LocalRun,
    finished,
    identified,
    keep_here,
    keep_outcomes,
    known_code,
    steps_of,
    tail_of,
    worker_request,
)
from holdfast.pipelines.backends.record import Record
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.view.comparison import print_comparison
from holdfast.pipelines.view.terminal import Board, SafeConsole
from holdfast.runtime.environment import log_dir, make_folder
from holdfast.runtime.temporary import temporary_folder
from holdfast.scoring import settings_key
from holdfast.scoring.comparison import Comparison, read_comparison, sweep_id, trials_of
from holdfast.spec import ExitCode
from holdfast.steps.outcomes import EXIT_HANDLER, KILLED, Outcome, read_outcomes
from holdfast.store import Store

UNFINISHED = "UNFINISHED"


def run_sweep(request: RunRequest, console: Console | None = None) -> tuple[RunStatus, bool]:
    """Run the trials of `request` to their comparison, or show it immediately if it exists.

    Returns the status, and whether any work was done. Its exit code is OK, NOT_BLESSED when no trial is blessed,
    TRIALS_FAILED when some failed, or the code of what stopped it.
    """
    console = console or SafeConsole()
    base = identified(request.spec, request.store, request.salt, request.replan)
    if request.search is None:
        identity = sweep_id([run for *_, run in trials_of(base.spec, request.trials, base.dataset_id, base.salt)])
    else:
        identity = request.search.identity(base.run_id, settings_key(base.spec))
    count = len(request.trials) if request.search is None else request.search.trials
    request = replace(request, spec=base.spec, store=base.store_url, run_id=identity)
    if (finished_comparison := _finished(base, identity)) is not None:
        print_comparison(console, finished_comparison, base.store)
        return _compared(finished_comparison, request.title), False
    require_this_machine(base.spec)
    log = log_dir(identity) / f"run-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"
    make_folder(log.parent)
    console.print(f"{base.spec.name}  sweep {identity}, {count} trials\nlog {log}\n", highlight=False)
    outcomes, signal = _execute(request, log, console)
    code = _conclude(request, base.store, outcomes, signal, log, console)
    comparison = (
        read_comparison(base.store, identity) if code in (0, ExitCode.NOT_BLESSED, ExitCode.TRIALS_FAILED) else None
    )
    status = (
        _compared(comparison, request.title)
        if comparison
        else RunStatus("local", identity, request.title, FAILED, str(log))
    )
    return replace(status, exit_code=int(code)), True


def sweep_status(record: Record, store: Store) -> RunStatus:
    """The status of a sweep of this machine: whether it runs now, and otherwise its progress."""
    steps = steps_of(record)
    if record.alive:
        return RunStatus("local", record.run_id, record.name, RUNNING, record.log, "", steps)
    if (comparison := read_comparison(store, record.run_id)) is not None:
        return replace(_compared(comparison, record.name), link=record.log, steps=steps)
    summary = record.ending(store)
    state = {"failed": FAILED, "cancelled": CANCELED}.get(str(summary.get("status", "")), UNFINISHED)
    reason, code = str(summary.get("reason", "")), summary.get("exit_code")
    return RunStatus("local", record.run_id, record.name, state, record.log, reason, steps, code)


def _compared(found: Comparison, name: str) -> RunStatus:
    message = "; ".join(trial.text for trial in found.failed)
    state, code = FAILED if found.failed else SUCCEEDED, int(_code_of(found))
    return RunStatus("local", found.sweep_id, name, state, message=message, exit_code=code)


def _conclude(
    request: RunRequest, store: Store, outcomes: list[Outcome], signal: int, log: Path, console: Console
) -> ExitCode:
    """Show the comparison if this execution made one, or the reason why it did not."""
    stopped_by = [one for one in outcomes if one.exit_code != 0 and not one.part and one.step != EXIT_HANDLER]
    compared = not signal and any(outcome.step == "compare" and outcome.exit_code == 0 for outcome in outcomes)
    if compared and not stopped_by and (comparison := read_comparison(store, request.run_id)) is not None:
        print_comparison(console, comparison, store)
        return _code_of(comparison)
    failed = next(iter(stopped_by), None) or next((outcome for outcome in outcomes if outcome.exit_code != 0), None)
    reason = f"{failed.name}: {failed.reason or KILLED}" if failed else "the end of the log:\n" + tail_of(log)
    console.print(f"\nerror: {reason}\n\nlog {log}\nThe same command resumes it.", markup=False, highlight=False)
    if signal:
        return ExitCode(128 + signal)
    return ExitCode.UNEXPECTED if failed is None or failed.exit_code is None else known_code(failed.exit_code)


def _finished(base: LocalRun, identity: str) -> Comparison | None:
    """The comparison, if no trial failed and no work is left for the best one."""
    comparison = read_comparison(base.store, identity)
    if comparison is None or comparison.failed:
        return None
    best = replace(base, spec=base.spec.with_overrides(comparison.best.changes), run_id=comparison.best.run_id)
    return comparison if finished(best) is not None else None


def _execute(request: RunRequest, log: Path, console: Console) -> tuple[list[Outcome], int]:
    """Run the steps. Returns their outcomes, and the signal that stopped them or 0."""
    with temporary_folder() as name:
        folder = Path(name)
        (folder / worker.OUTCOMES_FOLDER).mkdir()
        worker_request(request).write(folder)
        keep_here(request, log, folder / worker.OUTCOMES_FOLDER)
        with Board(console) as board, Signals() as signals:
            follow(folder, log, "", board, signals)  # empty: the sweep has many runs
        outcomes = read_outcomes(folder / worker.OUTCOMES_FOLDER)
        keep_outcomes(log, outcomes)
        return outcomes, next(iter(signals.received), 0)


def _code_of(found: Comparison) -> ExitCode:
    if found.failed:
        return ExitCode.TRIALS_FAILED
    return ExitCode.OK if found.best.word == "blessed" else ExitCode.NOT_BLESSED
