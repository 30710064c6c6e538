"""Overview of a dataset before a training: what is in it, what was dropped, and samples as the model sees them.

The dataset is the one that a run of the spec trains on. It is prepared if it does not exist. The samples are rows of
the run's first batches.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.corpus.assemble import UnitReader
from holdfast.corpus.batch import training_documents
from holdfast.corpus.encode import load_tokenizer
from holdfast.corpus.prepare import prepare
from holdfast.corpus.shard_plan import plan_shards
from holdfast.corpus.sources import resolve
from holdfast.dataset import Dataset
from holdfast.dataset.manifest import Example
from holdfast.dataset.prompts import prompt_numbers
from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED
from holdfast.pages.charts import render
from holdfast.runtime.environment import cache_dir
from holdfast.spec import Spec
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.store import Store

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHOWN_TOKENS = 4096  # of a sample

Use = Literal["counted", "context", "padding"]  # in the loss; seen only; neither


@dataclass(frozen=True)
class SourceSummary:
    """A source of the dataset."""

    uri: str
    revision: str  # commit or version; empty without one
    files: int
    documents: int  # of both splits
    tokens: int
    validation_tokens: int
    dropped: dict[str, int]
    left_out: list[str]  # entries that were not read


@dataclass(frozen=True)
class DropSummary:
    """Documents that were dropped for a reason, with the first of them."""

    reason: str
    count: int
    place: str
    detail: str
    excerpt: str


@dataclass(frozen=True)
class LengthBin:
    """Documents of the training split with `low` to `high` tokens."""

    low: int
    high: int
    documents: int


@dataclass(frozen=True)
class TokenSegment:
    """Consecutive tokens of one document with one use."""

    text: str
    use: Use
    begins: bool  # a document
    tokens: int


@dataclass(frozen=True)
class SampleRow:
    """A row of a batch, up to SHOWN_TOKENS tokens."""

    source: str
    tokens: int
    counted: int  # targets that count in the loss
    segments: tuple[TokenSegment, ...]


@dataclass(frozen=True)
class Overview:
    """A dataset in figures and samples."""

    name: str
    dataset_id: str
    created: bool  # False: it existed already
    kind: str
    context: int  # tokens of a sample
    vocabulary: int
    documents: dict[str, int]  # by split
    tokens: dict[str, int]  # by split
    epochs: float  # of the training split, in the steps of the spec
    sources: tuple[SourceSummary, ...]
    dropped: tuple[DropSummary, ...]
    histogram: tuple[LengthBin, ...]
    samples: tuple[SampleRow, ...]

    def page(self) -> str:
        """The overview as an HTML page that loads nothing."""
        most = max((each.documents for each in self.histogram), default=1)
        return str(render("dataset.html", overview=self, most=most))

    def as_dict(self) -> dict[str, Any]:
        """The overview as JSON values."""
        return asdict(self)


def overview(spec: Spec, store: Store, samples: int = 8) -> Overview:
    """Prepare the dataset of a spec, and describe it. Raises what `prepare` raises, and DataError for a dataset that is
    shorter than one sample."""
    prepared = prepare(spec, store)
    dataset = Dataset.open(store, prepared.dataset_id, cache_dir())
    manifest = dataset.manifest
    drops = [_drop(reason, count, manifest.example(reason)) for reason, count in manifest.dropped().items() if count]
    return Overview(
        name=spec.name,
        dataset_id=prepared.dataset_id,
        created=prepared.created,
        kind=spec.data.kind,
        context=spec.model.context,
        vocabulary=manifest.tokenizer.vocabulary,
        documents=prepared.documents,
        tokens=prepared.tokens,
        epochs=_epochs(spec, manifest.tokens("train"), prepared.documents["train"]),
        sources=tuple(
            SourceSummary(
                uri=source.uri,
                revision=source.lineage.revision or "",
                files=source.lineage.files,
                documents=sum(split.documents for split in source.splits.values()),
                tokens=source.splits["train"].tokens,
                validation_tokens=source.splits["validation"].tokens,
                dropped=dict(source.dropped),
                left_out=source.lineage.left_out_in_words(),
            )
            for source in manifest.sources
        ),
        dropped=tuple(drops),
        histogram=_histogram(spec, prepared.dataset_id, store),
        samples=tuple(_samples(spec, dataset, samples)),
    )


def _epochs(spec: Spec, tokens: int, documents: int) -> float:
    """How often a run uses each token of the training split, or each prompt."""
    training = spec.training
    if spec.data.kind == "prompts":
        batches = -(-training.steps // training.grpo.updates)
        return batches * (training.global_batch // training.grpo.group) / max(1, documents)
    sizes = BatchSizes.of(training)
    return sum(sizes.size(step) for step in range(training.steps)) * spec.model.context / max(1, tokens)


def _drop(reason: str, count: int, example: Example | None) -> DropSummary:
    if example is None:
        return DropSummary(reason, count, "", "", "")
    return DropSummary(reason, count, example.place, example.detail, example.excerpt)


def _histogram(spec: Spec, dataset_id: str, store: Store) -> tuple[LengthBin, ...]:
    """Lengths of the training documents in tokens, in bins of powers of two. Reads indexes, and no tokens."""
    division = plan_shards(spec.data, dataset_id, resolve(spec.data), store)
    units = UnitReader(store, division.pieces, division.job(spec.data))
    counts = np.zeros(65, dtype=np.int64)
    for _, index, numbers, _ in training_documents(spec, units):
        exponents = np.frexp(index["tokens"][numbers].astype(np.float64))[1]
        counts += np.bincount(exponents, minlength=65)
    used = np.flatnonzero(counts)
    if not len(used):
        return ()
    first, last = int(used[0]), int(used[-1])
    return tuple(LengthBin(2 ** max(0, at - 1), 2**at - 1, int(counts[at])) for at in range(first, last + 1))


def _samples(spec: Spec, dataset: Dataset, count: int) -> list[SampleRow]:
    tokenizer = load_tokenizer(dataset.tokenizer_json())
    if spec.data.kind == "prompts":
        return _prompts(spec, dataset, tokenizer, count)
    weights = [source.weight for source in spec.data.sources]
    sizes = BatchSizes.of(spec.training)
    batches = dataset.training(spec.model.context, sizes, spec.training.seed, weights, spec.data.shuffle)
    found: list[SampleRow] = []
    for step in range(spec.training.steps):
        chosen = slice(0, min(sizes.size(step), count - len(found)))
        sources = batches.origins(step, chosen)[0].tolist()
        for source, row in zip(sources, batches.batch(step, chosen), strict=True):
            uses = _uses(row, dataset)
            segments = tuple(
                TokenSegment(
                    str(tokenizer.decode([int(token) for token in row[first:last] & ID], skip_special_tokens=False)),
                    use,
                    begins,
                    last - first,
                )
                for first, last, use, begins in _runs(row, uses, dataset)
            )
            counted = int((uses[1:] == "counted").sum())
            found.append(SampleRow(dataset.manifest.sources[source].uri, len(row), counted, segments))
        if len(found) >= count:
            break
    return found


def _prompts(spec: Spec, dataset: Dataset, tokenizer: Tokenizer, count: int) -> list[SampleRow]:
    """The first prompts of the training sequence."""
    prompts = dataset.prompts()
    found: list[SampleRow] = []
    for number in prompt_numbers(len(prompts), spec.training.seed, 0, count).tolist():
        tokens = prompts[number].tokens[:SHOWN_TOKENS]
        text = str(tokenizer.decode(tokens, skip_special_tokens=False))
        segment = TokenSegment(text, "context", True, len(tokens))
        uri = dataset.manifest.sources[prompts.source(number)].uri
        found.append(SampleRow(uri, len(prompts[number].tokens), 0, (segment,)))
    return found


def _uses(row: NDArray[Any], dataset: Dataset) -> NDArray[Any]:
    """The use of each token of a row."""
    uses = np.full(len(row), "counted", dtype="<U8")
    if dataset.manifest.chat is not None:
        ignored = (row & UNCOUNTED) != 0
        filler = dataset.end_of_text | UNCOUNTED | ENDS
        uses[ignored] = "context"
        uses[row == filler] = "padding"
    return uses


def _runs(row: NDArray[Any], uses: NDArray[Any], dataset: Dataset) -> list[tuple[int, int, Use, bool]]:
    """First and last token of each run of one document and one use, and whether a document begins there."""
    is_chat = dataset.manifest.chat is not None
    ends = (row & ENDS) != 0 if is_chat else row == dataset.end_of_text
    ends = ends & (uses != "padding")
    number = np.concatenate(([0], np.cumsum(ends)[:-1]))
    runs, at, before = [], 0, -1
    for (document, use), group in groupby(
        zip(number[:SHOWN_TOKENS].tolist(), uses[:SHOWN_TOKENS].tolist(), strict=True)
    ):
        size = len(list(group))
        runs.append((at, at + size, use, document != before and use != "padding"))
        at, before = at + size, document
    return runs
