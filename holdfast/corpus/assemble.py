"""Assembly of a dataset from tokenized units: exact deduplication, splits by content, shards, and the manifest.

The same input gives the same bytes. Memory holds one shard for each split and a few units that are read ahead. It does
not grow with the corpus.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast.corpus.chat import ChatEncoder
from holdfast.corpus.duplicates import Repeats, find_repeats
from holdfast.corpus.encode import Encoder, load_tokenizer
from holdfast.corpus.record_types import FILTERS, excerpt
from holdfast.corpus.records import place
from holdfast.corpus.shard_plan import ShardPlan
from holdfast.corpus.units import Job, Part, Piece, read_index, read_part, tokenise
from holdfast.dataset.manifest import DtypeName, Example, Shard, Source, Split, SplitName
from holdfast.dataset.shards import DTYPES, Tokens, block_digests, shard_digest
from holdfast.dataset.vocabulary import ENDS, ID, RECORD, UNCOUNTED
from holdfast.runtime.logs import log
from holdfast.spec.data import Cleaning
from holdfast.spec.errors import DataError
from holdfast.store import Store, layout

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Reader of the finished units of a corpus, in order.
#
# The data read is the data written: a missing or damaged unit is made again immediately. So a lost unit costs only that
# unit, and units that expired between two steps cause no error.

AHEAD = 4  # units that are read ahead of the current one

T = TypeVar("T")
Read = Callable[[Store, str, int], T | None]  # a part, by the unit's key and the part's number


class UnitReader:
    """The units of `pieces`, in order."""

    def __init__(self, store: Store, pieces: Sequence[Piece], job: Job) -> None:
        self._store, self.pieces, self._job = store, pieces, job
        self._settings = job.settings
        self.rebuilt: set[int] = set()  # numbers of the pieces that were made again

    def indexes(self) -> Iterator[tuple[Piece, NDArray[Any]]]:
        """The index of every part, with its piece, without reading the tokens."""
        for piece, unit_data, _ in self._all(read_index, lambda found: found[1]):
            yield piece, unit_data[0]

    def parts(self) -> Iterator[tuple[Piece, Part, bool]]:
        """Every part, with its piece, and whether it is the piece's last part."""
        return self._all(read_part, lambda part: part.last)

    def _all(self, read: Read[T], is_last: Callable[[T], bool]) -> Iterator[tuple[Piece, T, bool]]:
        """Read the first part of a unit ahead, because most units have one part."""
        waiting: deque[Future[T | None]] = deque()
        with ThreadPoolExecutor(AHEAD) as threads:
            try:
                for number, piece in enumerate(self.pieces):
                    for later in self.pieces[number + len(waiting) : number + AHEAD]:
                        waiting.append(threads.submit(read, self._store, later.key(self._settings), 0))
                    yield from self._unit(number, piece, waiting.popleft().result(), read, is_last)
            finally:
                threads.shutdown(cancel_futures=True)

    def _unit(
        self, number: int, piece: Piece, first: T | None, read: Read[T], is_last: Callable[[T], bool]
    ) -> Iterator[tuple[Piece, T, bool]]:
        at, last, part = 0, False, first
        while not last:
            if part is None:
                part = self._rebuild(number, piece, at, read)
            last = is_last(part)
            yield piece, part, last
            at += 1
            part = None if last else read(self._store, piece.key(self._settings), at)

    def _rebuild(self, number: int, piece: Piece, at: int, read: Read[T]) -> T:
        log.warning("unit %d of %d is missing or damaged: making it again", number + 1, len(self.pieces))
        self.rebuilt.add(number)
        key = piece.key(self._settings)
        tokenise(piece.here(), self._job, self._encoder, self._store)
        part = read(self._store, key, at)
        if part is None:
            raise DataError(
                f"{self._store.url}: unit {key} was damaged again as soon as it was written; check the store's disk, "
                "and that nothing deletes datasets/_units/ while preprocess runs"
            )
        return part

    @cached_property
    def _encoder(self) -> Encoder | ChatEncoder:
        return self._job.encoder()


# Dropped documents of a dataset: counts, with one example per reason: its location, the problem, and its beginning.
#
# The examples are the first ones in the order of the sources, so they do not depend on the number of workers. No source
# is read for them, because units contain the lines of their records.

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

    def add(self, piece: Piece, part: Part, ends: bool, chosen: Choice) -> None:
        """Add the next part. `ends` is true for the last part of its piece. `chosen` has the documents that are dropped
        now."""
        if self._ended:
            follows = piece.range is not None and piece.range[0] > 0
            self._before = self._before + self._lines if follows else 0
            self._lines = 0
        self._ended = ends
        self._lines = max(self._lines, part.lines)
        counts, examples = self.counts[piece.source], self.examples[piece.source]
        counts.update(part.dropped)
        for drop in part.drops:
            flaw, location = drop.flaw, place(piece.files[drop.file], drop.at, self._before)
            if flaw.reason not in examples:
                examples[flaw.reason] = Example.of(location, flaw.detail, flaw.excerpt)
            if flaw.reason not in FILTERS and len(self.named) < MOST_NAMED:
                self.named.append(f"{location}: {flaw.detail}")
        for reason, mask in chosen.dropped().items():
            if mask.any():
                counts[reason] += int(mask.sum())
                if reason not in examples:
                    examples[reason] = self._example(piece, part, int(np.flatnonzero(mask)[0]), reason)

    def _example(self, piece: Piece, part: Part, number: int, reason: str) -> Example:
        entry = part.index[number]
        size, end = int(entry["tokens"]), int(part.index["tokens"][: number + 1].sum())
        tokens = part.tokens[end - size : end if self._packed else end - 1]  # without the end of a text
        detail = {
            "over_context": f"has {size} tokens, more than model.context = {self._packed}",
            "near_duplicate": "is similar to an earlier one (data.cleaning.near_duplicates)",
        }.get(reason, "repeats an earlier one")
        location = place(piece.files[int(entry["file"])], int(entry["at"]), self._before)
        return Example.of(location, detail, self._beginning(tokens[:SHOWN_TOKENS]))

    def _beginning(self, tokens: Tokens) -> str:
        words = tokens.astype(np.uint32)  # marks do not fit into the tokens of a text
        ids = (words[words & RECORD == 0] & ID).tolist()
        return excerpt(str(self._tokenizer.decode(ids, skip_special_tokens=False)).rstrip("\ufffd"))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._tokenizer_json)


SPLITS: tuple[SplitName, ...] = ("train", "validation")


def held_out(digests: NDArray[Any], fraction: float) -> NDArray[np.bool_]:
    """Which documents are for validation: bool [n]. It depends only on the document's digest."""
    words = np.ascontiguousarray(digests).view("<u8").reshape(-1, 2)
    return (words[:, 1] >> np.uint64(11)) < np.uint64(int(fraction * 2**53))


@dataclass(frozen=True)
class Choice:
    """The use of the documents of a part: five bool [n], of which one is true for each document."""

    train: NDArray[np.bool_]
    validation: NDArray[np.bool_]
    duplicate: NDArray[np.bool_]
    near: NDArray[np.bool_]  # similar to an earlier one
    longer: NDArray[np.bool_]  # longer than a sample, into which it must fit whole

    def dropped(self) -> dict[str, NDArray[np.bool_]]:
        """The documents that are dropped, by reason."""
        return {"duplicate": self.duplicate, "near_duplicate": self.near, "over_context": self.longer}


def choose(index: NDArray[Any], repeats: Repeats, validation_fraction: float, packed: int = 0) -> Choice:
    """The split of each document in the next part. Conversations longer than `packed` tokens go into none."""
    duplicate, near = repeats.take(len(index))
    kept = ~(duplicate | near)
    longer = kept & (index["tokens"] > packed) if packed else np.zeros(len(index), dtype=bool)
    kept &= ~longer
    validation = held_out(index["digest"], validation_fraction)
    return Choice(kept & ~validation, kept & validation, duplicate, near, longer)


def assemble(
    store: Store,
    division: ShardPlan,
    units: UnitReader,
    *,
    cleaning: Cleaning,
    validation_fraction: float,
    shard_tokens: int,
    progress: Callable[[int, int], None],
    packed: int = 0,
) -> tuple[tuple[Source, ...], list[str]]:
    """Write the shards of a dataset from its units, in order. Conversations are packed whole into samples of
    `packed` tokens. Returns the manifest's sources, and descriptions of the first skipped faulty records."""
    dataset_id, dtype = division.dataset_id, division.tokenizer.dtype
    filler = division.tokenizer.end_of_text

    def writer(source: int, split: SplitName) -> TokenShardWriter:
        if packed:
            return PackedWriter(store, dataset_id, source, split, shard_tokens, packed, filler)
        return TokenShardWriter(store, dataset_id, source, split, shard_tokens, dtype)

    writers = [{split: writer(number, split) for split in SPLITS} for number in range(len(division.sources))]
    drops = Drops(len(division.sources), division.tokenizer.json, packed)
    units_done = before = 0
    with find_repeats(lambda: (index for _, index in units.indexes()), cleaning) as repeats:
        for piece, part, ends in units.parts():
            if piece.source != before:
                _finish(writers[before])
                before = piece.source
            chosen = choose(part.index, repeats, validation_fraction, packed)
            drops.add(piece, part, ends, chosen)
            writers[piece.source]["train"].add(part.tokens, part.index, chosen.train)
            writers[piece.source]["validation"].add(part.tokens, part.index, chosen.validation)
            units_done += ends
            progress(units_done, len(units.pieces))
    manifest_sources = tuple(
        Source(
            name=f"{number:03d}",
            uri=origin.uri,
            lineage=origin.lineage,
            splits={split: writers[number][split].finish() for split in SPLITS},
            dropped=dict(sorted(drops.counts[number].items())),
            examples=dict(sorted(drops.examples[number].items())),
        )
        for number, origin in enumerate(division.sources)
    )
    return manifest_sources, drops.named


def _finish(writers: dict[SplitName, TokenShardWriter]) -> None:
    for writer in writers.values():
        writer.finish()


class TokenShardWriter:
    """Writes one split of one source, shard by shard. It holds one shard in memory."""

    def __init__(
        self, store: Store, dataset_id: str, source: int, split: SplitName, shard_tokens: int, dtype: DtypeName
    ) -> None:
        self._store, self._dataset_id, self._dtype = store, dataset_id, dtype
        self._prefix = f"{source:03d}-{split}"
        self._room = shard_tokens
        self._pending: list[Tokens] = []
        self._held = 0
        self._shards: list[Shard] = []
        self._tokens = self._documents = self._text_bytes = 0

    def add(self, tokens: Tokens, index: NDArray[Any], chosen: NDArray[np.bool_]) -> None:
        """Append the selected documents of a part."""
        if not chosen.any():
            return
        ends = np.cumsum(index["tokens"])
        for first, last in _runs(chosen):
            begin = int(ends[first - 1]) if first else 0
            self._append(tokens[begin : int(ends[last])])
        self._documents += int(chosen.sum())
        self._text_bytes += int(index["bytes"][chosen].sum())

    def finish(self) -> Split:
        """Write the remaining tokens, and describe the split."""
        if self._held:
            self._write()
        return Split(
            tokens=self._tokens, documents=self._documents, text_bytes=self._text_bytes, shards=tuple(self._shards)
        )

    def _append(self, tokens: Tokens) -> None:
        while len(tokens):
            part = tokens[: self._room - self._held]
            self._pending.append(part.copy())  # a view would keep the whole part alive
            self._held += len(part)
            tokens = tokens[len(part) :]
            if self._held == self._room:
                self._write()

    def _write(self) -> None:
        data = np.concatenate(self._pending).astype(DTYPES[self._dtype], copy=False)
        self._pending, self._held = [], 0
        digests = block_digests(data.data)
        name = f"{self._prefix}-{len(self._shards):06d}.tokens"
        self._store.put(layout.dataset(self._dataset_id, name), [data.view(np.uint8).data, digests])
        self._shards.append(Shard(name=name, tokens=len(data), digest=shard_digest(digests), dtype=self._dtype))
        self._tokens += len(data)


class PackedWriter(TokenShardWriter):
    """Writes whole conversations into samples of `sample` tokens, one after another. A sample is padded if the next
    conversation does not fit, so samples are where a reader of text expects them. Padding (the token `filler`) never
    counts. It is a separate document, which no other token attends to."""

    def __init__(
        self, store: Store, dataset_id: str, source: int, split: SplitName, shard_tokens: int, sample: int, filler: int
    ) -> None:
        super().__init__(store, dataset_id, source, split, shard_tokens, "uint32")
        self._sample = self._left = sample  # tokens of a sample, and the space left in the current one
        self._filler = filler | UNCOUNTED | ENDS
        self._finished = False

    def add(self, tokens: Tokens, index: NDArray[Any], chosen: NDArray[np.bool_]) -> None:
        """Append the selected conversations of a part, none longer than a sample."""
        ends = np.cumsum(index["tokens"])
        for number in np.flatnonzero(chosen).tolist():
            size, end = int(index["tokens"][number]), int(ends[number])
            if gap := gap_before(size, self._left):
                self._fill(gap)
            self._append(tokens[end - size : end])
            self._left = self._left - size or self._sample
        self._documents += int(chosen.sum())
        self._text_bytes += int(index["bytes"][chosen].sum())

    def finish(self) -> Split:
        """See TokenShardWriter. Pads the last sample, and adds one token for its last target."""
        if self._documents and not self._finished:
            self._fill((self._left if self._left < self._sample else 0) + 1)
            self._finished = True
        return super().finish()

    def _fill(self, count: int) -> None:
        self._append(np.full(count, self._filler, dtype=np.uint32))
        self._left = self._sample


def gap_before(size: int, left: int) -> int:
    """Padding before a conversation of `size` tokens, if its sample has `left` tokens of space."""
    return left if size > left else 0


def _runs(chosen: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """First and last index of every run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    for first, end in edges.reshape(-1, 2).tolist():
        yield first, end - 1
