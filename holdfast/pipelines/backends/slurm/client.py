"""Typed functions over Slurm's commands.

A controller that does not respond raises ClusterUnreachableError. A refused request raises SpecError with Slurm's
message. `backend` interprets jobs for a run.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from holdfast.launch.slurm import without_job
from holdfast.spec.errors import ClusterUnreachableError, MissingError, Problem, SpecError

log = logging.getLogger("holdfast.slurm")

SECONDS = 60.0  # for one response
_AWAY = re.compile(r"Unable to contact slurm|Socket timed out|Connection refused|Zero Bytes|backup controller", re.I)
_UNKNOWN = re.compile(r"configuration (source|file)", re.I)  # the configuration that names the controller
_NO_ACCOUNTING = re.compile(r"accounting storage is disabled", re.I)
_GONE = re.compile(r"Invalid job id|already completing or completed", re.I)
# Slurm's states of a job that may still change.
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING")
AT_WORK = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
ENDING = ("COMPLETING",)
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)
NEVER_SATISFIED = "DependencyNeverSatisfied"  # reason of a job that Slurm itself cancels

_COLUMNS = {
    "id": "ArrayJobID:32",
    "task": "ArrayTaskID:16",
    "name": "Name:256",
    "state": "State:32",
    "reason": "Reason:256",
    "exit": "exit_code:16",
    "restarts": "RestartCnt:16",
    "seconds": "TimeUsed:32",
    "comment": "Comment:256",
}
_SACCT = ("JobID", "JobName", "State", "Reason", "ExitCode", "ElapsedRaw", "Comment")


@dataclass(frozen=True)
class BatchJob:
    """A job as Slurm reports it; an array is one job."""

    id: int
    name: str
    state: str  # PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT, NODE_FAIL, CANCELLED, ...
    reason: str = ""  # why it waits or failed; empty without a reason
    exit_code: int = 0
    signal: int = 0  # signal that ended it
    restarts: int = 0
    seconds: float = 0.0  # run time since its last start
    comment: str = ""
    task: int | None = None  # number in an array
    tasks: tuple[BatchJob, ...] = ()  # of an array: those that Slurm knows, by number

    @property
    def called(self) -> str:
        """The id of the job for Slurm's commands."""
        return str(self.id) if self.task is None else f"{self.id}_{self.task}"

    @property
    def unfinished(self) -> bool:
        """Whether it may still change."""
        return self.state in (*WAITING, *AT_WORK, *ENDING)


def sbatch(script: str, options: Sequence[str]) -> int:
    """Submit a script. Returns the id of its job."""
    output = run_command(["sbatch", "--parsable", *options], script)
    return int(output.strip().splitlines()[-1].partition(";")[0])


def jobs_of(names: Sequence[str] = ()) -> list[BatchJob]:
    """This user's jobs by id, including ended ones that Slurm still knows: those with one of `names`, or all.

    Jobs that the controller has forgotten come from the accounting, if it exists.
    """
    filters = [f"--name={','.join(names)}"] if names else []
    columns = ",".join(f"{column}|" for column in _COLUMNS.values())
    command = [
        "squeue",
        "--noheader",
        "--array",
        "--states=all",
        f"--user={getpass.getuser()}",
        *filters,
        f"--Format={columns}",
    ]
    current_jobs = [_from_squeue(line) for line in run_command(command).splitlines()]
    # Queried second: a job that leaves the controller meanwhile is already in the accounting.
    by_id = {(job.id, job.task): job for job in (*_accounted(filters), *current_jobs)}
    return [job for _, job in sorted(_one_each(by_id.values()).items())]


@dataclass(frozen=True)
class Partition:
    """A partition as sinfo reports it."""

    name: str
    up: bool
    default: bool
    nodes: int
    cores: int  # of its smallest node
    memory: int  # of its smallest node, in MiB


def partitions() -> list[Partition]:
    """The partitions that this user sees."""
    by_name: dict[str, Partition] = {}
    for line in run_command(["sinfo", "--noheader", "--format=%P|%a|%D|%c|%m"]).splitlines():
        name, up, nodes, cores, memory = line.split("|")
        partition = Partition(
            name.rstrip("*"),
            up == "up",
            name.endswith("*"),
            int(nodes),
            int(cores.rstrip("+")),
            int(memory.rstrip("+")),
        )
        previous = by_name.get(partition.name)
        by_name[partition.name] = (
            partition
            if previous is None
            else replace(
                partition,
                nodes=partition.nodes + previous.nodes,
                cores=min(partition.cores, previous.cores),
                memory=min(partition.memory, previous.memory),
            )
        )
    return list(by_name.values())


def on_a_node(command: Sequence[str], options: Sequence[str], seconds: int) -> str:
    """Run a command on a node that is free within `seconds`. Returns its output."""
    return run_command(["srun", "--nodes=1", "--ntasks=1", "--time=1", f"--immediate={seconds}", *options, *command])


def release(job: int) -> None:
    """Release a held job."""
    run_command(["scontrol", "release", str(job)])


def forbid_requeue(job: int) -> None:
    """Disable the requeue of a job."""
    run_command(["scontrol", "update", f"JobId={job}", "Requeue=0"])


def requeue(job: str) -> bool:
    """Requeue a running job, or an array task NUMBER_TASK. Returns whether Slurm did it. Raises
    ClusterUnreachableError.
    """
    try:
        run_command(["scontrol", "requeue", job])
    except (SpecError, MissingError):  # requeue is not allowed, or the job is already ending
        return False
    return True


def cancel(job: int) -> None:
    """Cancel a job; an ended job stays unchanged."""
    _lenient(["scancel", str(job)])


def ask_to_leave(job: int) -> None:
    """Send SIGTERM to the batch shell of a running job only. Pending tasks of an array are canceled: no signal reaches
    them.
    """
    _lenient(["scancel", "--state=PENDING", str(job)])
    _lenient(["scancel", "--batch", "--signal=TERM", str(job)])


def _lenient(command: Sequence[str]) -> None:
    try:
        run_command(command)
    except MissingError:
        return


def _one_each(jobs: Iterable[BatchJob]) -> dict[int, BatchJob]:
    """The jobs by id. An array becomes one job with the state of a working task, otherwise a waiting, otherwise a
    failed one.
    """
    by_job: dict[int, list[BatchJob]] = {}
    for job in jobs:
        by_job.setdefault(job.id, []).append(job)

    def weight(job: BatchJob) -> int:
        order = (*AT_WORK, *ENDING, *WAITING)
        return order.index(job.state) if job.unfinished else len(order) + (job.state == "COMPLETED")

    result = {}
    for number, parts in by_job.items():
        restarts, seconds = sum(part.restarts for part in parts), max(part.seconds for part in parts)
        tasks = tuple(sorted((part for part in parts if part.task is not None), key=lambda one: one.task or 0))
        merged = replace(min(parts, key=weight), restarts=restarts, seconds=seconds, task=None, tasks=tasks)
        result[number] = merged
    return result


def _from_squeue(line: str) -> BatchJob:
    values = dict(zip(_COLUMNS, (part.strip() for part in line.split("|")), strict=False))
    status = int(values["exit"] or 0)
    return BatchJob(
        int(values["id"]),
        values["name"],
        values["state"],
        _reason(values["reason"]),
        status >> 8,
        status & 0x7F,
        int(values["restarts"] or 0),
        _seconds(values["seconds"]),
        values["comment"],
        _number(values["task"]),
    )


def _accounted(chosen: Sequence[str]) -> list[BatchJob]:
    """The ended jobs in the accounting; empty where it does not exist or respond. A refusal is logged.

    The states are explicit: otherwise sacct omits jobs that were never eligible, such as those canceled with the step
    before them.
    """
    if shutil.which("sacct") is None:
        return []
    command = ["sacct", "--allocations", "--noheader", "--parsable2", f"--user={getpass.getuser()}"]
    command += [*chosen, "--starttime=now-30days", "--endtime=now+1days", f"--state={','.join(ENDED)}"]
    command.append(f"--format={','.join(_SACCT)}")
    try:
        output = run_command(command)
    except (ClusterUnreachableError, MissingError):
        return []
    except SpecError as error:
        message = error.problems[0].message
        if not _NO_ACCOUNTING.search(message):
            _warn_sacct_refused(message)
        return []
    jobs = []
    for line in output.splitlines():
        number, name, state, reason, codes, seconds, comment = line.split("|")
        code, _, signal = codes.partition(":")
        number, _, task = number.partition("_")
        if number.isdecimal():
            state_name = state.split()[0] if state else ""  # "CANCELLED by 0"
            if state == "CANCELLED" and not int(seconds or 0):  # no user did: its dependency failed
                reason = NEVER_SATISFIED
            jobs.append(
                BatchJob(
                    int(number),
                    name,
                    state_name,
                    _reason(reason),
                    int(code or 0),
                    int(signal or 0),
                    seconds=float(seconds or 0),
                    comment=comment,
                    task=_number(task),
                )
            )
    return jobs


@cache  # once, and not at every poll of a command that follows a run
def _warn_sacct_refused(message: str) -> None:
    log.warning("jobs that Slurm's controller has forgotten are missing here: sacct refuses access: %s", message)


def _number(word: str) -> int | None:
    return int(word) if word.isdecimal() else None  # "N/A", or "[3-7]" for tasks that have not begun


def _reason(word: str) -> str:
    return "" if word in ("None", "(null)", "N/A") else word


def _seconds(elapsed: str) -> float:
    """Parse Slurm's [days-][hours:]minutes:seconds to seconds."""
    days, _, rest = elapsed.rpartition("-")
    total = 0
    for part in rest.split(":"):
        total = total * 60 + (int(part) if part.isdecimal() else 0)
    return float(total + 86_400 * int(days if days.isdecimal() else 0))


def run_command(command: Sequence[str], given: str = "") -> str:
    """Run a Slurm command. Returns its output. Raises MissingError, ClusterUnreachableError and SpecError (see the
    module).
    """
    try:
        process = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            errors="replace",
            env=without_job(os.environ),
        )
    except FileNotFoundError:
        raise MissingError(
            f"{command[0]}: is not installed here; run this where Slurm's commands are, such as a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterUnreachableError(f"{command[0]}: no answer from Slurm in {SECONDS:g} s") from None
    if process.returncode == 0:
        return process.stdout
    message = " ".join((process.stderr or process.stdout).split())
    if _UNKNOWN.search(message):
        remedy = "run this on a login node, or set SLURM_CONF to its slurm.conf"
        raise MissingError(f"{command[0]}: no configuration of a Slurm is found from here; {remedy}")
    if _GONE.search(message):
        raise MissingError(f"{command[0]}: {message}")
    if _AWAY.search(message):
        raise ClusterUnreachableError(f"{command[0]}: {message}")
    remedy = "see the spec's cluster section, and what the site asks of every job (SBATCH_ACCOUNT, SBATCH_PARTITION)"
    raise SpecError([Problem(command[0], None, message or f"ended with {process.returncode}", remedy)], "Slurm")
