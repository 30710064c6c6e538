"""Live output of `holdfast chaos`: the schedule, each fault and its survival, and the result."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.markup import escape
from rich.table import Table

from holdfast.pipelines.chaos.compare import Chaos, FaultRun
from holdfast.pipelines.chaos.fault_run import Planned, Survived
from holdfast.pipelines.chaos.faults import FAULTS
from holdfast.pipelines.view.checkpoints import print_difference
from holdfast.pipelines.view.report import WIDE
from holdfast.pipelines.view.terminal import SafeConsole, duration

if TYPE_CHECKING:
    from rich.status import Status


class Teller:
    """Prints progress reports. Use it as a context manager, so that the terminal is restored."""

    def __init__(self, experiment: Chaos, *, to_stderr: bool = False) -> None:
        self._experiment = experiment
        console = SafeConsole(stderr=to_stderr)
        self._console = (
            console if console.is_terminal else SafeConsole(stderr=to_stderr, width=max(WIDE, console.width))
        )
        self._status: Status | None = None
        self._phase, self._began = "", time.monotonic()

    def __enter__(self) -> Self:
        self._console.print(
            f"[bold]chaos[/bold] {self._experiment.spec}, --seed {self._experiment.seed}", highlight=False
        )
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, what: object) -> None:
        """Print a report."""
        if isinstance(what, int):
            if self._status is not None:
                self._status.update(f"{self._phase}: step {what} of {self._experiment.steps or '?'}")
        elif isinstance(what, str):
            self._phase = what
            self._say(f"\n[bold]{escape(what)}[/bold]")
        elif isinstance(what, list):
            self._schedule(what)
        elif isinstance(what, Planned):
            self._say(f"  step {what.step:>5} is due for {what.fault}: {FAULTS[what.fault].message}")
        elif isinstance(what, Survived):
            suffix = "" if what.seconds is None else f", and trains on {duration(what.seconds)} later"
            self._say(f"  step {what.step:>5} [green]survives[/green] {what.fault}: {escape(what.did)}{suffix}")
        elif isinstance(what, FaultRun):
            self._ended(what)

    def _schedule(self, planned: list[Planned]) -> None:
        for cause in dict.fromkeys(self._experiment.left_out.values()):
            names = ", ".join(name for name, reason in self._experiment.left_out.items() if reason == cause)
            self._say(f"  [yellow]left out[/yellow]: {names}: {escape(cause)}")
        table = Table(box=None, pad_edge=False, header_style="dim", title="the schedule", title_justify="left")
        table.add_column("from step", justify="right")
        table.add_column("fault")
        for planned_fault in planned:
            table.add_row(str(planned_fault.step), f"{planned_fault.fault}: {FAULTS[planned_fault.fault].message}")
        self._console.print(table)

    def _ended(self, storm: FaultRun) -> None:
        calm = self._experiment.calm
        assert calm is not None
        slowest = max((survived_fault.seconds or 0.0 for survived_fault in storm.survived), default=0.0)
        if storm.missed:
            self._say(f"  [yellow]over before[/yellow]: {', '.join(storm.missed)}")
        self._say(
            f"\n{len(storm.survived)} faults, all survived, the slowest in {duration(slowest)}; "
            f"{storm.result.attempts} attempts, {storm.commands} times the command"
        )
        self._say(
            f"goodput {100 * self._experiment.goodput(storm):.0f} %: {duration(storm.result.seconds)} of training for "
            f"what took the calm run {duration(calm.seconds)}"
        )
        if storm.divergence is None:
            self._say(f"[green]equal[/green]: both have the state digest {calm.state_digest}")
            return
        self._say(f"[red]different[/red]: {calm.state_digest} calm, {storm.result.state_digest} under faults")
        if storm.divergence.first is not None:
            self._say(f"the runs part at step {storm.divergence.first}")
        if storm.divergence.difference is not None:
            self._say(f"the first checkpoint of both that differs is that of step {storm.divergence.differs_at}:")
            print_difference(storm.divergence.difference, "")

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
