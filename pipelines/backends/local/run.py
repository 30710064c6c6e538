"""Run a spec on this machine: the compiled pipeline in `kfp.local`, a calm terminal, one log file, a summary.

Promises that a run whose work is done is answered from the store without starting anything; that a signal reaches the
step, which saves and leaves; and that the command ends with the exit code of the step that failed, with its own reason.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from holdfast.components.launch.choose import require_this_machine
from holdfast.components.runtime.environment import log_dir, mlflow_is_there, store_url
from holdfast.components.runtime.outcomes import KILLED, Outcome, read_outcomes
from holdfast.components.spec import ExitCode, Spec, load_spec, run_id
from holdfast.components.spec.errors import AccessDeniedError, NoSpaceError
from holdfast.components.store import Store, open_store
from holdfast.pipelines.backends.local import worker
from holdfast.pipelines.backends.local.follow import Signals, follow
from holdfast.pipelines.backends.order import Order
from holdfast.pipelines.backends.record import keep, process_start, record_of
from holdfast.pipelines.paths import store_root, with_absolute_paths
from holdfast.pipelines.view.catalog import RunRecord, read_run
from holdfast.pipelines.view.summary import print_summary
from holdfast.pipelines.view.terminal import Board

TAIL_LINES = 15
WORKER_KILLED = "the process that runs the pipeline was killed: out of memory, or somebody ended it"


@dataclass(frozen=True)
class LocalRun:
    """A run that is identified, and may be made here: everything that decides what it is and where it goes."""

    spec: Spec
    store_url: str
    dataset_id: str
    run_id: str
    salt: str
    replan: bool = False

    @property
    def store(self) -> Store:
        """The store of the run."""
        return open_store(self.store_url)


def identified(spec: Spec, store: str = "", salt: str = "", replan: bool = False) -> LocalRun:
    """Identify the run of a spec, whose paths are meant from here. Raises what `identify` raises."""
    from holdfast.components.corpus import identify
    from holdfast.components.model.imported import weights_digest

    spec = with_absolute_paths(spec)
    dataset_id = identify(spec)
    url = store_root(store) if store else store_url(spec)
    return LocalRun(
        spec, url, dataset_id, run_id(spec, dataset_id, salt, weights_digest(spec.model.init_from)), salt, replan
    )


def run_locally(
    spec_path: Path,
    overrides: Sequence[str] = (),
    *,
    store: str = "",
    fresh: bool = False,
    salt: str = "",
    replan: bool = False,
    again: str = "the same command",
    console: Console | None = None,
) -> ExitCode:
    """Run the spec at `spec_path` to its end, or show the summary at once when that was done before.

    `fresh` draws a new salt, so that nothing done before counts; nothing is deleted. `again` is the command that goes
    on with this run. Returns OK, NOT_BLESSED or the code of what stopped it; raises what is wrong before it begins.
    """
    made = identified(load_spec(spec_path, overrides), store, secrets.token_hex(4) if fresh else salt, replan)
    if made.salt:
        again = f"{again} --salt {made.salt}"
    return go_on(made, again, console)


def go_on(made: LocalRun, again: str, console: Console | None = None) -> ExitCode:
    """As `run_locally`, for a run that is identified."""
    console = console or Console()
    if (record := finished(made)) is not None:
        print_summary(console, made.store, record, _newest_log(made.run_id))
        return _code_of(record)
    require_this_machine(made.spec)
    return _execute(made, console, again)


def finished(made: LocalRun) -> RunRecord | None:
    """The record of the run, if there is nothing left to do for it: the model is registered and MLflow has not been
    deleted since, or it was not blessed."""
    from holdfast.components.scoring import settings_key
    from holdfast.components.tracking import registration_key

    record = read_run(made.store, made.run_id, settings_key(made.spec), registration_key(made.spec.registered_model))
    if record is None or record.result is None or record.verdict is None:
        return None
    if record.word == "blessed" and (record.registration is None or not mlflow_is_there()):
        return None
    return record


def _execute(made: LocalRun, console: Console, again: str) -> ExitCode:
    from holdfast.pipelines.backends.kubeflow.compile import compile_pipeline

    log = log_dir(made.run_id) / f"run-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
    except OSError as error:
        kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else AccessDeniedError
        raise kind(f"{log.parent}: cannot be written: {error.strerror}; set HOLDFAST_HOME to another folder") from None
    console.print(f"[bold]{made.spec.name}[/bold]  run {made.run_id}", highlight=False)
    console.print(f"[dim]log {log}[/dim]\n", highlight=False, soft_wrap=True)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
    try:
        (folder / worker.OUTCOMES_FOLDER).mkdir()
        compile_pipeline(made.spec, folder / worker.PIPELINE)
        order = Order(made.spec, made.store_url, made.salt, made.run_id, replan=made.replan)
        (folder / worker.ARGUMENTS).write_text(json.dumps(order.parameters()), encoding="utf-8")
        _record(order, log, folder / worker.OUTCOMES_FOLDER)
        with Board(console) as board, Signals() as signals:
            killed = follow(folder, log, made.run_id, board, signals)
        outcomes = read_outcomes(folder / worker.OUTCOMES_FOLDER)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _conclude(made, console, outcomes, log, signals.received, killed, again)


def _record(order: Order, log: Path, outcomes: Path) -> None:
    """Keep beside the run which process of which machine makes it, for `holdfast status`, `logs` and `cancel`."""
    pid = os.getpid()
    record = replace(
        record_of(order, "local", order.run_id), host=socket.gethostname(), pid=pid, began=process_start(pid) or 0.0,
        log=str(log), outcomes=str(outcomes),
    )  # fmt: skip
    keep(record, order.store)  # a store that is away is what the first step says, with its code


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
        return _code_of(record)
    failed = next((outcome for outcome in outcomes if outcome.exit_code != 0 and outcome.step != "notify"), None)
    if received:
        saved = failed is not None and failed.exit_code == ExitCode.PREEMPTED
        code = ExitCode.PREEMPTED if saved else ExitCode(128 + received[0])
        state = "a checkpoint is saved" if saved else "what was finished is kept"
        _say(console, f"\nstopped: {state}. To go on, run: {again}")
        return code
    if killed and failed is not None and failed.exit_code == ExitCode.PREEMPTED:
        reason, code = f"{WORKER_KILLED}; {failed.step} saved a checkpoint and left", ExitCode.PREEMPTED
    elif killed and (failed is None or failed.exit_code in (None, ExitCode.TERMINATED)):
        reason, code = WORKER_KILLED, ExitCode.KILLED
    elif failed is None:
        reason = "the pipeline ended without a result; the end of its log:\n" + _tail(log)
        code = ExitCode.UNEXPECTED
    elif failed.exit_code is None:
        reason, code = f"{failed.step}: {KILLED}", ExitCode.KILLED
    else:
        reason, code = f"{failed.step}: {failed.reason}", _known(failed.exit_code)
    _say(console, f"\nerror: {reason}\n\nlog {log}")
    if code.retryable:
        _say(console, f"This can pass. To go on, run: {again}")
    return code


def _known(code: int) -> ExitCode:
    try:
        return ExitCode(code)
    except ValueError:
        return ExitCode.UNEXPECTED


def _code_of(record: RunRecord) -> ExitCode:
    return ExitCode.OK if record.word == "blessed" else ExitCode.NOT_BLESSED


def _newest_log(run: str) -> Path | None:
    return max(log_dir(run).glob("run-*.log"), key=lambda path: path.stat().st_mtime, default=None)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
