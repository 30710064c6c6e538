"""Batch of one step, for people: its rows, their text, and the documents and files behind them.

None of it was recorded. A batch is a pure function of (dataset, seed, step), and is computed here again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from holdfast.corpus.encode import load_tokenizer
from holdfast.corpus.provenance import Document, documents
from holdfast.dataset import Dataset
from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED
from holdfast.runtime.environment import cache_dir
from holdfast.spec import Spec
from holdfast.spec.errors import DataError, HoldfastError
from holdfast.spec.training import BatchSizes
from holdfast.store import Store


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
    sources, starts = (found.tolist() for found in batches.origins(step - 1, chosen))
    spans = [(source, start, start + rows.shape[1]) for source, start in zip(sources, starts, strict=True)]
    try:
        found, note = documents(spec, dataset_id, spans, store), ""
    except HoldfastError as error:
        found, note = None, str(error)
    tokenizer = load_tokenizer(dataset.tokenizer_json())
    numbers = range(sizes.size(step - 1))[chosen]
    made = []
    for at, (number, row, (source, start, _)) in enumerate(zip(numbers, rows, spans, strict=True)):
        ids = [int(token) for token in row & ID]
        ends = (row & ENDS) != 0 if dataset.manifest.chat is not None else row == dataset.end_of_text
        passages = _unnamed(ends) if found is None else _passages(found[at], start, len(ids))
        made.append(
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
    return Batch(step, dataset_id, tuple(made), note)


def _passages(found: list[Document], start: int, length: int) -> tuple[Passage, ...]:
    passages = []
    for document in found:
        first, last = max(document.start, start), min(document.end, start + length)
        of = (first - document.start, last - document.start)
        passages.append(Passage((first - start, last - start), document.where, of))
    return tuple(passages)


def _unnamed(ends: np.ndarray) -> tuple[Passage, ...]:
    """The documents of a row, from the tokens alone."""
    bounds = [0, *(int(at) + 1 for at in np.flatnonzero(ends))]
    bounds += [len(ends)] if bounds[-1] < len(ends) else []
    return tuple(Passage(bound, "", None) for bound in pairwise(bounds))
