"""Console of the views: rich's, safe for foreign text.

Control characters and escape sequences in such text do not reach the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from holdfast.runtime.output import without_controls


class SafeConsole(Console):
    """A console that never interprets control characters in text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See Console."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(without_controls(segment.text), segment.style)
