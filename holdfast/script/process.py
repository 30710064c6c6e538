"""One rank that runs a training script: `-m holdfast.script.process --code DIGEST --entry FILE ... -- ARGUMENTS`.

The code is a bundle with the digest that the command line names, so a writer to the store cannot change what
runs. The script runs as `__main__` in the folder of the bundle's files. Its session finds the launch through
`holdfast.script.session`.
"""

import argparse
import logging
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401 - a script would import it in each rank after it was forked

from holdfast.code import fetch_code
from holdfast.collectives import noticing_lost_peers
from holdfast.launch.device import gang_store
from holdfast.launch.exits import RankRecord, reporting_end
from holdfast.launch.launches import read_launch
from holdfast.launch.processes import die_with_parent
from holdfast.rank.hang_reporting import enable_watchdog
from holdfast.rank.preemption import PreemptionSignal
from holdfast.runtime.exits import code_of, exit_code_of
from holdfast.runtime.logs import configure_logging
from holdfast.script import session as sessions
from holdfast.script.assignment import ScriptAssignment
from holdfast.script.inputs import fetch_inputs
from holdfast.spec import ExitCode
from holdfast.spec.errors import HoldfastError, PreemptedError, UserCodeError
from holdfast.store import open_store
from holdfast.telemetry import phases, recording
from holdfast.telemetry.trainer_status import reporting_trainer_status

log = logging.getLogger("holdfast.script")


class ScriptFailedError(UserCodeError):
    """A training script raised an exception."""


@dataclass
class ScriptProcess:
    """The process of a rank, and what it runs."""

    store: str  # URL
    run_id: str
    launch: int
    code: str  # digest
    entry: str
    arguments: Sequence[str]
    leave: PreemptionSignal
    record: RankRecord
    inputs: str = ""  # JSON: see `Script.input_arguments`

    def run(self) -> None:
        """Run the script to its end. Raises PreemptedError after a save, ScriptFailedError for an exception of the
        script, and what the session raises."""
        store = open_store(self.store)
        events = recording(store, self.run_id, f"rank {os.environ.get('RANK', '0')}", launch=self.launch)
        with events, reporting_trainer_status(), reporting_end(), noticing_lost_peers():
            phases.enter("start", 0)
            launched = read_launch(store, self.run_id, self.launch)
            assignment = ScriptAssignment.recorded(launched.assignment, f"launch {self.launch} of run {self.run_id}")
            folder = fetch_code(store, self.code)
            phases.enter("script")  # which may take any time, as inputs may
            inputs = fetch_inputs(self.inputs)
            meet_by_file()
            sessions.launched = sessions.Launched(
                store,
                self.launch,
                launched.claimed,
                launched.replan,
                assignment,
                self.code,
                self.leave,
                self.record,
                inputs,
            )
            run_entry(folder / self.entry, self.arguments, assignment.restart_on)


def run_entry(entry: Path, arguments: Sequence[str], restart_on: str) -> None:
    """Run a script as `__main__`, and end its session."""
    sys.argv = [str(entry), *arguments]
    sys.path.insert(0, str(entry.parent))
    sys.dont_write_bytecode = True  # nothing may write to the folder of the bundle
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # nor may processes that the script starts
    error: BaseException | None = None
    try:
        runpy.run_path(str(entry), run_name="__main__")
    except SystemExit as raised:
        error = _exit(raised, entry)
    except HoldfastError as raised:
        error = raised
    except Exception as raised:  # noqa: BLE001 - any exception of the script
        error = _failure(raised, entry, restart_on)
    session = sessions.current()
    if not isinstance(session, sessions.ManagedSession):
        if error is not None:
            raise error
        return
    try:
        if error is None:
            session.finish()
            if session.left:
                error = PreemptedError("stop requested: saved a checkpoint; the same command resumes from there")
    except BaseException as raised:
        error = raised
        raise
    finally:
        session.close(error)
    if error is not None:
        raise error


def _exit(raised: SystemExit, entry: Path) -> BaseException | None:
    """The error of a script that called `sys.exit`, or None."""
    if isinstance(raised, sessions.PreemptionExit):
        return PreemptedError(f"stop requested: saved step {raised.step}; the same command resumes from there")
    if raised.code in (None, 0):
        return None
    return ScriptFailedError(f"{entry.name} ended by sys.exit({raised.code!r})")


def _failure(raised: Exception, entry: Path, restart_on: str) -> BaseException:
    """The error that explains an exception of a script: itself if its code of the table says more."""
    if code_of(raised) != ExitCode.UNEXPECTED:
        return raised
    try:
        with noticing_lost_peers():
            raise raised
    except HoldfastError as lost:
        return lost
    except Exception as same:
        log.error("%s raised an exception", entry.name, exc_info=same)
        failure = ScriptFailedError(f"{entry.name} raised {type(same).__name__}: {str(same)[:500]}")
        if restart_on == "any":
            failure.exit_code = ExitCode.SCRIPT_FAILED
        return failure


def meet_by_file() -> None:
    """Have `init_process_group` of the script use the meeting point of the launch: without an open port on one
    node."""
    # The package has a function of the same name.
    handlers: dict[str, Any] = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    by_environment = handlers["env"]

    def meet(url: str, timeout: timedelta = dist.default_pg_timeout, **named: Any) -> Iterator[tuple[Any, int, int]]:
        store = gang_store(timeout)
        if store is None:
            yield from by_environment(url, timeout=timeout, **named)
            return
        yield store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        raise RuntimeError("the ranks of a launch meet once; a new launch meets again")

    handlers["env"] = meet


def split_arguments(words: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of a rank, and those of its script, which follow `--`."""
    return (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])


def main() -> None:
    """Entry point of a rank."""
    own, arguments = split_arguments(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--launch", required=True, type=int)
    parser.add_argument("--store", required=True)
    parser.add_argument("--code", required=True)
    parser.add_argument("--entry", required=True)
    parser.add_argument("--inputs", default="")
    options = parser.parse_args(own)
    die_with_parent()
    configure_logging()
    leave, record = PreemptionSignal(), RankRecord()
    enable_watchdog()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the state is restored there is nothing to save
    process = ScriptProcess(
        options.store,
        options.run_id,
        options.launch,
        options.code,
        options.entry,
        arguments,
        leave,
        record,
        options.inputs,
    )
    code = exit_code_of(process.run)
    if leave.wanted and code == ExitCode.LOST_PEER:
        code = ExitCode.TERMINATED
    record.exit(code)


if __name__ == "__main__":
    main()
