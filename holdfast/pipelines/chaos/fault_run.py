"""A run of a spec on this machine, as a person would make it, and the faults that it is put through.

The command is given again whenever it has ended early, as a person or a pipeline would. A fault is survived when a step
is trained that was never reached before it; the next one waits for that.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path

import psutil

from holdfast.pipelines.chaos.clock import Clock
from holdfast.pipelines.chaos.disk import Disk
from holdfast.pipelines.chaos.faults import FAULTS, Scene
from holdfast.pipelines.chaos.proxy import FaultyProxy
from holdfast.spec import ExitCode
from holdfast.spec.errors import HoldfastError
from holdfast.telemetry.channel import PIPE
from holdfast.telemetry.event_log import PipeEvents
from holdfast.telemetry.events import Progress

LOOK_SECONDS = 0.1
END_SECONDS = 10.0  # at most, until what was killed has left its disk
SILENT_SECONDS = 1800.0  # without a step: nothing of ours takes so long
FIRST, LAST = 0.08, 0.85  # of the steps: when faults happen
DONE = (ExitCode.OK, ExitCode.NOT_BLESSED)
TAIL_LINES = 25
NOT_FOR_RUNS = ("MLFLOW_TRACKING_URI", "HOLDFAST_STORE", "HOLDFAST_WEBHOOK", "MODEL_REGISTRY_TOKEN")


class ChaosError(HoldfastError):
    """A run that did not survive, or could not be judged."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.UNEXPECTED


@dataclass(frozen=True)
class Planned:
    """A fault, the step from which on it is due, and the one by which it makes room for the next."""

    fault: str
    step: int
    by: int


@dataclass(frozen=True)
class Survived:
    """What a fault did, and how long it was until training had gone beyond where it was."""

    fault: str
    step: int  # that training had reached
    did: str  # in words
    seconds: float | None  # None: the run ended before another step, and well


@dataclass(frozen=True)
class _Pending:
    """A fault that happened, and is not survived yet."""

    fault: str
    step: int
    did: str
    began: float  # unix seconds
    over: float  # likewise
    command: int  # which of them, at least, has to train beyond that step

    def survived(self, now: float | None) -> Survived:
        return Survived(self.fault, self.step, self.did, None if now is None else now - self.began)


def schedule(faults: Sequence[str], steps: int, seed: int) -> list[Planned]:
    """Each of `faults` once, in an order and at steps that `seed` decides."""
    rng = random.Random(seed)  # noqa: S311 - a schedule
    order = list(faults)
    rng.shuffle(order)
    width = (LAST - FIRST) * steps / max(1, len(order))
    starts = [FIRST * steps + width * place for place in range(len(order) + 1)]
    return [
        Planned(fault, max(1, int(start + 0.8 * width * rng.random())), int(end))
        for fault, (start, end) in zip(order, pairwise(starts), strict=True)
    ]


@dataclass
class Run:
    """A run of a spec in a store, with a home of its own. What is looked at lies beside `log`, which is elsewhere."""

    command: Sequence[str]
    home: Path
    environment: Mapping[str, str]
    log: Path
    step: int = 0  # the highest that was trained
    commands: int = 0  # that were needed
    code: int = 0  # that the last one ended with
    excused: ExitCode | None = None  # a permanent code that the faults of the present one may lead to
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # of the command; tests start it warm
    _jumps: bool = field(default=False, init=False)  # its clock
    _disk: Disk | None = field(default=None, init=False)  # that its home is on
    _family: set[psutil.Process] = field(default_factory=set, init=False)  # what its commands have started, and more

    @cached_property
    def _clock(self) -> Clock:
        return Clock(self.log.with_suffix(".clock"))

    def go(
        self, planned: Sequence[Planned], proxy: FaultyProxy | None, seed: int,
        tell: Callable[[Planned | Survived | int], None],
    ) -> list[Survived]:  # fmt: skip
        """Run it to its end through all of `planned`. `tell` is told each fault when it begins, what became of it, and
        the steps in between. Raises ChaosError when the run ends for good, or does not go on."""
        events, waiting, survived = PipeEvents(self._events()), list(planned), list[Survived]()
        self._jumps = any(each.fault == "clock-jumped" for each in planned)
        rng, since, told = random.Random(seed), time.monotonic(), False  # noqa: S311 - a schedule
        pending: _Pending | None = None
        with contextlib.ExitStack() as alive:
            if any(each.fault == "disk-full" for each in planned):
                self._disk = alive.enter_context(Disk(self.home))
            alive.callback(self._end_family)
            process = self._again(alive)
            while True:
                trained = [event for event in events.new() if isinstance(event, Progress)]
                if pending is not None:  # what was on its way before a fault says nothing of it
                    before = [self.step, *(event.step for event in trained if event.time <= pending.over)]
                    beyond = any(event.time > pending.over and event.step > max(before) for event in trained)
                    if beyond and self.commands >= pending.command:
                        survived.append(pending.survived(time.time()))
                        tell(survived[-1])
                        pending = None
                reached = max((event.step for event in trained), default=0)
                if reached > self.step:
                    self.step, since = reached, time.monotonic()
                    tell(reached)
                if process.poll() is not None:
                    self.code = process.returncode
                    if self.code in DONE:
                        break
                    self._require_retryable(len(planned))
                    process = self._again(alive)
                elif pending is None and waiting and self.step >= waiting[0].step:
                    if not told:
                        tell(waiting[0])
                    late = partial(self._beyond, waiting[0].by)
                    scene = Scene(psutil.Process(process.pid), proxy, self._clock, self._disk, rng, late)
                    pending, told = self._hit(waiting[0].fault, scene), True
                    if pending is not None:
                        waiting.pop(0)
                        told = False
                if time.monotonic() - since > SILENT_SECONDS:
                    raise ChaosError(f"no step for {SILENT_SECONDS:g} s after step {self.step}\n{self._tail()}", 201)
                time.sleep(LOOK_SECONDS)
        if pending is not None:
            survived.append(pending.survived(None))
            tell(survived[-1])
        return survived

    def _again(self, alive: contextlib.ExitStack) -> subprocess.Popen[bytes]:
        self.commands += 1
        self.excused = None
        return alive.enter_context(self._started())

    def _hit(self, name: str, scene: Scene) -> _Pending | None:
        """Let a fault happen; None where there is nobody to do it to at the moment."""
        began, fault = time.time(), FAULTS[name]
        self._remember(scene.command)
        if not (did := fault.act(scene)):
            return None
        self.excused = fault.excuses or self.excused
        return _Pending(name, self.step, did, began, time.time(), self.commands + fault.ends_command)

    def _beyond(self, step: int) -> bool:
        """Whether training has come to `step`, by what is written at this moment."""
        return any(isinstance(each, Progress) and each.step >= step for each in PipeEvents(self._events()).new())

    def _events(self) -> Path:
        return self.log.with_suffix(".events")

    def _environment(self) -> dict[str, str]:
        """That of this process, but for what would have the run touch anything of its user's."""
        own = {name: value for name, value in os.environ.items() if name not in NOT_FOR_RUNS} | dict(self.environment)
        jumping = self._clock.environment(own) if self._jumps else {}
        return {**own, **jumping, "HOLDFAST_HOME": str(self.home), PIPE: str(self._events())}

    @contextlib.contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The command, which has ended when everything does."""
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            process = self.start(
                self.command if self._disk is None else self._disk.inside(self.command),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=self._environment(),
            )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                self._remember(psutil.Process(process.pid))
                process.kill()
            process.wait()

    def _remember(self, command: psutil.Process) -> None:
        """Keep what is below the command now: of a process whose parent is killed nobody says whose it was."""
        self._family = {each for each in self._family if each.is_running()}
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family.update(command.children(recursive=True))

    def _end_family(self) -> None:
        """Leave nothing of any command: what outlives it is there to save, and nobody wants that any more."""
        for each in list(self._family):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._family.update(each.children(recursive=True))
        for each in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(self._family, timeout=END_SECONDS)

    def _require_retryable(self, faults: int) -> None:
        killed = self.code < 0 or self.code >= 128  # a permanent code is no consequence of what was done to it
        if not killed and self.code != self.excused:
            raise ChaosError(f"the run ended for good with code {self.code}\n{self._tail()}", self.code)
        if self.commands > 2 * faults + 3:
            raise ChaosError(f"{self.commands} times the command, and the run has not ended\n{self._tail()}", 1)

    def _tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(f"    {line}" for line in [*lines, f"all of it: {self.log}"])
