"""A gang of several nodes on this machine. Each node is a torchrun of ours with one rank. They meet in torch's own
rendezvous, like the pods of an elastic job.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from holdfast.launch.exits import FILE_VARIABLE
from holdfast.launch.processes import PARENT_VARIABLE as PARENT
from holdfast.spec import Spec
from holdfast.store import Store
from holdfast.telemetry import read_events
from holdfast.telemetry.events import AttemptBegan, Progress
from tests import warm
from tests.faults.picture import Stretch
from tests.ports import LAUNCH_KEY, free_port
from tests.train.ranks import identity_of, launch

PATIENCE = 180.0  # seconds for any wait; a busy machine starts a rank in a minute

E = TypeVar("E", AttemptBegan, Progress)
PLAIN, HELD = "holdfast.rank.worker", "tests.faults.held_worker"
HOLDS = "HOLDFAST_TEST_HOLDS"  # the variable with the file of the number


def kill_family(process: subprocess.Popen[Any]) -> None:
    """Kill a process, if it is alive, and all its descendants."""
    if process.poll() is None:
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        while any(_lives(member) for member in family):  # a write in progress ends before its process does
            time.sleep(0.01)
    process.wait()


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


class Held:
    """A run whose ranks (of HELD) compute no step above a number that the test sets."""

    def __init__(self, store: Store, run_id: str, file: Path, alive: Callable[[], bool]) -> None:
        """The number is in `file`. `alive` says whether any process is left to wait for."""
        self.variables = {HOLDS: str(file)}  # of the ranks
        self._store, self._run_id, self._file, self._alive = store, run_id, file, alive
        self.hold(0)

    def hold(self, steps: int) -> None:
        """Let the gang compute up to this step and no further."""
        unfinished = self._file.with_suffix(".unfinished")
        unfinished.write_text(str(steps))
        unfinished.rename(self._file)

    def let(self, steps: int) -> None:
        """Let the gang compute up to this step, and wait until it is done."""
        self.hold(steps)
        self.wait(lambda: any(event.step >= steps for event in self._events(Progress)), f"step {steps}")

    def wait_for_world(self, ranks: int) -> None:
        """Wait until the newest gang has `ranks` ranks."""
        self.wait(lambda: [event.world for event in self.began()][-1:] == [ranks], f"a gang of {ranks} ranks")

    def began(self) -> list[AttemptBegan]:
        """The gangs that formed, in order."""
        return self._events(AttemptBegan)

    def worlds(self) -> list[int]:
        """The successive numbers of ranks."""
        sizes = [event.world for event in self.began()]
        return [size for place, size in enumerate(sizes) if sizes[place - 1 : place] != [size]]

    def wait(self, there: Callable[[], bool], what: str) -> None:
        """Wait until a condition is true."""
        deadline, alive = time.monotonic() + PATIENCE, self._alive()
        while not there():
            assert alive and time.monotonic() < deadline, f"{what} never came"
            time.sleep(0.3)
            alive = self._alive()  # checked first: the event may appear while the last process ends

    def _events(self, kind: type[E]) -> list[E]:
        return [event for event in read_events(self._store, self._run_id) if isinstance(event, kind)]


class Nodes(Held):
    """`with Nodes(...) as nodes`: one launch of `spec`, which sets the possible number of nodes. The rendezvous runs on
    the node "host".
    """

    def __init__(self, store: Store, spec: Spec, folder: Path, fewest: int | None = None) -> None:
        """With `fewest`, the rendezvous starts with that many nodes, regardless of the spec. More nodes have time to
        join.
        """
        folder.mkdir(parents=True)
        self._last_call = 30 if fewest else 5  # seconds
        self._sizes = f"{fewest or spec.cluster.nodes.min}:{spec.cluster.nodes.max}"
        self._spares = f",spares={spec.cluster.spares}" if spec.cluster.spares else ""
        self.run_id, self.launch = identity_of(spec), launch(store, spec)
        self._spec, self._folder, self._port = spec, folder, free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._came: dict[str, float] = {}  # Unix seconds
        self._went: dict[str, float] = {}
        super().__init__(store, self.run_id, folder / "holds", self._any_left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._processes:
            self.kill(name)

    def start(self, *names: str) -> None:
        """Start nodes in this order. The first node gets the lowest rank."""
        for name in names:
            self._processes[name] = self._started(name)
            self._came[name] = time.time()

    def kill(self, name: str) -> None:
        """A node dies with all its processes."""
        self._went.setdefault(name, time.time())
        kill_family(self._processes[name])

    def freeze(self, name: str) -> None:
        """A node freezes: it sends nothing and closes no connection."""
        for process in self._all(name):
            process.suspend()

    def thaw(self, name: str) -> None:
        """A frozen node resumes."""
        for process in self._all(name):
            process.resume()

    def drain(self, name: str) -> None:
        """Ask a node to leave. Its rank notices, and computes one more step with the gang."""
        notice = self._folder / "stopped"
        notice.unlink(missing_ok=True)
        self._processes[name].send_signal(signal.SIGTERM)
        self.wait(notice.exists, "the end of its wait")

    def wait_for_end(self) -> dict[str, int]:
        """Wait for all nodes. Returns how each one ended."""
        return {name: process.wait(PATIENCE) for name, process in self._processes.items()}

    def stretches(self) -> list[Stretch]:
        """The steps that each gang computed."""
        attempts, result = self.began(), []
        for index, attempt in enumerate(attempts):
            steps = [event.step for event in self._events(Progress) if event.attempt == attempt.attempt]
            end = max([attempt.step, *steps])
            kept_until = attempts[index + 1].step if index + 1 < len(attempts) else end
            joined = {name for name, time in self._came.items() if time < attempt.time}
            departed = {name for name, time in self._went.items() if time < attempt.time}
            result.append(Stretch(frozenset(joined - departed), attempt.step, end, kept_until))
        return result

    def printed(self) -> str:
        """The output of the nodes, for assertion messages."""
        texts = {path.stem: path.read_text(errors="replace")[-3000:] for path in sorted(self._folder.glob("*.log"))}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())

    def wait(self, there: Callable[[], bool], what: str) -> None:
        """See Held."""
        try:
            super().wait(there, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.printed()}") from error

    def _any_left(self) -> bool:
        return any(process.poll() is None for process in self._processes.values())

    def _all(self, name: str) -> list[psutil.Process]:
        process = self._processes[name]
        if process.poll() is not None:
            return []
        agent = psutil.Process(process.pid)
        return [agent, *agent.children(recursive=True)]

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "holdfast.launch.torchrun", f"--nnodes={self._sizes}",
            "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}",
            f"--rdzv-id={self.run_id}-{self.launch}", "--local-addr=127.0.0.1", "--max-restarts=5",
            f"--rdzv-conf=join_timeout=180,read_timeout=180,last_call_timeout={self._last_call},"
            f"is_host={int(name == 'host')}{self._spares}",
            f"--shutdown-timeout={int(self._spec.checkpoint.grace_seconds)}", "-m", HELD,
            "--run-id", self.run_id, "--launch", str(self.launch), "--store", self._store.url,
        ]  # fmt: skip
        exit_file = self._folder / f"{name}.ending"
        exit_file.write_text("")
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR",
            "HOLDFAST_HOME": str(self._folder / f"home-{name}"), **self.variables, FILE_VARIABLE: str(exit_file),
            PARENT: str(os.getpid()), **LAUNCH_KEY,
        }  # fmt: skip
        with (self._folder / f"{name}.log").open("ab") as output:
            return warm.popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
