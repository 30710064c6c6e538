"""A run on this machine: the steps of the DAG as processes, terminal output, one log file, a summary.

A finished run is shown from the store, and nothing starts. A signal reaches the step, which saves and exits. The
command ends with the exit code of the failed step and its reason.
"""

import errno
import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from holdfast.launch.choose import require_no_spares, require_this_machine
from holdfast.launch.interface import UNSAVED
from holdfast.pipelines.backends.interface import FAILED, RUNNING, SUCCEEDED, StepStatus
from holdfast.pipelines.backends.local import worker
from holdfast.pipelines.backends.local.follow import Signals, follow
from holdfast.pipelines.backends.record import Record, keep, process_start, record_of
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.paths import store_root, with_absolute_paths
from holdfast.pipelines.view.run_record import RunRecord, read_run
from holdfast.pipelines.view.summary import print_summary
from holdfast.pipelines.view.terminal import Board, SafeConsole
from holdfast.runtime.environment import has_mlflow, log_dir, make_folder, store_url
from holdfast.runtime.output import end_of_file
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec import ExitCode, Spec, run_id
from holdfast.spec.errors import AccessDeniedError, DataError, HoldfastError, MissingError, NoSpaceError
from holdfast.spec.json_parsing import parse_json
from holdfast.spec.load import dump_written
from holdfast.steps.outcomes import KILLED, Outcome, read_outcomes
from holdfast.store import Store, layout, open_store

TAIL_LINES = 15
WORKER_KILLED = "the process that runs the pipeline was killed: out of memory, or ended by a user"


@dataclass(frozen=True)
class LocalRun:
    """An identified run and everything that determines its identity and its store."""

    spec: Spec
    store_url: str
    dataset_id: str
    run_id: str
    salt: str
    replan: bool = False
    hosts: str = ""  # file of the machines that train; empty: this machine
    first_weights: str = ""  # digest of the weights that it starts from, if they decide the run id

    @property
    def store(self) -> Store:
        """The store of the run."""
        return open_store(self.store_url)


def identified(spec: Spec, store: str = "", salt: str = "", replan: bool = False, hosts: str = "") -> LocalRun:
    """Identify the run of a spec. Relative paths start at the working directory. Raises what `identify` raises."""
    from holdfast.corpus import identify
    from holdfast.model.hub import first_weights_digest

    spec = with_absolute_paths(spec)
    if spec.parallel.auto:
        from holdfast.planning.auto import best

        best(spec, None, here=not hosts)  # fails early if no plan exists
    if spec.model.init_from is not None:
        from holdfast.corpus.starting_model import require_start

        require_start(spec)
    dataset_id, weights = identify(spec), first_weights_digest(spec)
    url = store_root(store) if store else store_url(spec)
    identity = run_id(spec, dataset_id, salt, weights)
    return LocalRun(spec, url, dataset_id, identity, salt, replan, hosts, first_weights=weights)


def run_to_end(made: LocalRun, again: str, console: Console | None = None) -> ExitCode:
    """Run an identified run to its end, or show the summary immediately if it has finished before.

    `again` is the command that resumes this run. Returns OK, NOT_BLESSED or the code of the failure. Raises errors that
    precede the run.
    """
    console = console or SafeConsole()
    if (record := finished(made)) is not None:
        print_summary(console, made.store, record, _newest_log(made.run_id))
        return code_of(record)
    require_machines(made)
    from holdfast.spec.tree import require_trackers
    from holdfast.tracking import require_usable

    require_trackers(made.spec)
    if made.spec.is_evaluated:
        require_usable(made.spec)
    return _execute(made, console, again)


def require_machines(made: LocalRun) -> None:
    """Raises SpecError if the run needs more machines than it has."""
    if made.hosts:
        from holdfast.launch.ssh.hosts import read_hosts, require_enough

        require_no_spares(made.spec.cluster, "ssh")
        require_enough(made.spec.cluster, read_hosts(Path(made.hosts)))
    else:
        require_this_machine(made.spec)


def finished(made: LocalRun) -> RunRecord | None:
    """The record of the run if no work is left; otherwise None.

    No work is left if the exported model exists, and the model is registered in an existing MLflow or not blessed.
    Raises DataError for a damaged export.
    """
    from holdfast.model.exported import require_intact
    from holdfast.scoring import settings_key
    from holdfast.tracking import registration_key

    if not made.spec.is_evaluated:  # its DAG has no other step than train
        record = read_run(made.store, made.run_id)
        return record if record is not None and record.result is not None else None
    record = read_run(made.store, made.run_id, settings_key(made.spec), registration_key(made.spec.registered_model))
    if record is None or record.result is None or record.verdict is None or record.has_damaged_verdict:
        return None
    if record.word == "blessed" and (not (record.registration or {}).get("alias") or not has_mlflow()):
        return None
    try:
        export = (str(record.result.get(name, "")) for name in ("export", "export_digest"))
        require_intact(made.store, *export, changed=True)
    except MissingError:  # the train step writes it again
        return None
    return record


def _execute(made: LocalRun, console: Console, again: str) -> ExitCode:
    log = log_dir(made.run_id) / f"run-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"
    try:
        make_folder(log.parent)
        log.touch()
    except OSError as error:
        kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else AccessDeniedError
        raise kind(f"{log.parent}: cannot be written: {error.strerror}; set HOLDFAST_HOME to another folder") from None
    console.print(f"[bold]{made.spec.name}[/bold]  run {made.run_id}", highlight=False)
    console.print(f"[dim]log {log}[/dim]\n", highlight=False, soft_wrap=True)
    if earlier := _earlier_run(made):
        from holdfast.telemetry.run_metadata import earlier_run_note

        console.print(f"note: {earlier_run_note(earlier)}\n", markup=False, highlight=False, soft_wrap=True)
    with temporary_folder() as name:
        folder = Path(name)
        (folder / worker.OUTCOMES_FOLDER).mkdir()
        request = RunRequest(made.spec, made.store_url, made.salt, made.run_id, replan=made.replan)
        worker_request(request, made.hosts).write(folder)
        keep_here(request, log, folder / worker.OUTCOMES_FOLDER, made.hosts)
        with Board(console) as board, Signals() as signals:
            killed = follow(folder, log, made.run_id, board, signals)
        outcomes = read_outcomes(folder / worker.OUTCOMES_FOLDER)
        keep_outcomes(log, outcomes)
    return _conclude(made, console, outcomes, log, signals.received, killed, again)


def _earlier_run(made: LocalRun) -> str:
    """The run of the same inputs by an older Holdfast, if the run is a new one; otherwise empty."""
    from holdfast.telemetry.run_metadata import find_earlier_run

    with suppress(HoldfastError):  # the first step reports an unavailable store
        if made.store.stat(layout.run(made.run_id, "run.json")) is None:
            return find_earlier_run(made.store, made.spec, made.dataset_id, made.salt, made.first_weights)
    return ""


def worker_request(request: RunRequest, hosts: str = "") -> worker.Request:
    """The part of a request that the worker reads. The spec is as its author wrote it, as on a cluster."""
    sweep = request.run_id if request.search is not None else ""
    return worker.Request(
        dump_written(request.spec),
        request.store,
        request.salt,
        request.replan,
        request.trials,
        hosts,
        search=request.search,
        search_id=sweep,
    )


def keep_here(request: RunRequest, log: Path, outcomes: Path, hosts: str = "") -> None:
    """Record in the store which process of which machine makes the run or sweep, for `holdfast show` and similar."""
    pid = os.getpid()
    record = replace(
        record_of(request, "ssh" if hosts else "local", request.run_id, endpoint=hosts),
        host=socket.gethostname(),
        pid=pid,
        began=process_start(pid) or 0.0,
        log=str(log),
        outcomes=str(outcomes),
    )
    keep(record, request.store)  # the first step reports an unavailable store, with its exit code


def _conclude(
    made: LocalRun,
    console: Console,
    outcomes: Sequence[Outcome],
    log: Path,
    received: Sequence[int],
    killed: bool,
    again: str,
) -> ExitCode:
    if (record := finished(made)) is not None and all(o.exit_code == 0 for o in outcomes if o.step != "notify"):
        print_summary(console, made.store, record, log)
        return code_of(record)
    failed = next((outcome for outcome in outcomes if outcome.exit_code != 0 and outcome.step != "notify"), None)
    if received:
        saved = failed is not None and failed.exit_code == ExitCode.PREEMPTED
        code = ExitCode.PREEMPTED if saved else ExitCode(128 + received[0])
        state = "a checkpoint is saved" if saved else "what was finished is kept"
        if failed is not None and UNSAVED in failed.reason:
            state = f"{UNSAVED} = {made.spec.checkpoint.grace_seconds:g}; earlier checkpoints are kept"
        _say(console, f"\nstopped: {state}. To resume, run: {again}")
        return code
    if killed and failed is not None and failed.exit_code == ExitCode.PREEMPTED:
        reason, code = f"{WORKER_KILLED}; {failed.step} saved a checkpoint and left", ExitCode.PREEMPTED
    elif killed and (failed is None or failed.exit_code in (None, ExitCode.TERMINATED)):
        reason, code = WORKER_KILLED, ExitCode.KILLED
    elif failed is None:
        reason = "the pipeline ended without a result; the end of its log:\n" + tail_of(log)
        code = ExitCode.UNEXPECTED
    elif failed.exit_code is None:
        reason, code = f"{failed.step}: {KILLED}", ExitCode.KILLED
    else:
        reason, code = f"{failed.step}: {failed.reason}", known_code(failed.exit_code)
    _say(console, f"\nerror: {reason}\n\nlog {log}")
    if code.retryable:
        _say(console, f"This can pass. To resume, run: {again}")
    return code


def keep_outcomes(log: Path, outcomes: Iterable[Outcome]) -> None:
    """Keep the outcomes of the steps next to the log, for `holdfast show` of an ended run."""
    with suppress(OSError):  # the log has them too
        entries = ", ".join(outcome.as_json().decode() for outcome in outcomes)
        _kept(log).write_text(f"[{entries}]", encoding="utf-8")


def steps_of(record: Record) -> tuple[StepStatus, ...]:
    """The steps of a run or sweep of this machine: their current or their final states."""
    if record.alive:
        return tuple(_step_of(outcome, RUNNING) for outcome in read_outcomes(Path(record.outcomes)))
    try:
        path = _kept(Path(record.log))
        return tuple(_step_of(outcome, FAILED) for outcome in parse_json(path.read_bytes(), list[Outcome], str(path)))
    except (OSError, DataError):  # from another machine, or killed
        return ()


def _kept(log: Path) -> Path:
    return log.with_suffix(".steps.json")


def _step_of(one: Outcome, open_ended: str) -> StepStatus:
    """The status of a step from its outcome; without an end its state is `open_ended`."""
    if one.ended is None and open_ended == FAILED:
        return StepStatus(one.name, FAILED, None, KILLED, exit_code=int(ExitCode.KILLED))
    state = open_ended if one.ended is None else SUCCEEDED if one.exit_code == 0 else FAILED
    return StepStatus(one.name, state, (one.ended or time.time()) - one.started, one.reason, exit_code=one.exit_code)


def known_code(code: int) -> ExitCode:
    """The code of the table, or UNEXPECTED."""
    try:
        return ExitCode(code)
    except ValueError:
        return ExitCode.UNEXPECTED


def code_of(record: RunRecord) -> ExitCode:
    """The exit code of the command for a run without remaining work."""
    return ExitCode.OK if record.word == "blessed" or not record.is_evaluated else ExitCode.NOT_BLESSED


def _newest_log(run: str) -> Path | None:
    return max(log_dir(run).glob("run-*.log"), key=lambda path: path.stat().st_mtime, default=None)


def tail_of(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(end_of_file(log, TAIL_LINES))


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
