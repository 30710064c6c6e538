"""Terminal output of a running pipeline: a live line per step, or a line per event in a CI log."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from holdfast.runtime.output import outlive_reader, without_controls

if TYPE_CHECKING:
    from rich.status import Status

# Console of the views: rich's, safe for foreign text.
#
# Control characters and escape sequences in such text do not reach the terminal.


class SafeConsole(Console):
    """A console that never interprets control characters in text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See Console."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(without_controls(segment.text), segment.style)


PLAIN_INTERVAL = 10.0  # seconds between progress lines without a terminal
_STOPPED = "[yellow]■[/yellow]"
_MARKS = {0: "[green]✓[/green]", 130: _STOPPED, 143: _STOPPED, 204: _STOPPED}


def duration(seconds: float) -> str:
    """Seconds for people: 0.4 s, 12 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


class Board:
    """The lines of a run. Use it as a context manager, so that the terminal is restored."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status: Status | None = None
        self._step = ""
        self._progress = ""
        self._begun = 0.0
        self._printed = 0.0

    def __enter__(self) -> Self:
        outlive_reader()  # `holdfast run | head` still trains to its end
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rest()

    def begin(self, step: str, started: float) -> None:
        """Show the start of a step, at `started` (unix seconds)."""
        self._rest()
        self._step, self._begun, self._progress, self._printed = step, started, "", time.monotonic()
        if self.console.is_terminal:
            self._status = self.console.status("", spinner="dots")
            self._status.start()
            self.tick()
        else:
            self._print(f"  {step:<10}  begins")

    def progress(self, text: str) -> None:
        """Set the progress of the running step."""
        self._progress = text

    def tick(self) -> None:
        """Refresh the elapsed time."""
        if not self._step:
            return
        elapsed = duration(time.time() - self._begun)
        if self._status is not None:
            self._status.update(f"{self._step:<10}  {elapsed:>9}  [dim]{_escape(self._progress)}[/dim]")
        elif self._progress and time.monotonic() - self._printed >= PLAIN_INTERVAL:
            self._print(f"  {self._step:<10}  {elapsed:>9}  {_escape(self._progress)}")
            self._progress, self._printed = "", time.monotonic()

    def end(self, step: str, seconds: float, code: int, text: str = "") -> None:
        """Show the end of a step after `seconds`, with an exit code of the table."""
        self._rest()
        mark = _MARKS.get(code, "[red]✗[/red]")
        detail = f"  [dim]{_escape(text)}[/dim]" if text else ""
        self._print(f"{mark} {step:<10}  {duration(seconds):>9}{detail}")

    def say(self, text: str) -> None:
        """Print a line of plain text between the steps or below the running one."""
        self._print(_escape(text))

    def _rest(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        self._step = ""

    def _print(self, markup: str) -> None:
        self.console.print(markup, highlight=False, soft_wrap=True)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
