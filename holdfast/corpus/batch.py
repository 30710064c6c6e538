"""Batch of one step, for people: its rows, their text, and the documents and files behind them.

None of it was recorded. A batch is a pure function of (dataset, seed, step), and is computed here again.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.corpus.assemble import UnitReader, choose, gap_before
from holdfast.corpus.duplicates import find_repeats
from holdfast.corpus.encode import load_tokenizer
from holdfast.corpus.identity import identity_of, sample_tokens
from holdfast.corpus.records import before, place
from holdfast.corpus.shard_plan import plan_shards
from holdfast.corpus.sources import resolve
from holdfast.corpus.units import Piece
from holdfast.dataset import Dataset
from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED
from holdfast.runtime.environment import cache_dir
from holdfast.spec import Spec
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.spec.errors import DataError, HoldfastError
from holdfast.store import Store

# Provenance of the documents of a dataset: the file and the line of each token of its training split.
#
# A dataset does not record it. The indexes of its units are read again, in the order and by the rules that made the
# shards. An expired unit is made again. This costs about as much as the join, without the tokens. The index of a unit
# has the file and the line of each document.

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
            "document came from is unknown"
        )
    division = plan_shards(spec.data, dataset_id, sources, store)
    units = UnitReader(store, division.pieces, division.job(spec.data))
    of_spans: list[list[Document]] = [[] for _ in spans]
    for piece, index, numbers, starts in training_documents(spec, units):
        ends = starts + index["tokens"][numbers].astype(np.int64)
        overlaps = [
            (span, np.flatnonzero((starts < last) & (ends > first)))
            for span, (source, first, last) in enumerate(spans)
            if source == piece.source
        ]
        positions = sorted({int(at) for _, meeting in overlaps for at in meeting})
        if positions:
            documents_by_position = {
                at: Document(int(starts[at]), int(ends[at]), _place(piece, index[numbers[at]])) for at in positions
            }
            for span, meeting in overlaps:
                of_spans[span] += [documents_by_position[int(at)] for at in meeting]
    return of_spans


def training_documents(
    spec: Spec, units: UnitReader
) -> Iterator[tuple[Piece, NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """For each piece: the piece, the index of its documents, the numbers of its training documents, and each one's
    first token position in its source."""
    cleaning, packed = spec.data.cleaning, sample_tokens(spec)
    position: dict[int, int] = defaultdict(int)
    left: dict[int, int] = defaultdict(lambda: packed)
    with find_repeats(lambda: (index for _, index in units.indexes()), cleaning) as repeats:
        for _, parts in groupby(units.indexes(), key=lambda part: id(part[0])):
            unit_parts = list(parts)
            piece, index = unit_parts[0][0], np.concatenate([part_index for _, part_index in unit_parts])
            numbers = np.flatnonzero(choose(index, repeats, spec.data.validation_fraction, packed).train)
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


@dataclass(frozen=True)
class Passage:
    """A part of a row within one document."""

    tokens: tuple[int, int]  # of the row: [from, to)
    where: str  # the file, and its line or row if it has several; empty if unknown
    of: tuple[int, int] | None  # the range of its document's tokens: [from, to)


@dataclass(frozen=True)
class Row:
    """A sample of a batch."""

    number: int  # of the global batch
    micro_batch: int  # of the global batch, in consecutive micro-batches
    source: str
    position: int  # of its first token in the training split of its source
    tokens: tuple[int, ...]  # context + 1 tokens; each is the target of those before it
    counted: int  # targets that count in the loss
    text: str
    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class Batch:
    """The samples of one step."""

    step: int  # optimizer steps done after it, as in the history: the first step is 1
    dataset_id: str
    rows: tuple[Row, ...]
    note: str  # why no file is named; empty if files are named


def batch_of(store: Store, spec: Spec, dataset_id: str, step: int, micro_batch: int | None = None) -> Batch:
    """The batch that took a run of `spec` to `step`, or one micro-batch of it.

    Files are named if the sources are still in the spec's place and unchanged. Raises DataError for a step or a
    micro-batch that does not exist, and MissingError for a missing dataset.
    """
    training = spec.training
    if not 1 <= step <= training.steps:
        raise DataError(f"step {step}: the run has the steps 1 to {training.steps}")
    sizes = BatchSizes.of(training)
    size, count = training.micro_batch, sizes.size(step - 1) // training.micro_batch
    if micro_batch is not None and not 0 <= micro_batch < count:
        raise DataError(f"micro-batch {micro_batch}: a batch has the micro-batches 0 to {count - 1}, of {size} rows")
    chosen = slice(None) if micro_batch is None else slice(micro_batch * size, (micro_batch + 1) * size)
    dataset = Dataset.open(store, dataset_id, cache_dir())
    weights = [source.weight for source in spec.data.sources]
    batches = dataset.training(spec.model.context, sizes, training.seed, weights, spec.data.shuffle)
    rows = batches.batch(step - 1, chosen)
    sources, starts = (array.tolist() for array in batches.origins(step - 1, chosen))
    spans = [(source, start, start + rows.shape[1]) for source, start in zip(sources, starts, strict=True)]
    try:
        documents_of_rows, note = documents(spec, dataset_id, spans, store), ""
    except HoldfastError as error:
        documents_of_rows, note = None, str(error)
    tokenizer = load_tokenizer(dataset.tokenizer_json())
    numbers = range(sizes.size(step - 1))[chosen]
    batch_rows = []
    for at, (number, row, (source, start, _)) in enumerate(zip(numbers, rows, spans, strict=True)):
        ids = [int(token) for token in row & ID]
        ends = (row & ENDS) != 0 if dataset.manifest.chat is not None else row == dataset.end_of_text
        passages = _unnamed(ends) if documents_of_rows is None else _passages(documents_of_rows[at], start, len(ids))
        batch_rows.append(
            Row(
                number,
                number // size,
                dataset.manifest.sources[source].uri,
                start,
                tuple(ids),
                int(((row[1:] & UNCOUNTED) == 0).sum()),
                tokenizer.decode(ids, skip_special_tokens=False),
                passages,
            )
        )
    return Batch(step, dataset_id, tuple(batch_rows), note)


def _passages(found: list[Document], start: int, length: int) -> tuple[Passage, ...]:
    passages = []
    for document in found:
        first, last = max(document.start, start), min(document.end, start + length)
        token_range = (first - document.start, last - document.start)
        passages.append(Passage((first - start, last - start), document.where, token_range))
    return tuple(passages)


def _unnamed(ends: np.ndarray) -> tuple[Passage, ...]:
    """The documents of a row, from the tokens alone."""
    bounds = [0, *(int(at) + 1 for at in np.flatnonzero(ends))]
    bounds += [len(ends)] if bounds[-1] < len(ends) else []
    return tuple(Passage(bound, "", None) for bound in pairwise(bounds))
