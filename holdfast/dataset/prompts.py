"""Prompts of a dataset (`data.kind: prompts`): random access by number, and the prompts of each batch of answers.

A document has the tokens of a prompt and then the bytes of its record. Opening reads the whole split once to find
where documents end. The order is a permutation for each epoch, as a pure function of the seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.dataset.permutation import Indices, Permutation, derive_key
from holdfast.dataset.stream import READ_TOKENS, TokenStream
from holdfast.dataset.vocabulary import ENDS, ID, RECORD
from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json_object


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    number: int  # in its split, over all sources
    tokens: list[int]
    record: dict[str, Any]  # as in its source, with the prompt under `prompt`


class Prompts:
    """The prompts of one split of a dataset."""

    def __init__(self, streams: Sequence[TokenStream], name: str) -> None:
        """`name` is that of the dataset and its split, for messages. Raises DataError without a prompt."""
        self._streams, self._name = streams, name
        bounds = [_bounds(stream) for stream in streams]
        self._first = np.cumsum([0, *(len(each) - 1 for each in bounds)])
        self._bounds = bounds
        if not len(self):
            raise DataError(f"{name}: has no prompts; add some, or change data.validation_fraction")

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, number: int) -> Prompt:
        """The prompt of that number. Raises DataError for a damaged shard."""
        source = self.source(number)
        at = number - int(self._first[source])
        start, stop = (int(bound) for bound in self._bounds[source][at : at + 2])
        words = self._streams[source].read(start, stop - start)
        of_record = words & RECORD != 0
        raw = (words[of_record] & 0xFF).astype(np.uint8).tobytes()
        record = parse_json_object(raw, f"{self._name}: prompt {number}", "run preprocess again")
        return Prompt(number, (words[~of_record] & ID).tolist(), dict(record))

    def source(self, number: int) -> int:
        """The number of the source that a prompt is from."""
        return int(np.searchsorted(self._first, number, side="right")) - 1

    def longest(self) -> tuple[int, int]:
        """The number of tokens of the longest prompt, and its number."""
        best = (0, 0)
        for source, (stream, bounds) in enumerate(zip(self._streams, self._bounds, strict=True)):
            of_record = np.searchsorted(_marked(stream, RECORD), bounds)
            sizes = np.diff(bounds) - np.diff(of_record)
            if len(sizes) and int(sizes.max()) > best[0]:
                best = int(sizes.max()), int(self._first[source]) + int(sizes.argmax())
        return best

    def require_room(self, answer_tokens: int, context: int) -> int:
        """The number of tokens of the longest prompt. Raises DataError if it leaves no room for an answer."""
        length, number = self.longest()
        if length + answer_tokens > context + 1:
            raise DataError(
                f"{self._name}: prompt {number} has {length} tokens, and with training.grpo.answer_tokens = "
                f"{answer_tokens} it exceeds model.context = {context}; raise model.context, lower answer_tokens, or "
                "remove the prompt"
            )
        return length


def prompt_numbers(count: int, seed: int, first: int, size: int) -> Indices:
    """The numbers of the prompts at the places first to first + size - 1 of the training sequence, in which each of
    `count` prompts occurs once per epoch: int64 [size]."""
    places = np.arange(first, first + size, dtype=np.int64)
    epochs, within = np.divmod(places, count)
    numbers = np.empty_like(within)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        numbers[chosen] = Permutation(count, derive_key(seed, "prompts", epoch))(within[chosen])
    return numbers


def _bounds(stream: TokenStream) -> Indices:
    """Where each document begins, and where the last one ends: int64 [documents + 1]."""
    return np.concatenate(([0], _marked(stream, ENDS) + 1))


def _marked(stream: TokenStream, mark: int) -> Indices:
    """The positions of the words with a mark."""
    parts = [
        start + np.flatnonzero(stream.read(start, min(READ_TOKENS, stream.tokens - start)) & mark)
        for start in range(0, stream.tokens, READ_TOKENS)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
