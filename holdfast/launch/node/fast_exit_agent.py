"""Agent that notices the end of a rank immediately, and ends the survivors of a dead rank quickly.

torch's agent polls its ranks one after the other, every `--monitor-interval`, and gives the survivors of a failure half
a minute. Here, the wait between two polls ends with the first rank, as the kernel or the warm server reports it.

When a rank was killed, the results of its peers no longer count. They wait in a collective for the dead rank. Some of
these waits (for a key of the store that forms a group) notice neither the lost connection nor a signal. So survivors
get SIGTERM and have SURVIVOR_SECONDS to leave. A rank that saves, or hands over a copy, has SAVING_SECONDS.

The checkpoint agent, which outlives the ranks, has all copies that were handed over. A survivor can only take an
incomplete copy with it, which makes no checkpoint.
"""

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

from holdfast.launch.exits import FOLDER_VARIABLE, mark_as_left
from holdfast.launch.node.stacks import STACK_SECONDS, stacks_of
from holdfast.runtime.heartbeat import SUFFIX, HeartbeatReader
from holdfast.telemetry.phases import PHASES

log = logging.getLogger("holdfast.launch")

SURVIVOR_SECONDS = 5.0  # from a rank's death to SIGKILL for a rank that neither leaves nor saves
SAVING_SECONDS = 30.0  # the same for a rank that saves: the grace period of torch
_LOOK = 0.1  # seconds between two polls of what a survivor does
_SAVING = (PHASES.index("save"), PHASES.index("leave"))


class Started(Protocol):
    """A process that this one, or its warm server, has started."""

    pid: int
    returncode: int | None  # None until `poll` has seen the end

    def poll(self) -> int | None:
        """See subprocess.Popen."""


class FastExitAgent(LocalElasticAgent):
    """Agent that waits for the end of its ranks instead of sleeping; see the module."""

    def __init__(self, spec: Any, *arguments: Any, **named: Any) -> None:
        """As torch's own. The monitor interval applies to polls of everything except ranks."""
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
    """Wait at most `seconds` until one of the running processes ends. A process for which the kernel has no descriptor
    is polled only after that time."""
    with _ends([process for process in processes if process.returncode is None]) as ends:
        ends(seconds)


def end_survivors(
    ranks: Sequence[Started],
    is_saving: Callable[[int], bool] | None = None,
    seconds: float = SURVIVOR_SECONDS,
    saving_seconds: float = SAVING_SECONDS,
) -> None:
    """Ask the other ranks to leave after one was killed, and kill those that do not leave in time.

    They have `seconds`, or `saving_seconds` while `is_saving` returns True for their process id. When this returns, all
    have ended, except those that the kernel does not release. None of them counts as the cause.
    """
    is_saving = is_saving or _is_saving
    start, killed = time.monotonic(), set[int]()
    for rank in _running(ranks):
        mark_as_left(rank.pid)
        log.warning("process %d gets SIGTERM: another rank was killed", rank.pid)
        _signal(rank, signal.SIGTERM)
    while running := _running(ranks):
        passed = time.monotonic() - start
        late = [process for process in running if passed > (saving_seconds if is_saving(process.pid) else seconds)]
        new = [process for process in late if process.pid not in killed]
        _tell_where(new)
        for process in new:
            log.warning(
                "process %d did not leave in %.1f s after another rank was killed: it is killed", process.pid, passed
            )
            _signal(process, signal.SIGKILL)
            killed.add(process.pid)
        if passed > saving_seconds + seconds:
            return
        wait_for_end(running, _LOOK)


def _running(ranks: Sequence[Started]) -> list[Started]:
    return [rank for rank in ranks if rank.poll() is None]


def _signal(rank: Started, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(rank.pid, number)  # it leads a session, as torch starts it


def _tell_where(ranks: Sequence[Started]) -> None:
    """Log the stacks of ranks that do not leave: there is no other trace of the reason."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not ranks or not folder:
        return
    stacks = stacks_of(Path(folder), {rank.pid: partial(_send, rank) for rank in ranks}, starved_seconds=STACK_SECONDS)
    for pid, text in stacks.items():
        log.warning(
            "the stacks of process %d:\n%s", pid, text.decode(errors="replace").rstrip() or "  it does not answer"
        )


def _send(rank: Started, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(rank.pid, number)


def _is_saving(pid: int) -> bool:
    """Whether a rank saves or leaves, by its heartbeat page."""
    with suppress(OSError, ValueError, KeyError):
        return HeartbeatReader(Path(os.environ[FOLDER_VARIABLE]) / f"{pid}{SUFFIX}").read().phase in _SAVING
    return False


@contextmanager
def _ends(processes: Sequence[Started]) -> Iterator[Callable[[float], object]]:
    """A function that waits, in seconds, for the first of these processes to end."""
    poll, descriptors, blind = select.poll(), list[int](), False
    try:
        for process in processes:
            fileno = getattr(process, "fileno", None)
            if fileno is not None:  # the process that forked it reports there, a moment after the kernel knows
                poll.register(fileno(), select.POLLIN)
            elif (pidfd := _pidfd(process)) is not None:
                descriptors.append(pidfd)
                poll.register(pidfd, select.POLLIN)
            else:
                blind = True
        yield time.sleep if blind else (lambda seconds: poll.poll(seconds * 1000))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _pidfd(process: Started) -> int | None:
    """A descriptor that becomes readable when the process has ended; None where the kernel has none, or refuses it."""
    if not isinstance(process, subprocess.Popen):
        return None
    with suppress(OSError, AttributeError):
        return os.pidfd_open(process.pid)
    return None
