"""The agent of a node that learns at once when one of its ranks ends, and lets no survivor of a dead one linger.

torch's own looks at its ranks in turn, every `--monitor-interval`, and gives those that are left half a minute when one
has failed. Here the wait between two looks ends with the first rank, by what the kernel or the server of warm
processes says. Where a rank was killed, nothing that the others compute counts any more: they wait in a collective for
one that does not come, and some waits of it (for a key of the store by which a group is made) hear neither the lost
connection nor a signal. So they are told to leave, and have SURVIVOR_SECONDS; one that is at a save, or hands over what
it has copied, has SAVING_SECONDS. What was handed over is the checkpoint agent's, which outlives them: all that a
survivor can take with it is a copy which was not whole, and a checkpoint that was not whole is none.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from holdfast.launch.exit_report import FOLDER_VARIABLE, mark_as_left
from holdfast.launch.node.stacks import STACK_SECONDS, stacks_of
from holdfast.runtime.heartbeat import SUFFIX, HeartbeatReader
from holdfast.telemetry.phases import PHASES

log = logging.getLogger("holdfast.launch")

SURVIVOR_SECONDS = 5.0  # from a rank's death to SIGKILL for one that neither leaves nor saves
SAVING_SECONDS = 30.0  # the same for one that saves: what torch gives each
_LOOK = 0.1  # seconds between two looks at what a survivor does
_SAVING = (PHASES.index("save"), PHASES.index("leave"))


class Started(Protocol):
    """A process that this one, or a server for it, has started."""

    pid: int
    returncode: int | None  # None until `poll` has learnt of the end

    def poll(self) -> int | None:
        """See subprocess.Popen."""


class FastExitAgent(LocalElasticAgent):
    """See the module."""

    def __init__(self, spec: Any, *arguments: Any, **named: Any) -> None:
        """As torch's own. The interval is that between two looks at anything else than ranks."""
        super().__init__(spec, *arguments, **named)
        self._interval, spec.monitor_interval = float(spec.monitor_interval), 0.0

    @classmethod
    def install(cls) -> None:
        """Have torchrun use this agent."""
        api.LocalElasticAgent = cls  # type: ignore[misc]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self._ranks()
        wait_for_end(ranks, self._interval)
        if any(rank.poll() is not None and (rank.returncode or 0) < 0 for rank in ranks):
            end_survivors(ranks)
        return super()._monitor_workers(worker_group)

    def _ranks(self) -> list[Started]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in handlers.values()]


def wait_for_end(processes: Sequence[Started], seconds: float) -> None:
    """Wait until one of those that are not known to have ended ends, so long at most. A process that the kernel gives
    no descriptor of is only looked at when the time is up."""
    with _ends([process for process in processes if process.returncode is None]) as ends:
        ends(seconds)


def end_survivors(
    ranks: Sequence[Started],
    is_saving: Callable[[int], bool] | None = None,
    seconds: float = SURVIVOR_SECONDS,
    saving_seconds: float = SAVING_SECONDS,
) -> None:
    """A rank was killed: tell the others to leave, and kill those that do not within `seconds`, or `saving_seconds`
    while `is_saving` says of their process id that they save. All have ended when this returns, but those that the
    kernel does not let go; none of them is taken for the cause."""
    is_saving = is_saving or _is_saving
    begun, killed = time.monotonic(), set[int]()
    for rank in _running(ranks):
        mark_as_left(rank.pid)
        log.warning("process %d is told to leave (SIGTERM): another rank was killed", rank.pid)
        _signal(rank, signal.SIGTERM)
    while running := _running(ranks):
        passed = time.monotonic() - begun
        late = [one for one in running if passed > (saving_seconds if is_saving(one.pid) else seconds)]
        new = [one for one in late if one.pid not in killed]
        _tell_where(new)
        for one in new:
            log.warning(
                "process %d did not leave in %.1f s after another rank was killed: it is killed", one.pid, passed
            )
            _signal(one, signal.SIGKILL)
            killed.add(one.pid)
        if passed > saving_seconds + seconds:
            return
        wait_for_end(running, _LOOK)


def _running(ranks: Sequence[Started]) -> list[Started]:
    return [rank for rank in ranks if rank.poll() is None]


def _signal(rank: Started, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(rank.pid, number)  # it leads a session, as torch has them


def _tell_where(ranks: Sequence[Started]) -> None:
    """Print where ranks that do not leave are: whoever looks for the reason finds nothing else of it."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not ranks or not folder:
        return
    found = stacks_of(Path(folder), {rank.pid: partial(_send, rank) for rank in ranks}, starved_seconds=STACK_SECONDS)
    for pid, told in found.items():
        log.warning(
            "the stacks of process %d:\n%s", pid, told.decode(errors="replace").rstrip() or "  it does not answer"
        )


def _send(rank: Started, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(rank.pid, number)


def _is_saving(pid: int) -> bool:
    """Whether a rank is at a save, or on its way out, as its page says."""
    with suppress(OSError, ValueError, KeyError):
        return HeartbeatReader(Path(os.environ[FOLDER_VARIABLE]) / f"{pid}{SUFFIX}").read().phase in _SAVING
    return False


@contextmanager
def _ends(processes: Sequence[Started]) -> Iterator[Callable[[float], object]]:
    """What waits, in seconds, for the first of these to end."""
    poll, opened, blind = select.poll(), list[int](), False
    try:
        for process in processes:
            told = getattr(process, "fileno", None)
            if told is not None:  # who forked it says so there, a moment after the kernel knows
                poll.register(told(), select.POLLIN)
            elif (pidfd := _pidfd(process)) is not None:
                opened.append(pidfd)
                poll.register(pidfd, select.POLLIN)
            else:
                blind = True
        yield time.sleep if blind else (lambda seconds: poll.poll(seconds * 1000))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _pidfd(process: Started) -> int | None:
    """A descriptor that can be read once the process has ended; None where the kernel has none, or refuses it."""
    if not isinstance(process, subprocess.Popen):
        return None
    with suppress(OSError, AttributeError):
        return os.pidfd_open(process.pid)
    return None
