"""The launcher's side of a launch that stands by: the next one, started while this one trains.

A gang that trains says so over its line (`launch.turn`), and only then is the next one started, so that it takes
nothing from one that recovers. Its ranks come as far as they can without a claim on the run, and wait. One that is not
ready when its turn comes, or that was made for another job, is sent away, and the launch starts as without it; one that
dies is replaced, unless several have died in a row soon after they had begun.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TextIO

from holdfast.launch.interface import Job
from holdfast.launch.turn import BEGIN, READY, TRAINS
from holdfast.launch.warm import WarmProcess

log = logging.getLogger("holdfast.launch")

TRIES = 3  # in a row: what dies at once would do so again
LASTING = 600.0  # seconds after which the death of one says nothing of the next
LEAVE_SECONDS = 10.0  # for one that is sent away; then it is killed
SHOWN = 5  # lines of what one printed that has died


@dataclass(eq=False)
class LocalGang:
    """The processes of a launch on this machine, led by the wrapper around torchrun."""

    job: Job
    process: subprocess.Popen[bytes] | WarmProcess
    output: TextIO  # what they print
    line: socket.socket | None = None  # the launcher's end of `launch.turn`; None: there is no talk with them
    ready: int = 0  # ranks at their gate
    begun: bool = True  # False: it stands by
    since: float = field(default_factory=time.monotonic)
    gone: threading.Event = field(default_factory=threading.Event)  # set when no process of it holds its line any more

    def kill(self) -> None:
        """End all of it at once."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def hang_up(self) -> None:
        """Nothing more is said over its line: one that stands by leaves."""
        if self.line is not None:
            with suppress(OSError):
                self.line.shutdown(socket.SHUT_RDWR)

    def send_away(self) -> None:
        """It will have no turn: one that is ready sees that by its line, and one that is not by the signal."""
        self.hang_up()
        self.process.send_signal(signal.SIGTERM)

    def wait_until_gone(self, seconds: float = LEAVE_SECONDS) -> None:
        """The process that leads it was killed: wait, so long at most, until its ranks are gone as well."""
        if self.line is not None and not self.gone.wait(seconds):
            log.warning(
                "processes of launch %d are still there %g s after torchrun was killed", self.job.launch, seconds
            )


class Standby:
    """Keeps at most one launch ready. For any thread."""

    def __init__(self, start: Callable[[Job], LocalGang | None]) -> None:
        """`start` starts a job that is to wait for its turn; None where it cannot."""
        self._start = start
        self._lock, self._tries = threading.Lock(), 0
        self._current: LocalGang | None = None  # the launch that was begun last
        self._waiting: LocalGang | None = None
        self._threads: list[threading.Thread] = []

    def follow(self, gang: LocalGang) -> None:
        """A launch has begun. The one after it is made ready once it trains, if its job names one."""
        with self._lock:
            self._current, self._tries = gang, TRIES
            self._listen(gang)

    def take(self, job: Job) -> LocalGang | None:
        """The launch that stands by, told to begin and followed, if it is ready and was made for `job`."""
        with self._lock:
            gang, self._waiting, self._current = self._waiting, None, None  # what is begun now is followed in its turn
            if gang is None:
                return None
            if gang.ready == job.processes and gang.job == replace(job, standby=None) and gang.line is not None:
                with suppress(OSError):  # it has just died
                    gang.line.send(BEGIN)
                    gang.job, gang.begun = job, True
                    self._current, self._tries = gang, TRIES
                    return gang
            log.debug("what stands by is of no use to launch %d: %d ranks of it are ready", job.launch, gang.ready)
            gang.send_away()
            return None

    def dismiss(self) -> None:
        """Send away what stands by, without waiting for it."""
        with self._lock:
            gang, self._waiting, self._tries = self._waiting, None, 0
        if gang is not None:
            gang.send_away()

    def close(self) -> None:
        """Send away what stands by, and wait until nothing of it is left. The launches have ended."""
        self.dismiss()
        for thread in self._threads:
            thread.join(2 * LEAVE_SECONDS)

    def _prepare(self, job: Job | None) -> bool:
        """Start what stands by, if `job` is still the one after the launch that was begun last."""
        with self._lock:
            next_one = self._current.job.standby if self._current else None
            if job is None or job != next_one or self._waiting is not None or not self._tries:
                return False
            self._tries -= 1
            self._waiting = self._start(job)
            if self._waiting is not None:
                self._listen(self._waiting)
            return self._waiting is not None

    def _listen(self, gang: LocalGang) -> None:
        if gang.line is not None:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=self._hear, args=[gang], name="line", daemon=True))
            self._threads[-1].start()

    def _hear(self, gang: LocalGang) -> None:
        """Listen to a launch to the end of it, or of the talk with it."""
        assert gang.line is not None
        with gang.line:
            while said := _next(gang.line):
                gang.ready += said.count(READY)
                if TRAINS in said:
                    self._prepare(gang.job.standby)
            gang.gone.set()
            with self._lock:
                if gang.begun:  # its end is the launcher's
                    return
                died = self._waiting is gang
                self._waiting = None if died else self._waiting
                if died and time.monotonic() - gang.since > LASTING:
                    self._tries = TRIES
        try:
            gang.process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            gang.kill()
            gang.process.wait()
        with gang.output:
            words = gang.output.readlines()[-SHOWN:] if died else []
        if died:
            what = "another takes its place" if self._prepare(gang.job) else "none takes its place"
            said_last = "".join(f"\n    {line.rstrip()}" for line in words)
            log.warning("launch %d, which stood by, has died: %s%s", gang.job.launch, what, said_last)


def _next(line: socket.socket) -> bytes:
    try:
        return line.recv(64)
    except OSError:
        return b""
