"""Launcher inside a Slurm allocation: one job step for each launch, with one torchrun on each node.

After a failed launch, the next one starts on the nodes of the allocation, without waiting in the queue. The batch job
must be the only one of its run (Slurm's `singleton`). It must be requeued when the allocation ends, at its time limit
or with a node.

Slurm's commands get an environment without the variables of an enclosing job (`without_job`) or step (`without_step`).
Slurm gives a job variables that its own commands read as options. Inside a job, `srun` leaves SLURM_CPU_BIND and
`sbatch --array` leaves SLURM_ARRAY_TASK_ID, and `sbatch` copies all of them into the job that it makes.
"""

import logging
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.launch.exits import FILE_VARIABLE, NodeExit, as_exit_code, parse_exit_report
from holdfast.launch.gang import gang_environment, gang_exit_of, torchrun_arguments
from holdfast.launch.interface import LEAVE_MARGIN, GangExit, Job
from holdfast.launch.reporting import LaunchLog
from holdfast.runtime.environment import make_folder
from holdfast.runtime.node import free_port
from holdfast.runtime.output import redacted_pieces
from holdfast.runtime.secrets import for_ranks
from holdfast.spec.errors import ClusterUnreachableError, ExitCode, Problem, SpecError

log = logging.getLogger("holdfast.launch")

TAIL_LINES = 40
SLURM_LINES = 3  # Slurm's own lines in the reason of an ending
_BY_SLURM = re.compile(r"\s*(srun|slurmstepd|slurmd): (fatal|error): ")
ASK_SECONDS = 60.0  # to wait for a reply of a Slurm command
# Every node runs the same command, and learns its number only there.
ON_NODE = f'PET_NODE_RANK="$SLURM_NODEID" {FILE_VARIABLE}="$HOLDFAST_NODE_EXITS/$SLURM_NODEID" exec "$@"'
# The controller's address, the credentials, and the format of times.
_OF_THE_SITE = re.compile(r"SLURM_(CONF|CONF_SERVER|JWT|SACK_\w+|TIME_FORMAT)")
_OF_A_JOB = re.compile(r"(SLURMD?_|PMIX?2?_|SRUN_|SBATCH_(ARRAY_INX|EXPORT|WAIT)$|SBATCH_(CPU|MEM|GPU)_BIND)")
# Variables that `srun` sets for a step, or reads as options that are not meant for the ranks. `sbatch` sets none of
# them.
_OF_A_STEP = re.compile(
    r"PMIX?2?_|SRUN_|SBATCH_(CPU|MEM|GPU)_BIND|SLURM_((CPU|MEM|GPU)_BIND|STEP|SRUN_|STD(IN|OUT|ERR)MODE|OPEN_MODE|LABELIO"
    r"|UNBUFFEREDIO|KILL_BAD_EXIT|IMMEDIATE|WAIT$|REMOTE_CWD|WORKING_DIR|(TASK_)?(PROLOG|EPILOG)$|EXPORT_ENV|MULTI|EXACT"
    r"|EXCLUSIVE|OVERCOMMIT|OVERLAP|RELATIVE|WHOLE)"
)


class SlurmLauncher:
    """Launcher that runs in the batch shell, on the first node of the allocation."""

    def __init__(self, logs: Path) -> None:
        """`logs`: folder for the ranks' output and the nodes' exit reports. All nodes must see it. Raises SpecError
        outside of a Slurm job."""
        self._logs = logs
        self._stop_requested = threading.Event()
        self._grace = 0.0
        self._running = False
        self._job = own_job(os.environ)
        if not self._job:
            remedy = "submit it: holdfast run SPEC --backend slurm"
            raise SpecError([Problem("SLURM_JOB_ID", None, "is not set: this is no job of Slurm", remedy)], "Slurm")

    @contextmanager
    def only_one(self, run_id: str) -> Iterator[None]:  # noqa: ARG002
        """See Launcher. Slurm ensures it: jobs of one run share a name and depend on `singleton`. A sweep may train the
        same trial elsewhere at the same time; the newer attempt fences it."""
        yield

    def adopt(self, run_id: str, launch: int) -> bool:  # noqa: ARG002
        """See Launcher. Always False: steps end with their batch job."""
        return False

    def run(self, job: Job) -> GangExit:
        """See Launcher."""
        if self._stop_requested.is_set():
            return GangExit(ExitCode.TERMINATED, (), "stopped before the step was created")
        hosts = _output_of("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        if bad := job.excluded_nodes & set(hosts):
            log.warning("%s spoiled two launches; `holdfast resume` asks for other nodes", ", ".join(sorted(bad)))
        make_folder(self._logs)
        endings = self._logs / f"launch-{job.launch:06d}.endings"
        endings.mkdir(exist_ok=True)
        for node in range(len(hosts)):
            (endings / str(node)).write_text("")
        path = self._logs / f"launch-{job.launch:06d}.log"
        self._grace = job.grace_seconds
        code, tail = self._follow(_command(job, len(hosts)), _environment(job, hosts, endings), path)
        reports = {node: parse_exit_report((endings / str(node)).read_text()) for node in range(len(hosts))}
        shutil.rmtree(endings, ignore_errors=True)
        return _gang_exit(code, {hosts[node]: ending for node, ending in reports.items()}, tail, path)

    def stop(self) -> None:
        """See Launcher. Sends SIGTERM to all processes of the step, but not to the batch shell."""
        self._stop_requested.set()
        if not self._running:
            return
        log.info("the ranks get SIGTERM: they save and exit")
        self._signal("TERM")
        timer = threading.Timer(self._grace + LEAVE_MARGIN, self._signal, ("KILL",))
        timer.daemon = True
        timer.start()

    def _follow(self, command: Sequence[str], environment: dict[str, str], path: Path) -> tuple[int, tuple[str, ...]]:
        """Run the step to its end. Returns srun's exit code and the last lines of the output, which goes to `path`."""
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        with LaunchLog(path) as printed:
            step = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
            self._running = True
            try:
                if self._stop_requested.is_set():  # stopped in between
                    self.stop()
                assert step.stdout is not None
                for text in redacted_pieces(step.stdout):
                    printed.write(text)
                    tail.append(text.rstrip("\n"))
                return as_exit_code(step.wait()), tuple(tail)
            except BaseException:  # such as a full disk under the log: no process follows the gang any more
                self._signal("KILL")
                step.wait()
                raise
            finally:
                self._running = False

    def _signal(self, name: str) -> None:
        if self._running:
            try:
                _output_of("scancel", f"--signal={name}", self._job)
            except ClusterUnreachableError as error:
                log.warning("the step could not be sent SIG%s: %s", name, error)


def _command(job: Job, nodes: int) -> list[str]:
    step = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        f"--wait={math.ceil(job.grace_seconds) + LEAVE_MARGIN}",
        f"--job-name={job.name}",
    ]
    if cores := os.environ.get("SLURM_CPUS_PER_TASK"):  # srun no longer takes it from the allocation
        step.append(f"--cpus-per-task={cores}")
    # The interpreter of the batch job: all nodes see Python environments at the same path.
    return [*step, "bash", "-c", ON_NODE, "node", sys.executable, *torchrun_arguments(job)]


def _environment(job: Job, hosts: Sequence[str], endings: Path) -> dict[str, str]:
    # The port is free here, and this is the first node, where the ranks meet. Only srun's environment has the key.
    return {
        **for_ranks(without_step(os.environ)),
        **gang_environment(job, len(hosts), _address(hosts[0]), free_port()),
        "HOLDFAST_NODE_EXITS": str(endings),
    }


def _address(node: str) -> str:
    """The address at which Slurm itself reaches a node. The network may not know the node's name."""
    match = re.search(r"\bNodeAddr=(\S+)", _output_of("scontrol", "show", "node", node, "--oneliner"))
    return match[1] if match else node


def _gang_exit(code: int, reports: dict[str, NodeExit | None], tail: tuple[str, ...], path: Path) -> GangExit:
    """How the launch ended, from srun's code and each node's exit report, in the order of the nodes."""
    slurm_lines = [line.strip() for line in tail if _BY_SLURM.match(line)]
    silence = f"Slurm says: {'; '.join(dict.fromkeys(slurm_lines[-SLURM_LINES:]))}." if slurm_lines else ""
    return gang_exit_of(code, reports, tail, path, silence=silence)


def _output_of(*command: str) -> str:
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK_SECONDS)
    except subprocess.TimeoutExpired:
        raise ClusterUnreachableError(f"{' '.join(command[:2])}: no answer from Slurm in {ASK_SECONDS:g} s") from None
    if process.returncode != 0:
        raise ClusterUnreachableError(f"{' '.join(command[:2])}: {process.stderr.strip() or process.stdout.strip()}")
    return process.stdout


def without_job(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables for a command that submits or queries, without those of an enclosing job. SBATCH_ACCOUNT,
    SBATCH_PARTITION and similar ones stay: a site or a person sets them for every job."""
    return {
        name: value for name, value in variables.items() if _OF_THE_SITE.fullmatch(name) or not _OF_A_JOB.match(name)
    }


def without_step(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables for `srun` inside an allocation, without those of another step."""
    return {name: value for name, value in variables.items() if not _OF_A_STEP.match(name)}


def own_job(variables: Mapping[str, str]) -> str:
    """The job that this process is in, as Slurm's commands take it; empty for none. The last task of an array has the
    number of the whole array, so it is written NUMBER_TASK. Array variables with another number may come from the job
    that submitted this one."""
    number, array = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_ARRAY_JOB_ID", "")
    task = variables.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if task and number == array else number
