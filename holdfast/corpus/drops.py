"""Dropped documents of a dataset: counts, with one example per reason: its location, the problem, and its beginning.

The examples are the first ones in the order of the sources, so they do not depend on the number of workers. No source
is read for them, because units contain the lines of their records.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.corpus.encode import load_tokenizer
from holdfast.corpus.records import FILTERS, excerpt, place
from holdfast.dataset.manifest import Example
from holdfast.dataset.marks import ID
from holdfast.dataset.shards import Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from holdfast.corpus.units import Part, Piece

MOST_NAMED = 20  # faulty records that the log names
SHOWN_TOKENS = 32  # of a document that is dropped in the join of units


class Drops:
    """Counts what is dropped from each source, and keeps the first record for each reason."""

    def __init__(self, sources: int, tokenizer_json: str, packed: int) -> None:
        """`packed` is the number of tokens of a sample of whole conversations, and 0 for text."""
        self.counts: list[Counter[str]] = [Counter() for _ in range(sources)]
        self.examples: list[dict[str, Example]] = [{} for _ in range(sources)]
        self.named: list[str] = []  # descriptions of the first faults
        self._tokenizer_json, self._packed = tokenizer_json, packed
        self._before = self._lines = 0  # lines of the file before this piece, and in it so far
        self._ended = True

    def add(self, piece: Piece, part: Part, ends: bool, duplicates: NDArray[Any], longer: NDArray[Any]) -> None:
        """Add the next part. `ends` is true for the last part of its piece. The two bool [n] mark documents dropped
        as duplicates, and as longer than a sample."""
        if self._ended:
            follows = piece.range is not None and piece.range[0] > 0
            self._before = self._before + self._lines if follows else 0
            self._lines = 0
        self._ended = ends
        self._lines = max(self._lines, part.lines)
        counts, examples = self.counts[piece.source], self.examples[piece.source]
        counts.update(part.dropped)
        for drop in part.drops:
            flaw, where = drop.flaw, place(piece.files[drop.file], drop.at, self._before)
            if flaw.reason not in examples:
                examples[flaw.reason] = Example.of(where, flaw.detail, flaw.excerpt)
            if flaw.reason not in FILTERS and len(self.named) < MOST_NAMED:
                self.named.append(f"{where}: {flaw.detail}")
        for reason, mask in (("duplicate", duplicates), ("over_context", longer)):
            if mask.any():
                counts[reason] += int(mask.sum())
                if reason not in examples:
                    examples[reason] = self._example(piece, part, int(np.flatnonzero(mask)[0]))

    def _example(self, piece: Piece, part: Part, number: int) -> Example:
        entry = part.index[number]
        size, end = int(entry["tokens"]), int(part.index["tokens"][: number + 1].sum())
        tokens = part.tokens[end - size : end if self._packed else end - 1]  # without the end of a text
        too_long = self._packed and size > self._packed
        detail = (
            f"has {size} tokens, more than model.context = {self._packed}" if too_long else "repeats an earlier one"
        )
        where = place(piece.files[int(entry["file"])], int(entry["at"]), self._before)
        return Example.of(where, detail, self._beginning(tokens[:SHOWN_TOKENS]))

    def _beginning(self, tokens: Tokens) -> str:
        ids = (tokens & np.uint32(ID) if self._packed else tokens).tolist()
        return excerpt(str(self._tokenizer.decode(ids, skip_special_tokens=False)).rstrip("\ufffd"))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._tokenizer_json)
