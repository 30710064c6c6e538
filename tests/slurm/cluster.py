"""A real Slurm of two nodes on this machine: munged with a separate key, slurmctld, and two slurmd, on free ports.

With `accounting` also slurmdbd over a separate MariaDB. All files are in one folder, and every process that is started
here is ended by its number.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.ports import free_ports
from tests.whole.submitting import until

NODES = ("n1", "n2")
CORES, MEMORY = 16, 64000  # of each node, in MiB: more than the machine has, since the jobs are tiny
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
ACCOUNTING_PROGRAMS = ("slurmdbd", "sacct", "sacctmgr", "mariadbd", "mariadb-install-db")
FOLDERS = "/usr/sbin:/sbin"

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=200000,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=300
MessageTimeout=60
BatchStartTimeout=60
KillWait=20
MinJobAge={remembers}
JobRequeue=1
JobCompType=jobcomp/none
{accounting}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs={cores} RealMemory={memory}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs={cores} RealMemory={memory}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=other Nodes=n1,n2 MaxTime=INFINITE State=UP
"""
WITH_ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd}
AccountingStoragePass={folder}/munge/socket
AccountingStoreFlags=job_comment
JobAcctGatherType=jobacct_gather/none
"""
DBD = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={dbd}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={mysql}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""


def missing(programs: Sequence[str] = PROGRAMS) -> str:
    """Why no Slurm can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "slurmctld and slurmd start jobs as their users: only root may"
    absent = [name for name in programs if shutil.which(name, path=_path()) is None]
    return f"not installed (Debian: slurm-wlm, munge, slurmdbd, mariadb-server): {', '.join(absent)}" if absent else ""


class SlurmCluster:
    """Real Slurm of two nodes, as a context manager; see the module."""

    def __init__(self, folder: Path, *, accounting: bool = False, remembers_seconds: int = 3600) -> None:
        """`remembers_seconds`: how long the controller knows a job that has ended."""
        self.folder, self._accounting, self._remembers = folder, accounting, remembers_seconds
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        for name in [
            name for name in self.environment if name.startswith(("SLURM_", "SBATCH_")) and "CONF" not in name
        ]:
            del self.environment[name]

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.SubprocessError, OSError, TimeoutError):
            if "slurmctld" not in self._processes:
                raise TimeoutError
            self.ask("scancel", "--state=RUNNING")
            self.ask("scancel", "--state=PENDING")
            until(lambda: not self.ask("squeue", "--noheader"), 60)
        for name in reversed(list(self._processes)):
            self._end(name)
        for node in NODES:
            self._kill_tasks_of(node)

    def ask(self, *command: str, check: bool = True) -> str:
        """The output of a Slurm command."""
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=180, check=False, cwd=self.folder
        )
        if check and result.returncode != 0:
            raise subprocess.SubprocessError(f"{' '.join(command)}: {result.stderr or result.stdout}")
        return result.stdout.strip()

    def path_of(self, program: str) -> str:
        """The path of a Slurm command."""
        return str(shutil.which(program, path=_path()))

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self._run(f"slurmd-{name}", "slurmd", "-D", "-N", name)
        self._await(lambda: self.ask("sinfo", "--noheader", "--nodes", name, "--format=%T") in ("idle", "mixed"), 240)

    def kill_node(self, name: str) -> None:
        """Let a node lose power: its slurmd and all its processes are gone immediately."""
        daemon = self._processes.pop(f"slurmd-{name}")
        daemon.kill()
        daemon.wait()
        self._kill_tasks_of(name)
        self.ask("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=test")

    def tasks_of(self, node: str) -> list[int]:
        """The processes of jobs on a node, those of slurmstepd first. Killed last, they would report how the rest
        ended, which a node without power cannot do."""
        import psutil

        log, keepers, tasks = str(self.folder / f"slurmd-{node}.log"), [], []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.name() == "slurmstepd":  # its title overwrites its environment: its log names its node
                    if log in (file.path for file in process.open_files()):
                        keepers.append(process.pid)
                    continue
                environment = process.environ()
                is_own = environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if is_own and environment.get("SLURMD_NODENAME") == node:
                    tasks.append(process.pid)
        return keepers + tasks

    def _kill_tasks_of(self, node: str) -> None:
        for pid in self.tasks_of(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self) -> None:
        for name in ("munge", "state", "mysql", *NODES):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o711)
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        ports = free_ports(5)
        values = {
            "folder": self.folder, "host": socket.gethostname(), "cores": CORES, "memory": MEMORY,
            "remembers": self._remembers,
            **dict(zip(("controller", "n1", "n2", "dbd", "mysql"), ports, strict=True)),
        }  # fmt: skip
        accounting = WITH_ACCOUNTING.format(**values) if self._accounting else ""
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**values, accounting=accounting))
        munge = self.folder / "munge"
        self._run(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge / 'socket'}",
            f"--pid-file={munge / 'pid'}", f"--log-file={munge / 'log'}", f"--seed-file={munge / 'seed'}",
        )  # fmt: skip
        self._await((munge / "socket").exists, 60)
        if self._accounting:
            self._start_accounting(values)
        self._run("slurmctld", "slurmctld", "-D", "-i")
        log = self.folder / "slurmctld.log"  # a client that connects too early waits until MessageTimeout
        self._await(lambda: log.exists() and "Running as primary controller" in log.read_text(), 120)
        self._await(lambda: "UP" in self.ask("scontrol", "ping", check=False), 120)
        for name in NODES:
            self.start_node(name)

    def _start_accounting(self, values: dict[str, object]) -> None:
        data, place = self.folder / "mysql", self.folder / "mysql.socket"
        self.ask(
            "mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db",
            "--auth-root-authentication-method=normal",
        )  # fmt: skip
        self._run(
            "mariadbd", "mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={place}",
            f"--port={values['mysql']}", "--bind-address=127.0.0.1", f"--pid-file={self.folder / 'mysql.pid'}",
        )  # fmt: skip
        self._await(place.exists, 120)
        grant = (
            "CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm'; GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1'"
        )
        self.ask("mariadb", "--no-defaults", f"--socket={place}", "--user=root", f"--execute={grant}")
        configuration = self.folder / "slurmdbd.conf"
        configuration.write_text(DBD.format(**values))
        configuration.chmod(0o600)
        self._run("slurmdbd", "slurmdbd", "-D")
        log = self.folder / "slurmdbd.log"
        self._await(lambda: log.exists() and "slurmdbd version" in log.read_text(), 120)

    def _await(self, condition: Callable[[], object], seconds: float) -> None:
        """Wait until a condition holds. On a timeout, or when a daemon has ended, fail with the logs of all daemons."""

        def ended() -> list[str]:
            return [f"{name}: {daemon.poll()}" for name, daemon in self._processes.items() if daemon.poll() is not None]

        try:
            until(lambda: condition() or ended(), seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self._tails()}") from error
        if dead := ended():
            raise RuntimeError(f"ended: {', '.join(dead)}\n{self._tails()}")

    def _tails(self) -> str:
        """The last lines of every daemon's log."""
        files = sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log"), *self.folder.glob("munge/log")])
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in files)

    def _run(self, name: str, *command: str) -> None:
        bound_command = ("setpriv", "--pdeathsig", "KILL", *command)  # even a killed test leaves no daemon
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                bound_command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{FOLDERS}"
