"""A run of a spec on this machine, started like a person's, and the faults injected into it.

The command is repeated whenever it ends early, as a person or a pipeline would do. A fault is survived when a step is
trained that no earlier attempt reached. The next fault waits for that.
"""

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

from holdfast.pipelines.chaos.disk import Disk
from holdfast.pipelines.chaos.faults import FAULTS, Clock, Scene
from holdfast.pipelines.chaos.proxy import FaultyProxy
from holdfast.runtime.output import end_of_file
from holdfast.spec import ExitCode
from holdfast.spec.errors import HoldfastError
from holdfast.telemetry.channel import PIPE
from holdfast.telemetry.event_log import PipeEvents
from holdfast.telemetry.events import Progress

LOOK_SECONDS = 0.1
END_SECONDS = 10.0  # at most, until killed processes have left their disk
SILENT_SECONDS = 1800.0  # without a step; longer than anything in Holdfast takes
FIRST, LAST = 0.08, 0.85  # range of faults, as shares of the steps
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
    """A fault, the step from which it is due, and the step at which the next one is due."""

    fault: str
    step: int
    by: int


@dataclass(frozen=True)
class Survived:
    """The effect of a fault, and the time until training had progressed beyond it."""

    fault: str
    step: int  # step that training had reached
    did: str  # description for people
    seconds: float | None  # None: the run finished successfully before another step


@dataclass(frozen=True)
class _Pending:
    """A fault that happened and is not survived yet."""

    fault: str
    step: int
    did: str
    began: float  # unix seconds
    over: float  # unix seconds
    command: int  # first command that may train beyond that step

    def survived(self, now: float | None) -> Survived:
        return Survived(self.fault, self.step, self.did, None if now is None else now - self.began)


def schedule(faults: Sequence[str], steps: int, seed: int) -> list[Planned]:
    """Each of `faults` once, in an order and at steps that `seed` determines."""
    rng = random.Random(seed)  # noqa: S311 - a schedule
    order = list(faults)
    rng.shuffle(order)
    width = (LAST - FIRST) * steps / max(1, len(order))
    starts = [FIRST * steps + width * position for position in range(len(order) + 1)]
    return [
        Planned(fault, max(1, int(start + 0.8 * width * rng.random())), int(end))
        for fault, (start, end) in zip(order, pairwise(starts), strict=True)
    ]


@dataclass
class Run:
    """A run of a spec in a store, with a separate home. `log` and the files next to it are outside that home."""

    command: Sequence[str]
    home: Path
    environment: Mapping[str, str]
    log: Path
    step: int = 0  # highest trained step
    commands: int = 0  # commands so far
    code: int = 0  # exit code of the last command
    excused: ExitCode | None = None  # a permanent code that the current command's faults may cause
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # starts the command; tests start it warm
    _jumps: bool = field(default=False, init=False)  # whether its clock jumps
    _disk: Disk | None = field(default=None, init=False)  # disk of its home
    _family: set[psutil.Process] = field(default_factory=set, init=False)  # descendants of its commands

    @cached_property
    def _clock(self) -> Clock:
        return Clock(self.log.with_suffix(".clock"))

    def go(
        self,
        planned: Sequence[Planned],
        proxy: FaultyProxy | None,
        seed: int,
        tell: Callable[[Planned | Survived | int], None],
    ) -> list[Survived]:
        """Run it to its end through all of `planned`.

        `tell` receives each fault when it begins, its result, and the steps in between. Raises ChaosError when the run
        fails permanently or makes no progress.
        """
        events, waiting, survived = PipeEvents(self._events()), list(planned), list[Survived]()
        self._jumps = any(planned_fault.fault == "clock-jumped" for planned_fault in planned)
        rng, since, is_reported = random.Random(seed), time.monotonic(), False  # noqa: S311 - a schedule
        pending: _Pending | None = None
        with contextlib.ExitStack() as alive:
            if any(planned_fault.fault == "disk-full" for planned_fault in planned):
                self._disk = alive.enter_context(Disk(self.home))
            alive.callback(self._end_family)
            process = self._again(alive)
            while True:
                progress_events = [event for event in events.new() if isinstance(event, Progress)]
                if pending is not None:  # events from before the end of a fault do not count
                    earlier_steps = [
                        self.step,
                        *(event.step for event in progress_events if event.time <= pending.over),
                    ]
                    has_progressed = any(
                        event.time > pending.over and event.step > max(earlier_steps) for event in progress_events
                    )
                    if has_progressed and self.commands >= pending.command:
                        survived.append(pending.survived(time.time()))
                        tell(survived[-1])
                        pending = None
                reached = max((event.step for event in progress_events), default=0)
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
                    if not is_reported:
                        tell(waiting[0])
                    late = partial(self._beyond, waiting[0].by)
                    scene = Scene(psutil.Process(process.pid), proxy, self._clock, self._disk, rng, late)
                    pending, is_reported = self._hit(waiting[0].fault, scene), True
                    if pending is not None:
                        waiting.pop(0)
                        is_reported = False
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
        """Inject a fault; None if it has no target at the moment."""
        began, fault = time.time(), FAULTS[name]
        self._remember(scene.command)
        if not (did := fault.act(scene)):
            return None
        self.excused = fault.excuses or self.excused
        return _Pending(name, self.step, did, began, time.time(), self.commands + fault.ends_command)

    def _beyond(self, step: int) -> bool:
        """Whether training has reached `step`, by the events written so far."""
        return any(isinstance(event, Progress) and event.step >= step for event in PipeEvents(self._events()).new())

    def _events(self) -> Path:
        return self.log.with_suffix(".events")

    def _environment(self) -> dict[str, str]:
        """The environment of this process, without variables that would let the run touch its user's data."""
        variables = {name: value for name, value in os.environ.items() if name not in NOT_FOR_RUNS} | dict(
            self.environment
        )
        clock_variables = self._clock.environment(variables) if self._jumps else {}
        return {**variables, **clock_variables, "HOLDFAST_HOME": str(self.home), PIPE: str(self._events())}

    @contextlib.contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The command, which is killed at the end of the context if it still runs."""
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            process = self.start(
                self.command if self._disk is None else self._disk.inside(self.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment(),
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                self._remember(psutil.Process(process.pid))
                process.kill()
            process.wait()

    def _remember(self, command: psutil.Process) -> None:
        """Remember the command's descendants: after a parent is killed, its children are not attributable."""
        self._family = {process for process in self._family if process.is_running()}
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family.update(command.children(recursive=True))

    def _end_family(self) -> None:
        """Kill all descendants of all commands. Those that outlive a command only save, which is no longer needed."""
        for process in list(self._family):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._family.update(process.children(recursive=True))
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._family, timeout=END_SECONDS)

    def _require_retryable(self, faults: int) -> None:
        killed = self.code < 0 or self.code >= 128  # no fault causes a permanent code
        if not killed and self.code != self.excused:
            raise ChaosError(f"the run ended permanently with code {self.code}\n{self._tail()}", self.code)
        if self.commands > 2 * faults + 3:
            raise ChaosError(f"{self.commands} times the command, and the run has not ended\n{self._tail()}", 1)

    def _tail(self) -> str:
        lines = end_of_file(self.log, TAIL_LINES)
        return "\n".join(f"    {line}" for line in [*lines, f"all of it: {self.log}"])
