"""One step of a chain, in its batch job: `python -m holdfast.pipelines.backends.slurm.step STEP …  -- arguments`.

Slurm passes nothing between jobs: a step reads the outcomes of earlier steps from the store. A retryable failure puts
the job back into the queue. A training that was preempted and has saved always returns to the queue, until
`cluster.deadline_hours` are over. The step's command line does the work.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType

from holdfast.launch.choose import VARIABLE as LAUNCHER
from holdfast.pipelines.backends.interface import SKIPPED
from holdfast.pipelines.backends.slurm import client
from holdfast.pipelines.backends.slurm.emit import job_name, keep
from holdfast.pipelines.backends.slurm.states import ended_as
from holdfast.pipelines.table import RETRY
from holdfast.runtime.logs import configure_logging
from holdfast.spec.errors import ClusterUnreachableError, ExitCode, TerminatedError
from holdfast.spec.json_parsing import parse_json, parse_json_object
from holdfast.steps import STEPS, TRIAL
from holdfast.steps.adapters import main as run_step
from holdfast.steps.jobs import outcomes_of, recorder
from holdfast.steps.outcomes import EXIT_HANDLER, Outcome

log = logging.getLogger("holdfast.slurm")

GOES_SECONDS = 60.0  # until Slurm ends a requeued job
CONTROLLER_TRIES, CONTROLLER_SECONDS = 120, 5.0  # for a controller that does not respond


def main(argv: Sequence[str]) -> int:
    """Run the step that the arguments name. Returns the exit code of its job."""
    arguments, step_arguments = _parsed(argv)
    configure_logging()
    step, job, task = arguments.step, os.environ["SLURM_JOB_ID"], ""
    if arguments.tasks or (arguments.trials_file and STEPS[step].per_trial):  # an array, despite Slurm's variables
        task = os.environ["SLURM_ARRAY_TASK_ID"]
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    if arguments.tasks:
        step_arguments.append(f"--{STEPS[step].item}={task}/{arguments.tasks}")
    chain = f"{arguments.key}-{arguments.first or job}"
    outcomes = {outcome.name: outcome for outcome in outcomes_of(chain, "", store=arguments.store)}
    if unmet := _unmet(arguments.when, outcomes):
        log.info("%s", unmet)
        if record := recorder(chain):
            now = time.time()
            record(
                arguments.store, Outcome(step, os.getpid(), now, now, int(ExitCode.OK), result=f"{SKIPPED}: {unmet}")
            )
        return ExitCode.OK
    command = [*step_arguments, f"--spec={arguments.spec}", f"--store={arguments.store}", f"--job={chain}"]
    if arguments.trials_file:
        command += _of_sweep(step, task, arguments.trials_file, chain, arguments.best_of)
    for need in arguments.needs:
        name, _, producer = need.partition("=")
        producer = f"{producer}-{task}" if task and STEPS[producer].per_trial else producer
        if producer not in outcomes or not outcomes[producer].result:
            log.error(
                "%s: the store %s does not have what %s gave; submit the run again", name, arguments.store, producer
            )
            return ExitCode.NOT_FOUND
        command.append(f"--{name.replace('_', '-')}={outcomes[producer].result}")
    if step == EXIT_HANDLER:
        numbers = dict(pair.split("=") for pair in arguments.job)
        status, message = ended_as(list(numbers), _jobs(arguments.key, numbers), outcomes)
        command += [f"--status={status}", f"--message={message}"]
    if STEPS[step].launches:
        os.environ[LAUNCHER] = "slurm"
    until = _deadline(arguments.deadline, Path(f"{step}-{job}.began"))
    code = int(ExitCode.TERMINATED) if until is not None and time.time() >= until else _worked(step, command, until)
    if code >= 128 and until is not None and time.time() >= until:
        reason = f"took longer than cluster.deadline_hours ({arguments.deadline / 3600:g}) in all its allocations"
        log.error("%s %s; holdfast resume gives it as much again", step, reason)
        if record := recorder(chain):
            ended = time.time()
            record(
                arguments.store, Outcome(step, os.getpid(), ended, ended, int(ExitCode.CANCELLED), reason, part=task)
            )
        return ExitCode.CANCELLED
    if code >= 128:
        _come_back(step, job, code, Path(f"{step}-{job}.tries"))
    return code


def _of_sweep(step: str, task: str, file: Path, chain: str, best_of: str) -> list[str]:
    """Arguments of a step in a sweep: its trial, all trials, or the best one."""
    trials = parse_json(file.read_bytes(), list[list[str]], str(file))
    if STEPS[step].per_trial:
        return [f"--{TRIAL}={task}", f"--overrides={json.dumps(trials[int(task) - 1])}"]
    arguments = [f"--trials={json.dumps(trials)}"] if "trials" in STEPS[step].inputs else []
    if step == "compare":
        arguments.append(f"--output={_result_file(step, chain)}")
    if best_of:
        result = _result_file(best_of, chain)
        best = parse_json_object(result.read_bytes(), str(result))
        arguments += [f"--run-id={best['winner']}", f"--overrides={json.dumps(best['changes'])}"]
    return arguments


def _result_file(step: str, chain: str) -> Path:
    return Path(f"{step}-{chain}.json").absolute()


def _deadline(seconds: float, began: Path) -> float | None:
    """The end of a job's time since its first start, in unix seconds; None without a limit.

    The file `began` keeps the first start, and the job reads it again after a requeue.
    """
    if not seconds:
        return None
    if not began.exists():
        keep(began, str(time.time()))
    return float(began.read_text()) + seconds


def _worked(step: str, words: Sequence[str], until: float | None) -> int:
    """The exit code of the step's command line.

    Imports take seconds before the step handles SIGTERM. A SIGTERM in that time must also give a code and not kill the
    process.
    """
    signal.signal(signal.SIGTERM, _terminated)
    try:
        with _terminate_at(until):
            return int(run_step(step, import_module(f"holdfast.components.{step}.__main__").body, words))
    except TerminatedError as error:
        log.warning("%s: %s", step, error)
        return int(error.exit_code)


def _terminated(_signum: int, _frame: FrameType | None) -> None:
    raise TerminatedError("stop requested (SIGTERM)")


@contextmanager
def _terminate_at(until: float | None) -> Iterator[None]:
    """Send SIGTERM to this process at that time, like Slurm before a limit: the ranks save and exit."""
    if until is None:
        yield
        return
    timer = threading.Timer(max(0.0, until - time.time()), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _come_back(step: str, job: str, code: int, tries: Path, wait: Callable[[float], None] = time.sleep) -> None:
    """Requeue the job, unless it has failed too often. Does not return if Slurm requeues the job."""
    count = int(tries.read_text()) if tries.exists() else 0
    count = 0 if code == ExitCode.PREEMPTED else count + 1  # a saved checkpoint is progress
    keep(tries, str(count))
    if count > RETRY.tries:
        log.error("%s failed %d times in a row; use holdfast resume to continue", step, count)
    elif _requeued(job, wait):
        log.info("%s goes back into the queue", step)
        wait(GOES_SECONDS)
    else:
        log.info("%s does not go back into the queue: it was cancelled, or Slurm does not allow it", step)


def _requeued(job: str, wait: Callable[[float], None]) -> bool:
    """Whether Slurm requeues the job. Waits for an unavailable controller, because its outage must not end the run."""
    for _ in range(CONTROLLER_TRIES):
        try:
            return client.requeue(job)
        except ClusterUnreachableError as error:
            log.warning("%s; trying again", error)
            wait(CONTROLLER_SECONDS)
    return False


def _unmet(conditions: Sequence[str], outcomes: Mapping[str, Outcome]) -> str:
    """The message of the first condition that does not hold; empty when all hold."""
    for condition in conditions:
        step, _, expected = condition.partition("=")
        result = outcomes[step].result if step in outcomes else "nothing"
        if result != expected:
            return f"{step} says {result}"
    return ""


def _jobs(key: str, numbers: Mapping[str, str]) -> dict[str, client.BatchJob]:
    """The jobs of these ids that Slurm knows, by step."""
    jobs = {str(job.id): job for job in client.jobs_of([job_name(key, step) for step in numbers])}
    return {step: jobs[number] for step, number in numbers.items() if number in jobs}


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="holdfast.pipelines.backends.slurm.step", allow_abbrev=False)
    parser.add_argument("step", choices=sorted(STEPS))
    parser.add_argument("--key", required=True, help="the run id, or what stands for it")
    parser.add_argument("--first", type=int, help="number of the chain's first job; default: this one")
    parser.add_argument("--spec", required=True, help="the spec file")
    parser.add_argument("--store", required=True, help="root of the store")
    parser.add_argument(
        "--when", action="append", default=[], metavar="STEP=WORD", help="do it only if STEP's decision was WORD"
    )
    parser.add_argument("--needs", action="append", default=[], metavar="INPUT=STEP", help="an input, and who gives it")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds that it may take since its first start")
    parser.add_argument("--tasks", type=int, default=0, help="of how many the array is that this is a task of")
    parser.add_argument("--trials-file", type=Path, help="of a sweep: the file with its trials")
    parser.add_argument("--best-of", default="", metavar="STEP", help="of a sweep: the step that says which is best")
    parser.add_argument("--job", action="append", default=[], metavar="STEP=NUMBER", help="of the exit handler: a job")
    return parser.parse_known_args(list(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
