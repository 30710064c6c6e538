"""Provenance of the documents of a dataset: the file and the line of each token of its training split.

A dataset does not record it. The indexes of its units are read again, in the order and by the rules that made the
shards. An expired unit is made again. This costs about as much as the join, without the tokens. The index of a unit has
the file and the line of each document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.corpus.assemble import choose, gap_before
from holdfast.corpus.duplicates import first_occurrences
from holdfast.corpus.identity import identity_of, sample_tokens
from holdfast.corpus.records import before, place
from holdfast.corpus.shard_plan import plan_shards
from holdfast.corpus.sources import resolve
from holdfast.corpus.unit_reader import UnitReader
from holdfast.corpus.units import Piece
from holdfast.spec import Spec
from holdfast.spec.errors import DataError
from holdfast.store import Store

Span = tuple[int, int, int]  # number of a source, and the tokens [start, end) of its training split


@dataclass(frozen=True)
class Document:
    """A document of a source: the tokens [start, end) of its training split, including its end-of-text token."""

    start: int
    end: int
    where: str  # the file, and its line or row if it has several


def documents(spec: Spec, dataset_id: str, spans: Sequence[Span], store: Store) -> list[list[Document]]:
    """The documents that overlap each of `spans`, in order. Raises DataError if the sources of the spec are no
    longer those of the dataset, and what reading them raises."""
    sources = resolve(spec.data)
    if (now := identity_of(spec, sources)) != dataset_id:
        raise DataError(
            f"the sources of the spec are dataset {now} on this machine now, and no longer {dataset_id}: which file a "
            "document came from cannot be said"
        )
    division = plan_shards(spec.data, dataset_id, sources, store)
    units = UnitReader(store, division.pieces, division.job(spec.data))
    found: list[list[Document]] = [[] for _ in spans]
    for piece, index, numbers, starts in _document_positions(spec, units):
        ends = starts + index["tokens"][numbers].astype(np.int64)
        here = [
            (span, np.flatnonzero((starts < last) & (ends > first)))
            for span, (source, first, last) in enumerate(spans)
            if source == piece.source
        ]
        wanted = sorted({int(at) for _, meeting in here for at in meeting})
        if wanted:
            named = {at: Document(int(starts[at]), int(ends[at]), _place(piece, index[numbers[at]])) for at in wanted}
            for span, meeting in here:
                found[span] += [named[int(at)] for at in meeting]
    return found


def _document_positions(
    spec: Spec, units: UnitReader
) -> Iterator[tuple[Piece, NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """For each piece: the piece, the index of its documents, the numbers of its training documents, and each one's
    first token position in its source."""
    cleaning, packed = spec.data.cleaning, sample_tokens(spec)
    position: dict[int, int] = defaultdict(int)
    left: dict[int, int] = defaultdict(lambda: packed)
    with first_occurrences(units.digests()) if cleaning.deduplicate else nullcontext() as first:
        for _, parts in groupby(units.indexes(), key=lambda part: id(part[0])):
            together = list(parts)
            piece, index = together[0][0], np.concatenate([each for _, each in together])
            numbers = np.flatnonzero(choose(index, first, spec.data.validation_fraction, packed).train)
            sizes, starts = index["tokens"][numbers].astype(np.int64), np.empty(len(numbers), dtype=np.int64)
            if not packed:
                starts[:] = position[piece.source] + np.cumsum(sizes) - sizes
                position[piece.source] += int(sizes.sum())
            else:
                for at, size in enumerate(sizes.tolist()):
                    gap = gap_before(size, left[piece.source])
                    starts[at] = position[piece.source] + gap
                    position[piece.source] += gap + size
                    left[piece.source] = (packed if gap else left[piece.source]) - size or packed
            yield piece, index, numbers, starts


def _place(piece: Piece, entry: NDArray[Any]) -> str:
    """The location of a document of a piece, from its entry in the unit's index."""
    file, at = piece.files[int(entry["file"])], int(entry["at"])
    return place(file, at, before(file, piece.range) if at else 0)
