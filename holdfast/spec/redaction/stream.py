"""Redaction of a text that arrives in pieces."""

from __future__ import annotations

from holdfast.spec.redaction import patterns
from holdfast.spec.redaction.patterns import MOST
from holdfast.spec.redaction.text import redact
from holdfast.spec.redaction.variables import secret_values


class StreamRedactor:
    """Redacts a text that arrives in pieces. It redacts whole lines, and a private key across its lines."""

    def __init__(self) -> None:
        self._values = secret_values()
        self._kept = ""  # the beginning of a line without its end
        self._key = 0  # maximum number of lines of a private key that may follow

    def add(self, text: str) -> str:
        """Add text. Returns the complete part, redacted."""
        text = self._kept + text
        end = max(text.rfind("\n"), text.rfind("\r", 0, -1)) + 1
        if not end and len(text) > 8 * MOST:
            end = text.rfind(" ") + 1 or len(text)
        complete, self._kept = text[:end], text[end:]
        return self._lines(complete)

    def rest(self) -> str:
        """The rest: a line without its end."""
        text, self._kept = self._kept, ""
        return self._lines(text)

    def line(self, text: str) -> str:
        """A whole line, with or without its line end."""
        return self._lines(text)

    @property
    def waiting(self) -> bool:
        """Whether the last line has no end yet."""
        return bool(self._kept)

    def _lines(self, text: str) -> str:
        if not text:
            return ""
        if self._key:
            end = patterns.PEM_END.search(text)
            if end is None:
                lines = text.splitlines(keepends=True)
                hidden = [patterns.PEM_BODY.fullmatch(line) is not None for line in lines[: self._key]]
                count = hidden.index(False) if False in hidden else len(hidden)
                self._key = self._key - count if count == len(lines) else 0
                text = "".join(lines[count:])
            else:
                self._key, text = 0, text[end.end() :]
        begins = list(patterns.PEM.finditer(text))
        if begins and not patterns.PEM_END.search(text, begins[-1].end()):
            self._key = 400
        return redact(text, self._values)
