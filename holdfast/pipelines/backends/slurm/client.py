"""Slurm's own commands, as functions: what is asked of a controller and what it answers, in types.

Promises that a controller that does not answer is a ClusterUnreachableError, and what it refuses a SpecError with
Slurm's words. Leaves what jobs mean for a run to `backend`.
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

from holdfast.launch.slurm_environment import without_job
from holdfast.spec.errors import ClusterUnreachableError, MissingError, Problem, SpecError

log = logging.getLogger("holdfast.slurm")

SECONDS = 60.0  # for one answer
_AWAY = re.compile(r"Unable to contact slurm|Socket timed out|Connection refused|Zero Bytes|backup controller", re.I)
_UNKNOWN = re.compile(r"configuration (source|file)", re.I)  # where the controller is
_NO_ACCOUNTING = re.compile(r"accounting storage is disabled", re.I)
_GONE = re.compile(r"Invalid job id|already completing or completed", re.I)
# Slurm's words for a job that may still change.
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING")
AT_WORK = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
ENDING = ("COMPLETING",)
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
)  # fmt: skip
NEVER_SATISFIED = "DependencyNeverSatisfied"  # why Slurm itself cancels a job

_COLUMNS = {
    "id": "ArrayJobID:32", "task": "ArrayTaskID:16", "name": "Name:256", "state": "State:32", "reason": "Reason:256",
    "exit": "exit_code:16", "restarts": "RestartCnt:16", "seconds": "TimeUsed:32", "comment": "Comment:256",
}  # fmt: skip
_SACCT = ("JobID", "JobName", "State", "Reason", "ExitCode", "ElapsedRaw", "Comment")


@dataclass(frozen=True)
class BatchJob:
    """A job as Slurm sees it; an array is one job."""

    id: int
    name: str
    state: str  # Slurm's word: PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT, NODE_FAIL, CANCELLED, ...
    reason: str = ""  # why it waits, or failed; empty for none
    exit_code: int = 0
    signal: int = 0  # that ended it
    restarts: int = 0
    seconds: float = 0.0  # that it has run since its last start
    comment: str = ""
    task: int | None = None  # of an array
    tasks: tuple[BatchJob, ...] = ()  # of an array: those that Slurm knows, by number

    @property
    def called(self) -> str:
        """What Slurm's commands call it."""
        return str(self.id) if self.task is None else f"{self.id}_{self.task}"

    @property
    def unfinished(self) -> bool:
        """Whether it may still change."""
        return self.state in (*WAITING, *AT_WORK, *ENDING)


def sbatch(script: str, options: Sequence[str]) -> int:
    """Submit a script; the number of its job."""
    printed = asked(["sbatch", "--parsable", *options], script)
    return int(printed.strip().splitlines()[-1].partition(";")[0])


def jobs_of(names: Sequence[str] = ()) -> list[BatchJob]:
    """This user's jobs, ended ones too as long as Slurm knows them, by number: those with one of `names`, or all. What
    the controller has forgotten comes from the accounting, where there is any."""
    chosen = [f"--name={','.join(names)}"] if names else []
    columns = ",".join(f"{column}|" for column in _COLUMNS.values())
    command = [
        "squeue",
        "--noheader",
        "--array",
        "--states=all",
        f"--user={getpass.getuser()}",
        *chosen,
        f"--Format={columns}",
    ]
    known = [_from_squeue(line) for line in asked(command).splitlines()]
    # Asked second: a job that leaves the controller meanwhile has long been in the accounting.
    found = {(job.id, job.task): job for job in (*_accounted(chosen), *known)}
    return [job for _, job in sorted(_one_each(found.values()).items())]


@dataclass(frozen=True)
class Partition:
    """A partition as sinfo has it."""

    name: str
    up: bool
    default: bool
    nodes: int
    cores: int  # of a node, the least
    memory: int  # of a node, the least, in MiB


def partitions() -> list[Partition]:
    """The partitions that this user sees."""
    found: dict[str, Partition] = {}
    for line in asked(["sinfo", "--noheader", "--format=%P|%a|%D|%c|%m"]).splitlines():
        name, up, nodes, cores, memory = line.split("|")
        one = Partition(
            name.rstrip("*"),
            up == "up",
            name.endswith("*"),
            int(nodes),
            int(cores.rstrip("+")),
            int(memory.rstrip("+")),
        )
        before = found.get(one.name)
        found[one.name] = one if before is None else replace(
            one, nodes=one.nodes + before.nodes, cores=min(one.cores, before.cores),
            memory=min(one.memory, before.memory),
        )  # fmt: skip
    return list(found.values())


def on_a_node(command: Sequence[str], options: Sequence[str], seconds: int) -> str:
    """What a command prints on a node that is free within `seconds`."""
    return asked(["srun", "--nodes=1", "--ntasks=1", "--time=1", f"--immediate={seconds}", *options, *command])


def release(job: int) -> None:
    """Let a job that was submitted held begin."""
    asked(["scontrol", "release", str(job)])


def forbid_requeue(job: int) -> None:
    """Have a job not come back once it ends."""
    asked(["scontrol", "update", f"JobId={job}", "Requeue=0"])


def requeue(job: str) -> bool:
    """Put a running job, or the task NUMBER_TASK of an array, back into the queue; whether Slurm did that. Raises
    ClusterUnreachableError."""
    try:
        asked(["scontrol", "requeue", job])
    except (SpecError, MissingError):  # it may not be, or is going already
        return False
    return True


def cancel(job: int) -> None:
    """End a job; one that has ended is left alone."""
    _lenient(["scancel", str(job)])


def ask_to_leave(job: int) -> None:
    """Send SIGTERM to the batch shell of a running job, and to nothing else of it. The tasks of an array that have not
    begun are ended: a signal does not reach them."""
    _lenient(["scancel", "--state=PENDING", str(job)])
    _lenient(["scancel", "--batch", "--signal=TERM", str(job)])


def _lenient(command: Sequence[str]) -> None:
    try:
        asked(command)
    except MissingError:
        return


def _one_each(jobs: Iterable[BatchJob]) -> dict[int, BatchJob]:
    """The jobs by number. The tasks of an array are one job: as the task that works, else waits, else failed is."""
    by_job: dict[int, list[BatchJob]] = {}
    for job in jobs:
        by_job.setdefault(job.id, []).append(job)

    def weight(job: BatchJob) -> int:
        request = (*AT_WORK, *ENDING, *WAITING)
        return request.index(job.state) if job.unfinished else len(request) + (job.state == "COMPLETED")

    found = {}
    for number, parts in by_job.items():
        restarts, seconds = sum(one.restarts for one in parts), max(one.seconds for one in parts)
        tasks = tuple(sorted((one for one in parts if one.task is not None), key=lambda one: one.task or 0))
        whole = replace(min(parts, key=weight), restarts=restarts, seconds=seconds, task=None, tasks=tasks)
        found[number] = whole
    return found


def _from_squeue(line: str) -> BatchJob:
    values = dict(zip(_COLUMNS, (part.strip() for part in line.split("|")), strict=False))
    status = int(values["exit"] or 0)
    return BatchJob(
        int(values["id"]), values["name"], values["state"], _reason(values["reason"]), status >> 8, status & 0x7F,
        int(values["restarts"] or 0), _seconds(values["seconds"]), values["comment"], _number(values["task"]),
    )  # fmt: skip


def _accounted(chosen: Sequence[str]) -> list[BatchJob]:
    """The ended jobs that the accounting remembers; nothing where there is none, or it is away. What it refuses is
    said. Asked without states, sacct is silent about jobs that never were eligible: cancelled with the step before."""
    if shutil.which("sacct") is None:
        return []
    command = ["sacct", "--allocations", "--noheader", "--parsable2", f"--user={getpass.getuser()}"]
    command += [*chosen, "--starttime=now-30days", "--endtime=now+1days", f"--state={','.join(ENDED)}"]
    command.append(f"--format={','.join(_SACCT)}")
    try:
        printed = asked(command)
    except (ClusterUnreachableError, MissingError):
        return []
    except SpecError as error:
        said = error.problems[0].message
        if not _NO_ACCOUNTING.search(said):
            _say_refused(said)
        return []
    found = []
    for line in printed.splitlines():
        number, name, state, reason, codes, seconds, comment = line.split("|")
        code, _, signal = codes.partition(":")
        number, _, task = number.partition("_")
        if number.isdecimal():
            word = state.split()[0] if state else ""  # "CANCELLED by 0"
            if state == "CANCELLED" and not int(seconds or 0):  # by nobody, while it waited, whatever for at first
                reason = NEVER_SATISFIED
            found.append(BatchJob(
                int(number), name, word, _reason(reason), int(code or 0), int(signal or 0),
                seconds=float(seconds or 0), comment=comment, task=_number(task),
            ))  # fmt: skip
    return found


@cache  # once, and not at every look of a command that follows a run
def _say_refused(said: str) -> None:
    log.warning("what Slurm's controller has forgotten is missing here: sacct refuses to tell it: %s", said)


def _number(word: str) -> int | None:
    return int(word) if word.isdecimal() else None  # "N/A", or "[3-7]" for tasks that nobody has begun yet


def _reason(word: str) -> str:
    return "" if word in ("None", "(null)", "N/A") else word


def _seconds(elapsed: str) -> float:
    """Seconds of Slurm's [days-][hours:]minutes:seconds."""
    days, _, rest = elapsed.rpartition("-")
    total = 0
    for part in rest.split(":"):
        total = total * 60 + (int(part) if part.isdecimal() else 0)
    return float(total + 86_400 * int(days if days.isdecimal() else 0))


def asked(command: Sequence[str], given: str = "") -> str:
    """What a command of Slurm prints. Raises the errors of the module's promise."""
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=SECONDS, check=False, errors="replace",
            env=without_job(os.environ),
        )  # fmt: skip
    except FileNotFoundError:
        raise MissingError(
            f"{command[0]}: is not installed here; run this where Slurm's commands are, such as a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterUnreachableError(f"{command[0]}: no answer from Slurm in {SECONDS:g} s") from None
    if done.returncode == 0:
        return done.stdout
    said = " ".join((done.stderr or done.stdout).split())
    if _UNKNOWN.search(said):
        remedy = "run this on a login node, or set SLURM_CONF to its slurm.conf"
        raise MissingError(f"{command[0]}: no configuration of a Slurm is found from here; {remedy}")
    if _GONE.search(said):
        raise MissingError(f"{command[0]}: {said}")
    if _AWAY.search(said):
        raise ClusterUnreachableError(f"{command[0]}: {said}")
    remedy = "see the spec's cluster section, and what the site asks of every job (SBATCH_ACCOUNT, SBATCH_PARTITION)"
    raise SpecError([Problem(command[0], None, said or f"ended with {done.returncode}", remedy)], "Slurm")
