"""The terminal of the views: rich's, for texts that others have written.

Promises that control characters and escape sequences in such texts do not reach the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from holdfast.runtime.output import without_controls


class SafeConsole(Console):
    """A console whose texts are shown and never obeyed."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See Console."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(without_controls(segment.text), segment.style)
