"""Answers with several turns: the model writes, an environment replies, and the model continues.

An answer is one sequence of tokens. The ranges that the environment wrote are recorded, and no gradient reads them. A
recorded answer is generated again with its recorded replies, because an environment may reply otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.rewards.process import RewardProcess
from holdfast.rollouts.records import Answer, Unit

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Spans = Sequence[tuple[int, int]]


class Replies(Protocol):
    """A function that replies to the model in a lot."""

    def __call__(self, prompt: int, answer: int, turns: Sequence[Sequence[int]]) -> Sequence[int] | None:
        """The tokens of the next reply to an answer, by the numbers of its prompt in the lot and of the answer. `turns`
        are the tokens of its turns so far, the model's first. None ends the answer."""


def turns_of(tokens: Sequence[int], replies: Spans) -> list[list[int]]:
    """The tokens of each turn: the model's, a reply, the model's."""
    edges = [0, *(edge for span in replies for edge in span), len(tokens)]
    return [list(tokens[begin:end]) for begin, end in pairwise(edges)]


class Texts:
    """The texts of answers."""

    def __init__(self, tokenizer: Tokenizer, end_of_text: int) -> None:
        self._tokenizer, self._end = tokenizer, end_of_text

    def of(self, tokens: Sequence[int]) -> str:
        """The text of a turn, without its end-of-text token."""
        ids = list(tokens[:-1] if tokens and tokens[-1] == self._end else tokens)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def encoded(self, text: str) -> list[int]:
        """The tokens of a reply."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def scored(self, record: dict[str, Any], tokens: Sequence[int], replies: Spans) -> tuple[dict[str, Any], str]:
        """What a reward gets: the record, and the text of the model's last turn. With replies, the record has the texts
        of all turns as `turns`."""
        turns = [self.of(turn) for turn in turns_of(tokens, replies)]
        return ({**record, "turns": turns} if replies else record), turns[-1]


class LiveReplies:
    """See Replies. Asks the environment of the spec."""

    def __init__(
        self, process: RewardProcess, records: Sequence[dict[str, Any]], texts: Texts, most_turns: int
    ) -> None:
        """`records` are those of the prompts of the lot."""
        self._process, self._records, self._texts, self._most = process, records, texts, most_turns
        self.errors: dict[tuple[int, int], str] = {}  # why the environment failed, by prompt and answer

    def __call__(self, prompt: int, answer: int, turns: Sequence[Sequence[int]]) -> Sequence[int] | None:
        """See Replies."""
        if (len(turns) + 1) // 2 >= self._most:
            return None
        text, error = self._process.reply(self._records[prompt], [self._texts.of(turn) for turn in turns])
        if error:
            self.errors[prompt, answer] = error
        return None if text is None else self._texts.encoded(text)


class RecordedReplies:
    """See Replies. Gives the replies of recorded answers."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def __call__(self, prompt: int, answer: int, turns: Sequence[Sequence[int]]) -> Sequence[int] | None:
        """See Replies."""
        recorded: Answer = self._units[prompt].answers[answer]
        number = len(turns) // 2
        if number >= len(recorded.replies):
            return None
        begin, end = recorded.replies[number]
        return recorded.tokens[begin:end]
