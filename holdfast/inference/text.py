"""Text of an answer while its tokens arrive: whole characters, and nothing behind a stop sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MOST_OPEN = 8  # tokens without a whole character; a character has at most four bytes
REPLACEMENT = "\ufffd"  # which a decoder writes for a part of a character


class TextStream:
    """Decodes tokens one at a time. Text that may be the beginning of a stop sequence is kept back."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._tokens: list[int] = []  # the last ones: those before `_read` are decoded, and give the next ones context
        self._read = 0
        self._kept = ""
        self.stopped = False  # a stop sequence ended the text

    def add(self, token: int) -> str:
        """The text that `token` completes, which may be empty."""
        self._tokens.append(token)
        self._decode(whole=False)
        found = [at for stop in self._stops if (at := self._kept.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._kept = self._kept[: min(found)], ""
            return text
        size = len(self._kept) - self._open()
        text, self._kept = self._kept[:size], self._kept[size:]
        return text

    def finish(self) -> str:
        """The rest, after the last token."""
        self._decode(whole=True)
        text, self._kept = self._kept, ""
        return text

    def _decode(self, *, whole: bool) -> None:
        """Decode the new tokens, unless they end within a character. `whole` decodes them all the same."""
        before, after = self._tokenizer.decode(self._tokens[: self._read]), self._tokenizer.decode(self._tokens)
        is_open = after.endswith(REPLACEMENT) and len(self._tokens) - self._read < MOST_OPEN
        if len(after) > len(before) and (whole or not is_open):
            self._kept += after[len(before) :]
            self._tokens, self._read = self._tokens[self._read :], len(self._tokens) - self._read

    def _open(self) -> int:
        """The number of last characters that may begin a stop sequence."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._kept)), 0, -1):
            if any(stop.startswith(self._kept[-size:]) for stop in self._stops):
                return size
        return 0
