"""Launcher on a Ray cluster: a placement group for each launch, with an actor on each node that runs torchrun.

Ray restarts nothing, and nothing outlives the launcher: it owns the actors, and their processes die with them.
`Supervisor` owns the restart budget, `placement_group` the reservation, and Ray's autoscaler adds machines.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from holdfast.launch.exits import NodeExit, parse_exit_report, root_cause
from holdfast.launch.gang import gang_environment, torchrun_arguments
from holdfast.launch.interface import LEAVE_MARGIN, GangExit, Job
from holdfast.launch.ray.node import Node
from holdfast.launch.ray.placement_group import GangReservation, fits, nodes_of, options_of
from holdfast.launch.reporting import LaunchLog
from holdfast.runtime.environment import make_folder
from holdfast.runtime.node import NODE_NAME
from holdfast.spec.cluster import amount
from holdfast.spec.errors import ClusterUnreachableError, ExitCode

log = logging.getLogger("holdfast.launch")

NAMESPACE = "holdfast"  # of Ray's named actors
RESOURCES = {"nvidia": "GPU", "amd": "GPU", "ascend": "NPU", "gaudi": "HPU", "tpu": "TPU"}  # Ray's names
TAIL_LINES = 40
POLL_SECONDS = 1.0
ROOM_SECONDS = 0.2  # between two tests whether there is room
START_SECONDS = 300.0  # for the actors, once all of them have room


class _Lock:
    """Empty actor: only its name matters."""

    def is_held(self) -> bool:
        """Always True: the lock is held while the actor exists."""
        return True


class RayLauncher:
    """Launcher that runs in its own driver process, on any machine of the cluster."""

    def __init__(self, logs: Path) -> None:
        """`logs`: folder for the ranks' output, on the launcher's machine. Raises ClusterUnreachableError."""
        self._logs = logs
        self._stop_requested = threading.Event()
        self._nodes: list[Any] = []
        self._deadline: float | None = None  # monotonic; then nodes that have not left are killed
        self._grace = 0.0
        connect()

    @contextmanager
    def only_one(self, run_id: str) -> Iterator[None]:
        """See Launcher. The lock is a named actor, which dies with its launcher."""
        name, logged = f"launcher-{run_id}", False
        while True:
            try:
                lock = ray.remote(_Lock).options(name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=-1).remote()
                break
            except ValueError:  # the name is taken
                if not logged:
                    log.info("run %s is being trained on this cluster: waiting for it", run_id)
                    logged = True
                time.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            with suppress(RayError):
                ray.kill(lock)

    def adopt(self, run_id: str, launch: int) -> bool:  # noqa: ARG002
        """See Launcher. Always False: no gang outlives the launcher that started it."""
        return False

    def run(self, job: Job) -> GangExit:
        """See Launcher."""
        if self._stop_requested.is_set():
            return GangExit(ExitCode.TERMINATED, (), "stopped before the gang was created")
        self._grace, self._deadline = job.grace_seconds, None
        count, patience = _count(job), job.cluster.pending_timeout_minutes * 60
        room = GangReservation(job.name, bundle(job), count, patience=patience, avoided=job.excluded_nodes)
        try:
            while not room.is_ready():
                if self._stop_requested.wait(ROOM_SECONDS):
                    return GangExit(ExitCode.TERMINATED, (), "stopped before there was room for the gang")
                if room.is_expired:
                    limit = f"cluster.pending_timeout_minutes ({job.cluster.pending_timeout_minutes:g})"
                    detail = f"given up after {limit}: {room.shortfall()}"
                    return GangExit(ExitCode.UNSCHEDULABLE, (), detail)
            return self._gang(job, room, count)
        except RayError as error:
            return GangExit(ExitCode.KILLED, (), f"a node was lost while the gang was being made: {_short(error)}")
        finally:
            self._nodes = []
            room.free()

    def stop(self) -> None:
        """See Launcher."""
        self._stop_requested.set()
        self._deadline = time.monotonic() + self._grace + LEAVE_MARGIN
        for node in self._nodes:
            with suppress(RayError):
                node.stop.remote()

    def _gang(self, job: Job, room: GangReservation, count: int) -> GangExit:
        """Start an actor with a torchrun in each bundle, and follow them to the end."""
        actor, options = ray.remote(Node), options_of(bundle(job))
        options |= {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 3}
        nodes = [actor.options(**options, scheduling_strategy=room.place(rank)).remote() for rank in range(count)]
        addresses = ray.get([node.place.remote() for node in nodes], timeout=START_SECONDS)
        self._nodes = nodes
        if self._stop_requested.is_set():  # stopped in between
            self.stop()
        make_folder(self._logs)
        path = self._logs / f"launch-{job.launch:06d}.log"
        results: queue.SimpleQueue[tuple[int, tuple[int, str]]] = queue.SimpleQueue()
        shared = gang_environment(job, count, addresses[0][0], int(addresses[0][1]))
        with _Log(path) as printed:
            for rank, node in enumerate(nodes):
                environment = {**shared, "PET_NODE_RANK": str(rank), NODE_NAME: addresses[rank][2]}
                stream = node.run.options(num_returns="streaming").remote(torchrun_arguments(job), environment)
                threading.Thread(target=_follow, args=(rank, stream, printed, results), daemon=True).start()
            outcomes = self._wait(nodes, results)
        return _gang_exit(outcomes, [place[2] for place in addresses], printed.tail, path)

    def _wait(self, nodes: Sequence[Any], ended: queue.SimpleQueue[tuple[int, tuple[int, str]]]) -> dict[int, Any]:
        """How each node ended, by its rank. After the first failure, the other nodes have the grace period to end."""
        outcomes: dict[int, tuple[int, str]] = {}
        while len(outcomes) < len(nodes):
            try:
                rank, outcome = ended.get(timeout=POLL_SECONDS)
                outcomes[rank] = outcome
                if outcome[0] != ExitCode.OK and self._deadline is None:
                    self._deadline = time.monotonic() + self._grace + LEAVE_MARGIN
            except queue.Empty:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    for rank, node in enumerate(nodes):
                        if rank not in outcomes:
                            ray.kill(node)
                    self._deadline = time.monotonic() + LEAVE_MARGIN
        return outcomes


class _Log:
    """The output of all nodes, in a file, and its last lines."""

    def __init__(self, path: Path) -> None:
        self._lock, self._tail = threading.Lock(), deque[str](maxlen=TAIL_LINES)
        self._file = LaunchLog(path)

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines."""
        return tuple(self._tail)

    def write(self, lines: str) -> None:
        """Add whole lines."""
        with self._lock:
            self._file.write(lines)
            self._tail.extend(lines.splitlines())


def connect() -> None:
    """Connect as a driver to the Ray cluster of this machine, or to the one that RAY_ADDRESS names. Raises
    ClusterUnreachableError."""
    if ray.is_initialized():
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError) as error:
        raise ClusterUnreachableError(f"Ray: {_short(error)}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray installs its own
                signal.signal(number, handler)


def bundle(job: Job) -> dict[str, float]:
    """The resources of a node of the gang, by Ray's names; memory in bytes."""
    demand = job.cluster.resources
    resources = {"CPU": float(amount(demand.cpu)), "memory": float(amount(demand.memory))}
    if name := RESOURCES.get(job.cluster.accelerator):
        resources[name] = float(job.processes)
    return resources


def _count(job: Job) -> int:
    """The number of nodes: as many as could hold a bundle now, within the spec's limits."""
    nodes = job.cluster.nodes
    if nodes.min == nodes.max:
        return nodes.max
    fitting = sum(fits(bundle(job), node) for node in nodes_of(job.excluded_nodes))
    return max(nodes.min, min(nodes.max, fitting))


def _follow(rank: int, stream: Any, printed: _Log, ended: queue.SimpleQueue[tuple[int, tuple[int, str]]]) -> None:
    """Pass on a node's output, and put how it ended into `ended`. A lost node reports nothing."""
    outcome = (int(ExitCode.KILLED), "")
    try:
        for reference in stream:
            item = ray.get(reference)
            if isinstance(item, str):
                printed.write(item)
            else:
                outcome = item
    except RayError as error:
        log.warning("node %d of the gang: %s", rank, _short(error))
    ended.put((rank, outcome))


def _gang_exit(answers: dict[int, tuple[int, str]], names: Sequence[str], tail: Sequence[str], path: Path) -> GangExit:
    """How the launch ended, from each node's exit report. Nodes are named by their Ray ids."""
    reports: dict[int, NodeExit] = {}
    codes = []
    for number, (code, text) in sorted(answers.items()):
        ending = parse_exit_report(text)
        if ending is not None:
            reports[number] = ending
        codes.append(ending.code if ending is not None else code)
    cause = root_cause(codes)
    silent = [names[number] for number in answers if number not in reports]
    lost = f"{', '.join(silent)} did not say how it ended. " if cause != ExitCode.OK and silent else ""
    blamed = frozenset(
        names[number] for number, ending in reports.items() if ending.blames_node and ending.code == cause
    )
    node, explains = next(
        ((number, ending.cause) for number, ending in reports.items() if ending.code == cause), (None, None)
    )
    rank, attempt = (explains.rank, explains.attempt) if explains else (None, None)
    if node is not None and cause != ExitCode.OK and reports[node].detail:
        lost += f"{reports[node].detail}. "
    return GangExit(cause, tail, f"{lost}The log is {path}", blamed, rank, node, attempt)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:500]
