"""Faults: the effect of each on an active run, and its duration.

A fault acts, lasts for its duration if it has one, and is undone. It returns a description, or an empty string if it
had no target. The caller checks whether the run survives.
"""

import contextlib
import ctypes
import os
import random
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from holdfast.pipelines.chaos import disk
from holdfast.pipelines.chaos.disk import Disk
from holdfast.pipelines.chaos.processes import AGENT, PIPELINE, TORCHRUN, largest, launcher_of, ranks_of, running
from holdfast.pipelines.chaos.proxy import Act, FaultyProxy, answer, flip, lose_reply, reset, slow, truncate
from holdfast.spec import ExitCode

# A wall clock with an adjustable offset for the processes of a run.
#
# Changing the machine's clock would require root and affect all processes. So the run's interpreters get a
# `sitecustomize` that adds the offset in a file to `time.time`. Code that reads the clock another way gets the true
# time. S3 requests are signed with the true time, as by a client that has corrected its clock.

VARIABLE = "HOLDFAST_CHAOS_CLOCK"  # file with the offset
OFFSET = struct.Struct("d")  # seconds
CUSTOM = """import mmap, os, struct, time

def _jump(path, real=time.time, unpack=struct.Struct("d").unpack_from):
    with open(path, "rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    time.time = lambda: real() + unpack(offset)[0]
    time.time_ns = lambda: int(time.time() * 1e9)

_jump(os.environ["HOLDFAST_CHAOS_CLOCK"])
"""


class Clock:
    """The clock of a run's processes."""

    def __init__(self, folder: Path) -> None:
        """Create `folder`, which only this clock uses, with offset 0."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(CUSTOM)
        self._folder, self._file = folder, folder / "offset"
        if not self._file.exists():  # processes that survived an earlier run here may have mapped it
            self._file.write_bytes(OFFSET.pack(0.0))
        self.jump(0.0)

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """The additional variables of a process with the variables `before`."""
        paths = filter(None, (str(self._folder), before.get("PYTHONPATH")))
        return {VARIABLE: str(self._file), "PYTHONPATH": os.pathsep.join(paths)}

    def jump(self, seconds: float) -> None:
        """Set the offset."""
        with self._file.open("r+b") as file:
            file.write(OFFSET.pack(seconds))


# Cut network connections between ranks: both ends of each connection of a rank to its peers are closed.
#
# A connection is shut down through a copy of its descriptor (pidfd_getfd(2), Linux 5.6). The kernel allows that for
# traceable processes of the same user, such as this process's descendants. Some containers forbid the call.

_PIDFD_GETFD = 438  # on every architecture


def refused() -> str:
    """Why no connection can be cut here; empty if it is possible."""
    first, second = socket.socketpair()
    with first, second, subprocess.Popen(["sleep", "60"], stdin=first.fileno()) as child:  # a parent may always copy
        try:
            _taken(child.pid, 0).close()
        except (AttributeError, OSError) as error:
            return f"this kernel gives no copy of a socket of another process (pidfd_getfd): {error}"
        finally:
            child.kill()
    return ""


def cut(process: psutil.Process, peers: Iterable[psutil.Process]) -> int:
    """Shut down the connections of `process` to its peers. Returns their number. Raises psutil.Error and OSError."""
    peer_addresses = {link.laddr for peer in peers for link in _connections(peer)}
    number = 0
    for link in _connections(process):
        if link.raddr in peer_addresses:
            with contextlib.suppress(OSError), _taken(process.pid, link.fd) as connection:  # it ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)
                number += 1
    return number


def _connections(process: psutil.Process) -> list[Any]:
    return [connection for connection in process.net_connections("tcp") if connection.status == psutil.CONN_ESTABLISHED]


def _taken(pid: int, descriptor: int) -> socket.socket:
    """A copy of a socket of another process. Raises OSError."""
    pidfd = os.pidfd_open(pid)
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
        if copy < 0:
            raise OSError(number := ctypes.get_errno(), os.strerror(number))
        return socket.socket(fileno=copy)
    finally:
        os.close(pidfd)


FREEZE_SECONDS = 3.0
SLOW_SECONDS = 4.0
AWAY_SECONDS = 4.0
JUMP_SECONDS = 3600.0
LIMIT_SECONDS = 30.0  # maximum wait until a rank at its memory limit needs more
LOAD_SECONDS = 20.0  # wait for a process that loads false data
LOOK_SECONDS = 0.5  # between checks whether training is far enough
BEAT_SECONDS = 0.05  # of a slow rank: alternately stopped and running for this long


@dataclass(frozen=True)
class Scene:
    """Everything that a fault may touch."""

    command: psutil.Process  # `holdfast run`
    proxy: FaultyProxy | None  # in front of the store
    clock: Clock  # of all processes of the run
    disk: Disk | None  # of the run, if a fault needs one
    rng: random.Random
    late: Callable[[], bool]  # whether training has reached the step of the next fault


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    message: str
    act: Callable[[Scene], str]
    of_store: bool = False
    ends_command: bool = False  # so the command must be repeated
    ranks: int = 1  # minimum number of ranks
    excuses: ExitCode | None = None  # a permanent code that it may cause, which repeating the command fixes
    refused: Callable[[], str] = str  # why it is impossible on this machine; empty if possible


def _killed(process: psutil.Process | None, what: str, number: int = signal.SIGKILL) -> str:
    if process is None:
        return ""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
        return f"{what}, process {process.pid}, gets {signal.Signals(number).name}"
    return ""


def _rank(scene: Scene) -> tuple[int, psutil.Process] | None:
    ranks = ranks_of(scene.command)
    return scene.rng.choice(list(ranks.items())) if ranks else None


def _signal_rank(number: int) -> Callable[[Scene], str]:
    def act(scene: Scene) -> str:
        rank = _rank(scene)
        return "" if rank is None else _killed(rank[1], f"rank {rank[0]}", number)

    return act


@contextmanager
def _stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def _freeze(scene: Scene) -> str:
    rank = _rank(scene)
    if rank is None:
        return ""
    with contextlib.suppress(psutil.NoSuchProcess), _stopped(rank[1]):
        time.sleep(FREEZE_SECONDS)
        return f"rank {rank[0]} stands still for {FREEZE_SECONDS:g} s (SIGSTOP, SIGCONT)"
    return ""


def _slow_rank(scene: Scene) -> str:
    rank = _rank(scene)
    if rank is None:
        return ""
    with contextlib.suppress(psutil.NoSuchProcess):
        end = time.monotonic() + SLOW_SECONDS
        while time.monotonic() < end:
            with _stopped(rank[1]):
                time.sleep(BEAT_SECONDS)
            time.sleep(BEAT_SECONDS)
    return f"rank {rank[0]} has half of its time for {SLOW_SECONDS:g} s"


def _cut_network(scene: Scene) -> str:
    ranks = ranks_of(scene.command)
    if len(ranks) < 2:
        return ""
    rank = scene.rng.choice(list(ranks))
    with contextlib.suppress(psutil.Error):  # one of them ended meanwhile
        number = cut(ranks[rank], [process for other, process in ranks.items() if other != rank])
        return f"{number} connections between rank {rank} and its peers end" if number else ""
    return ""


def _jump(scene: Scene) -> str:
    if not ranks_of(scene.command):
        return ""
    scene.clock.jump(JUMP_SECONDS)
    try:
        time.sleep(AWAY_SECONDS)
    finally:
        scene.clock.jump(0.0)
    return f"the clock goes {JUMP_SECONDS / 60:g} minutes forward, and {AWAY_SECONDS:g} s later back"


def _out_of_memory(scene: Scene) -> str:
    return _killed(largest(scene.command), "the process with the most memory")


def _unlimitable() -> str:
    """Why the memory of a running process cannot be limited here; empty if it can."""
    return "" if hasattr(psutil.Process, "rlimit") else "this system limits no process that runs already (prlimit)"


def _limit_memory(scene: Scene) -> str:
    """Limit the address space, which the kernel counts when it is allocated; later writes to it do not count.

    The limit ends with its process.
    """
    ranks, rank = ranks_of(scene.command), _rank(scene)
    if rank is None:
        return ""
    number, process = rank
    with contextlib.suppress(psutil.NoSuchProcess):
        limits = process.rlimit(psutil.RLIMIT_AS)
        process.rlimit(psutil.RLIMIT_AS, (0, limits[1]))
        began, alive = time.monotonic(), {process, *ranks.values()}
        while alive and time.monotonic() < began + LIMIT_SECONDS:
            _, remaining = psutil.wait_procs(alive, timeout=LOOK_SECONDS)
            alive = set(remaining)
            if scene.late():
                break
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_AS, limits)
        effect = f"for {time.monotonic() - began:.0f} s, and needs none" if process in alive else "and ends"
        return f"rank {number}, process {process.pid}, gets no more memory {effect}"
    return ""


def _fill_disk(scene: Scene) -> str:
    """Fill the disk and kill a rank, because a starting rank needs the disk most."""
    assert scene.disk is not None
    if (rank := _rank(scene)) is None:
        return ""
    with scene.disk.full():
        if killed := _killed(rank[1], f"rank {rank[0]}"):
            time.sleep(AWAY_SECONDS)
    return killed and f"{killed}, and the disk of the run has no space left for {AWAY_SECONDS:g} s"


def _store(words: str, *acts: Act, chance: float = 1.0, method: str | None = None, path: str = "") -> Fault:
    def act(scene: Scene) -> str:
        assert scene.proxy is not None
        injections = [
            scene.proxy.inject(fault_act, method=method, path=path, times=None, chance=chance) for fault_act in acts
        ]
        time.sleep(AWAY_SECONDS)
        scene.proxy.heal()
        return f"the store {words} for {AWAY_SECONDS:g} s: {sum(injection.hits for injection in injections)} requests"

    return Fault(f"the store {words} for {AWAY_SECONDS:g} s", act, of_store=True)


def _lie(scene: Scene) -> str:
    """Return false data and kill a rank, because only loading is affected.

    The false replies are few, so no two readers agree on damage for long.
    """
    assert scene.proxy is not None
    injections = [scene.proxy.inject(act, method="GET", path="/packs/") for act in (flip(0), truncate(20))]
    rank = _rank(scene)
    killed = "" if rank is None else _killed(rank[1], f"rank {rank[0]}")
    if killed:
        end = time.monotonic() + LOAD_SECONDS
        while not all(injection.hits for injection in injections) and time.monotonic() < end:
            time.sleep(BEAT_SECONDS)
    scene.proxy.heal()
    return (
        killed
        and f"{killed}, and {sum(injection.hits for injection in injections)} replies to loads at that time are wrong"
    )


FAULTS: Mapping[str, Fault] = {
    "rank-killed": Fault("SIGKILL to a rank", _signal_rank(signal.SIGKILL)),
    "rank-told-to-leave": Fault("SIGTERM to a rank: the gang saves and leaves", _signal_rank(signal.SIGTERM)),
    "rank-frozen": Fault("SIGSTOP to a rank, and SIGCONT some seconds later", _freeze),
    "rank-slow": Fault("a rank has half of its time for some seconds", _slow_rank),
    "network-cut": Fault("the connections of a rank to its peers end", _cut_network, ranks=2, refused=refused),
    "clock-jumped": Fault("the clock of the run goes an hour forward, and back", _jump),
    "agent-killed": Fault(
        "SIGKILL to the checkpoint agent", lambda scene: _killed(running(scene.command, AGENT), "the checkpoint agent")
    ),
    "node-killed": Fault(
        "SIGKILL to torchrun, and with it to all that runs on the node",
        lambda scene: _killed(running(scene.command, TORCHRUN), "torchrun"),
    ),
    "out-of-memory": Fault("SIGKILL to the process with the most memory, as the kernel does", _out_of_memory),
    "memory-limit": Fault(
        "a rank gets no more memory (prlimit), so that one of its allocations fails",
        _limit_memory,
        excuses=ExitCode.OUT_OF_MEMORY,
        refused=_unlimitable,
    ),
    "launcher-killed": Fault(
        "SIGKILL to the train step",
        lambda scene: _killed(launcher_of(scene.command), "the launcher"),
        ends_command=True,
    ),
    "pipeline-killed": Fault(
        "SIGKILL to what executes the pipeline",
        lambda scene: _killed(running(scene.command, PIPELINE), "the pipeline"),
        ends_command=True,
    ),
    "command-killed": Fault(
        "SIGKILL to the command itself", lambda scene: _killed(scene.command, "the command"), ends_command=True
    ),
    "disk-full": Fault(
        f"SIGKILL to a rank, and the disk has no space left for {AWAY_SECONDS:g} s", _fill_disk, refused=disk.refused
    ),
    "store-slow": _store("takes half a second for each request", slow(0.5)),
    "store-failing": _store(
        "fails every third request",
        *(answer(500, "InternalError"), answer(503, "SlowDown"), lose_reply(), reset(after=100)),
        chance=0.1,
    ),
    "store-away": _store("answers no request", reset()),
    "store-lying": Fault(
        "SIGKILL to a rank, and of what is loaded then a bit is flipped, or the end is missing", _lie, of_store=True
    ),
    "store-full": _store("has no space left", answer(507, "XMinioStorageFull"), method="PUT"),
}
