"""Live screen of a run: `holdfast watch`. It depends on the events alone, on any backend.

Drawing is a pure function of the events; the command reads them.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.pipelines.view.ledger import lines as ledger_lines
from holdfast.pipelines.view.terminal import duration
from holdfast.pipelines.view.throughput import lines as accelerator_lines
from holdfast.pipelines.view.throughput import throughput
from holdfast.telemetry.events import (
    AttemptBegan,
    Event,
    LaunchBegan,
    LaunchEnded,
    Progress,
    SaveCommitted,
    StragglerDetected,
    TimeSpent,
)
from holdfast.telemetry.ledger import ledger

POINTS = 400  # newest points of the curve
NEWS = 8  # lines of recent events
LEDGER_EVENTS = 50_000  # above this, `holdfast show --ledger` shows goodput instead
BARS = "▁▂▃▄▅▆▇█"
HEAT = ("green", "green3", "yellow3", "dark_orange", "red")  # green: no rank waits for it; red: ranks always do
WORKING = ("data", "forward", "backward", "pipeline", "optimizer")


class Screen:
    """The state of a watched run."""

    def __init__(self, name: str, run_id: str) -> None:
        self._title = f"{name}  {run_id}"
        self._losses: deque[float] = deque(maxlen=POINTS)
        self._news: deque[Event] = deque(maxlen=NEWS)
        self._figures: dict[type[Event], Event] = {}  # newest event of each kind
        self._worked: dict[int, float] = {}  # share of work without waits in each rank's latest report
        self._devices: dict[int, TimeSpent] = {}  # latest report of each rank
        self._slow: set[int] = set()
        self._kept: list[Event] = []
        self.backend_lines: list[str] = []  # the backend's lines while the ranks have not reported

    @property
    def trains(self) -> bool:
        """Whether the ranks have reported."""
        return Progress in self._figures or AttemptBegan in self._figures

    @property
    def has_ended(self) -> bool:
        """Whether its last launch has ended and none follows."""
        ended, began = self._figures.get(LaunchEnded), self._figures.get(LaunchBegan)
        return (
            isinstance(ended, LaunchEnded) and ended.restart_in is None and (began is None or began.time < ended.time)
        )

    def take(self, events: Iterable[Event]) -> None:
        """Process new events."""
        for event in events:
            self._figures[type(event)] = event
            if isinstance(event, Progress) and event.loss is not None:
                self._losses.append(event.loss)
            elif isinstance(event, TimeSpent):
                self._devices[event.rank] = event
                total = sum(event.seconds.values())
                self._worked[event.rank] = sum(event.seconds.get(name, 0.0) for name in WORKING) / total if total else 0
            elif isinstance(event, AttemptBegan):
                self._worked, self._slow = {}, set()
                self._devices = {rank: report for rank, report in self._devices.items() if rank < event.world}
            elif isinstance(event, LaunchEnded):
                self._devices = {}
            elif isinstance(event, StragglerDetected):
                self._slow.add(event.rank)
            if event.notable and not isinstance(event, SaveCommitted):
                self._news.append(event)
            if not isinstance(event, Progress) and len(self._kept) < LEDGER_EVENTS:
                self._kept.append(event)

    def draw(self, now: float, width: int = 100, height: int | None = None) -> RenderableType:
        """Draw the screen for a time (unix seconds). Without space in `height` lines, the oldest events are omitted."""
        parts: list[RenderableType] = []
        progress, saved = self._figures.get(Progress), self._figures.get(SaveCommitted)
        if isinstance(progress, Progress):
            bar = Table.grid(padding=(0, 1))
            time_left = "" if self.has_ended else f"{duration(progress.seconds_left)} left"
            bar.add_row(
                ProgressBar(progress.steps, progress.step, width=40),
                f"step {progress.step:,} of {progress.steps:,}",
                time_left,
            )
            parts += [
                bar,
                Text(f"loss {sparkline(self._losses, width - 30)} {self._losses[-1]:.4f}" if self._losses else ""),
            ]
            parts += [Text(line) for line in throughput([*self._figures.values()])]
        if isinstance(saved, SaveCommitted):
            behind = progress.step - saved.step if isinstance(progress, Progress) else 0
            parts.append(Text(f"saved step {saved.step:,}, {max(0, behind):,} steps since"))
        if self._worked:
            parts.append(self._ranks())
        began = self._figures.get(AttemptBegan)
        assert began is None or isinstance(began, AttemptBegan)
        parts += [Text(line) for line in accelerator_lines(self._devices, began)]
        if len(self._kept) < LEDGER_EVENTS:
            parts += [
                Text(line, style="dim") for line in ledger_lines(ledger(self._kept, None if self.has_ended else now))
            ]
        news = [
            Text(f"{time.strftime('%H:%M:%S', time.gmtime(event.time))}  {event.text}", style="dim")
            for event in self._news
        ]
        if not self.trains:
            parts += [Text(line) for line in self.backend_lines]
        if not parts and not news:
            parts.append(Text("nothing was reported yet"))
        content = _Newest(Group(*parts), news, None if height is None else height - 2)  # the frame takes two lines
        return Panel(content, title=Text(self._title), title_align="left")

    def _ranks(self) -> Text:
        """A square for each rank. A warmer color means a larger share of own work; the other ranks wait for the
        warmest.
        """
        highest = max(self._worked.values()) or 1.0
        lowest = min(self._worked.values())
        line = Text("ranks ")
        for rank in sorted(self._worked):
            heat = (self._worked[rank] - lowest) / (highest - lowest) if highest > 1.1 * lowest else 0.0
            line.append("■ " if rank not in self._slow else "▲ ", style=HEAT[min(len(HEAT) - 1, int(heat * len(HEAT)))])
        return line


class _Newest:
    """Content that is always shown, and below it the newest events that fit in `lines`; all events without a limit."""

    def __init__(self, always: RenderableType, news: Sequence[Text], lines: int | None) -> None:
        self._always, self._news, self._lines = always, news, lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.reset_height()
        yield self._always
        if self._lines is None:
            yield from self._news
            return
        free_lines = self._lines - len(console.render_lines(self._always, options, pad=False))
        shown_lines: list[Text] = []
        for line in reversed(self._news):
            free_lines -= len(console.render_lines(line, options, pad=False))
            if free_lines < 0:
                break
            shown_lines.append(line)
        yield from reversed(shown_lines)


def sparkline(values: Iterable[float], width: int) -> str:
    """The values as a row of bars, the newest last. The oldest are omitted if they do not fit."""
    newest = list(values)[-max(1, width) :]
    if not newest:
        return ""
    low, high = min(newest), max(newest)
    return "".join(BARS[int((value - low) / (high - low) * (len(BARS) - 1)) if high > low else 0] for value in newest)
