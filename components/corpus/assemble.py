"""From tokenised units to the shards of a dataset: exact deduplication, splits by content, and the manifest.

Promises that the same input gives the same bytes. Memory: 17 bytes for each document of the corpus while duplicates are
looked for, and one shard for each split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.components.corpus.sources import ResolvedSource
from holdfast.components.corpus.units import read_index, read_unit
from holdfast.components.dataset.manifest import DtypeName, Shard, Source, Split, SplitName
from holdfast.components.dataset.shards import DTYPES, Tokens, block_digests, shard_digest
from holdfast.components.store import Store, layout

SPLITS: tuple[SplitName, ...] = ("train", "validation")
PASSES = 16  # duplicates are looked for in this many passes, each over its share of the digests


@dataclass(frozen=True)
class Unit:
    """A finished unit, and the source that it is part of."""

    source: int
    key: str


def first_occurrences(digests: NDArray) -> NDArray[np.bool_]:
    """Which of the digests (16 bytes each, [n]) come for the first time: bool [n]."""
    words = np.ascontiguousarray(digests).view("<u8").reshape(-1, 2)
    first = np.ones(len(words), dtype=bool)
    share = words[:, 0] % np.uint64(PASSES)
    for number in range(PASSES):
        places = np.flatnonzero(share == number)
        if not len(places):
            continue
        low, high = words[places, 0], words[places, 1]
        order = np.lexsort((high, low))  # stable: equal digests stay in the order of the corpus
        same = (low[order][1:] == low[order][:-1]) & (high[order][1:] == high[order][:-1])
        first[places[order[1:][same]]] = False
    return first


def held_out(digests: NDArray, fraction: float) -> NDArray[np.bool_]:
    """Which documents are for validation: bool [n]. A function of the document's own digest alone."""
    words = np.ascontiguousarray(digests).view("<u8").reshape(-1, 2)
    return (words[:, 1] >> np.uint64(11)) < np.uint64(int(fraction * 2**53))


def assemble(
    store: Store,
    dataset_id: str,
    sources: Sequence[ResolvedSource],
    units: Sequence[Unit],
    *,
    deduplicate: bool,
    validation_fraction: float,
    shard_tokens: int,
    dtype: DtypeName,
    progress: Callable[[int, int], None],
) -> tuple[tuple[Source, ...], list[str]]:
    """Write the shards of a dataset from its units, in their order. Returns the manifest's sources, and the flaws that
    were skipped (a few of each unit)."""
    keep = _keep(store, units) if deduplicate else None
    writers = [{split: ShardWriter(store, dataset_id, number, split, shard_tokens, dtype) for split in SPLITS}
               for number in range(len(sources))]  # fmt: skip
    dropped: list[Counter[str]] = [Counter() for _ in sources]
    flaws: list[str] = []
    seen = 0
    for number, unit in enumerate(units):
        if number and unit.source != units[number - 1].source:
            _finish(writers[units[number - 1].source])
        for part in read_unit(store, unit.key):
            digests = part.index["digest"]
            kept = np.ones(len(digests), dtype=bool) if keep is None else keep[seen : seen + len(digests)]
            seen += len(digests)
            dropped[unit.source].update(part.dropped)
            if duplicates := int(len(kept) - kept.sum()):
                dropped[unit.source]["duplicate"] += duplicates
            flaws += part.flaws
            validation = held_out(digests, validation_fraction)
            for split, chosen in (("train", kept & ~validation), ("validation", kept & validation)):
                writers[unit.source][split].add(part.tokens, part.index, chosen)  # type: ignore[index]
        progress(number + 1, len(units))
    manifest_sources = tuple(
        Source(
            name=f"{number:03d}",
            uri=resolved.source.uri,
            lineage=resolved.lineage,
            splits={split: writers[number][split].finish() for split in SPLITS},
            dropped=dict(sorted(dropped[number].items())),
        )
        for number, resolved in enumerate(sources)
    )
    return manifest_sources, flaws


def _keep(store: Store, units: Sequence[Unit]) -> NDArray[np.bool_]:
    parts: list[NDArray] = [index["digest"].copy() for unit in units for index in read_index(store, unit.key)]
    return first_occurrences(np.concatenate(parts)) if parts else np.zeros(0, dtype=bool)


def _finish(writers: dict[SplitName, ShardWriter]) -> None:
    for writer in writers.values():
        writer.finish()


class ShardWriter:
    """Writes one split of one source, shard by shard. Holds one shard in memory."""

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

    def add(self, tokens: Tokens, index: NDArray, chosen: NDArray[np.bool_]) -> None:
        """Append the chosen documents of a part."""
        if not chosen.any():
            return
        ends = np.cumsum(index["tokens"])
        for first, last in _runs(chosen):
            begin = int(ends[first - 1]) if first else 0
            self._append(tokens[begin : int(ends[last])])
        self._documents += int(chosen.sum())
        self._text_bytes += int(index["bytes"][chosen].sum())

    def finish(self) -> Split:
        """Write what is left, and describe the split."""
        if self._held:
            self._write()
        return Split(
            tokens=self._tokens, documents=self._documents, text_bytes=self._text_bytes, shards=tuple(self._shards)
        )

    def _append(self, tokens: Tokens) -> None:
        while len(tokens):
            taken = tokens[: self._room - self._held]
            self._pending.append(taken.copy())  # a view would keep the whole part alive
            self._held += len(taken)
            tokens = tokens[len(taken) :]
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


def _runs(chosen: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """First and last index of every run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    for first, end in edges.reshape(-1, 2).tolist():
        yield first, end - 1
