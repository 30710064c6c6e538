"""Reader of a dataset: training batches by step, held-out text in order, and the tokenizer.

A truncated shard is refused when the dataset is opened, and altered bytes when they are first read. Opening costs the
same for any size of the corpus. The model derives document masks from `end_of_text`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from holdfast.dataset.batches import Batches
from holdfast.dataset.cache import BlockCache
from holdfast.dataset.manifest import Manifest, Shard, SplitName, load_manifest
from holdfast.dataset.mixture import UniformOrder, WeightedOrder
from holdfast.dataset.permutation import Indices, Permutation, derive_key
from holdfast.dataset.prompts import Prompts
from holdfast.dataset.remote import Bucket, RemoteShard
from holdfast.dataset.shards import OpenFiles, ShardFile, Tokens, file_bytes
from holdfast.dataset.stream import TokenStream
from holdfast.dataset.vocabulary import NO_TOKEN, bytes_of_tokens, only_chosen, only_desirable, prepended_bytes
from holdfast.runtime.environment import cache_bytes
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.spec.data import Shuffle
from holdfast.spec.errors import DataError
from holdfast.store import Store, layout

# Windowed shuffle: an order of samples that keeps a node's reads local, for corpora larger than any node.
#
# The stream is divided into blocks of consecutive samples, and the blocks are shuffled over the whole corpus. Every row
# of the global batch has a separate sequence of blocks. It reads a window of some blocks at a time and takes the
# samples of a window in random order. A node holds some rows of every batch, so it reads almost only the blocks of its
# rows. A batch still has samples from as many places of the corpus as it has rows. The order is a pure function of
# (seed, place), like the global shuffle. It needs no memory and seeks freely. Each sample occurs once per epoch, and
# the batches are the same at any world size.


class WindowShuffle:
    """0, 1, 2, ... to range(count), in another order for each epoch of `count` places.

    - `rows`: the number of sequences of blocks. Place p belongs to sequence p modulo `rows`, shifted differently in
      each epoch.
    - `block`: samples per block.
    - `window`: blocks whose samples are mixed.

    An epoch consists of (windows) x (places of a window) x (rows), and then the rest. The rest is the fewer than `rows`
    blocks that cannot be divided evenly, and the samples after the last whole block, in one global shuffle.
    """

    def __init__(self, count: int, seed: int, purpose: str, *, rows: int, block: int, window: int) -> None:
        self._count, self._rows, self._block, self._window = count, rows, block, window
        self._blocks = count // block
        self._each = self._blocks // rows  # blocks per row
        self._dealt = self._each * rows * block  # samples in them

        @lru_cache(maxsize=64)
        def permutation(size: int, *about: int | str) -> Permutation:
            return Permutation(size, derive_key(seed, purpose, *about))

        self._permutation = permutation

    def __call__(self, places: Indices) -> Indices:
        """The sample at each of `places` (int64 [n]). Int64 [n]."""
        epoch, position = np.divmod(places, self._count)
        result = np.empty_like(position)
        for number in np.unique(epoch).tolist():
            chosen = epoch == number
            result[chosen] = self._epoch(number, position[chosen])
        return result

    def _epoch(self, epoch: int, within: Indices) -> Indices:
        sample = np.empty_like(within)
        rest = within >= self._dealt
        if rest.any():
            sample[rest] = self._of_rest(epoch, within[rest] - self._dealt)
        position, row = np.divmod(within, self._rows)
        window = position // (self._window * self._block)
        for number in np.unique(window[~rest]).tolist():
            chosen = ~rest & (window == number)
            sample[chosen] = self._of_window(epoch, number, row[chosen], position[chosen])
        return sample

    def _of_window(self, epoch: int, window: int, row: Indices, position: Indices) -> Indices:
        """The samples at `position` of the sequences `row`, all in the same window."""
        first = window * self._window
        size = min(self._window, self._each - first) * self._block
        mixed = self._permutation(size, "window", epoch, window)(position - first * self._block)
        mixed = (mixed + row * (size // self._rows | 1)) % size  # so that rows are not synchronized
        turn, offset = np.divmod(mixed, self._block)
        return self._shuffled(epoch, (first + turn) * self._rows + row) * self._block + offset

    def _of_rest(self, epoch: int, place: Indices) -> Indices:
        index = self._permutation(self._count - self._dealt, "rest", epoch)(place) + self._dealt
        block, offset = np.divmod(index, self._block)
        is_shuffled = block < self._blocks
        block[is_shuffled] = self._shuffled(epoch, block[is_shuffled])
        return block * self._block + offset

    def _shuffled(self, epoch: int, block: Indices) -> Indices:
        return self._permutation(self._blocks, "blocks", epoch)(block) if self._blocks else block


READ_ROWS = 8  # rows of one array of `validation`


class Dataset:
    """A prepared dataset. Create it with `Dataset.open`."""

    def __init__(self, store: Store, manifest: Manifest, cache_dir: Path) -> None:
        self.manifest = manifest
        self._store = store
        self._opened = OpenFiles()
        self._bucket = Bucket(store, BlockCache(cache_dir / "blocks", cache_bytes()))
        self._streams: dict[SplitName, list[TokenStream]] = {
            split: [
                self._stream(source.splits[split].shards if split in source.splits else ())
                for source in manifest.sources
            ]
            for split in ("train", "validation")
        }

    @classmethod
    def open(cls, store: Store, dataset_id: str, cache_dir: Path) -> Dataset:
        """Open a dataset. It is memory-mapped in a folder store, and otherwise read by ranges, which are kept in a
        bounded cache under `cache_dir`.

        Raises MissingError if the dataset does not exist, and DataError if a shard is missing or has the wrong size.
        """
        manifest = load_manifest(store, dataset_id)
        for name, problem in damaged_shards(store, manifest).items():
            raise DataError(
                f"{store.url}/{layout.dataset(dataset_id, name)}: {problem}; "
                "run preprocess again, which rebuilds damaged shards"
            )
        return cls(store, manifest, Path(cache_dir))

    @property
    def dataset_id(self) -> str:
        """The identity of the dataset."""
        return self.manifest.dataset_id

    @property
    def vocabulary(self) -> int:
        """The number of token ids. Every token is below it."""
        return self.manifest.tokenizer.vocabulary

    @property
    def end_of_text(self) -> int:
        """The token that ends every document."""
        return self.manifest.tokenizer.end_of_text_id

    @property
    def separator(self) -> int:
        """The token that ends documents in rows of tokens, or NO_TOKEN if marks do (see `marks`)."""
        return self.end_of_text if self.manifest.chat is None else NO_TOKEN

    @property
    def chat_template(self) -> str | None:
        """The chat template of a dataset of conversations, or None."""
        return (self.manifest.chat or {}).get("text") or None

    @property
    def kind(self) -> str:
        """The kind of the documents (`data.kind`)."""
        return str((self.manifest.chat or {}).get("kind", "text"))

    def tokens(self, split: SplitName = "train") -> int:
        """The number of tokens in a split, over all sources."""
        return self.manifest.tokens(split)

    def training(
        self,
        context: int,
        global_batch: int | BatchSizes,
        seed: int,
        weights: Sequence[float | None] | None = None,
        shuffle: Shuffle | None = None,
    ) -> Batches:
        """Shuffled batches of `global_batch` samples (or of each step's size) with `context` + 1 tokens.

        `weights` has one number for each source of the manifest. Without weights, or with None for each, a source
        counts by its tokens. `shuffle` is the order, and global by default. Raises DataError if a source is shorter
        than one sample.
        """
        self._packed_to(context)
        streams = self._streams["train"]
        sizes = global_batch if isinstance(global_batch, BatchSizes) else BatchSizes(global_batch)
        known_weights = [weight for weight in weights or () if weight is not None]
        if known_weights and len(known_weights) != len(streams):
            raise DataError(
                f"{len(known_weights)} weights for {len(streams)} sources; give every source a weight, or none"
            )
        for source, stream in zip(self.manifest.sources, streams, strict=True):
            if not stream.samples(context):
                raise DataError(
                    f"dataset {self.dataset_id}, source {source.uri}: its {stream.tokens} training tokens are fewer "
                    f"than one sample of {context} + 1; add text, merge it with another source, or lower model.context"
                )
        counts = [stream.samples(context) for stream in streams]
        make = rows = None
        if shuffle is not None and shuffle.kind == "blocks":
            block, rows = max(1, shuffle.block_tokens // context), sizes.final
            make = partial(WindowShuffle, rows=rows, block=block, window=shuffle.window)
        order: UniformOrder | WeightedOrder = UniformOrder(counts, seed, make)
        if known_weights and len(streams) > 1:
            order = WeightedOrder(counts, known_weights, seed, make, rows or 1)
        return Batches(streams, order, context, sizes)

    def prompts(self, split: SplitName = "train") -> Prompts:
        """The prompts of a split (`data.kind: prompts`). Raises DataError without one."""
        return Prompts(self._streams[split], f"dataset {self.dataset_id}, split {split}")

    def where(self, batches: Batches, step: int) -> str:
        """A description of where the samples of the batch of `step` are: their sources, and their tokens in the
        training split of each. Reads nothing."""
        sources, starts = batches.origins(step)
        places = []
        for number in sorted(set(sources.tolist())):
            first = sorted(starts[sources == number].tolist())
            spans = ", ".join(f"{start}-{start + batches.context}" for start in first)
            places.append(f"{self.manifest.sources[number].uri} at tokens {spans}")
        return "; ".join(places)

    def validation(
        self, context: int, max_tokens: int, rows: int = READ_ROWS, *, every_answer: bool = False
    ) -> Iterator[NDArray[np.int64]]:
        """Held-out text in order: int64 [n <= rows, context + 1], with at most `max_tokens` targets in total, but at
        least one sample. Sources share them by size. Every call gives the same tokens. Of preferences, the chosen
        answers count, and of unpaired answers the desirable ones, unless `every_answer` counts. Of prompts, each row is
        one, without its record.

        Raises DataError if there is not a single sample.
        """
        if self.kind == "prompts":
            return self._prompt_rows(context, max_tokens)
        self._packed_to(context)
        streams = self._streams["validation"]
        counts = [stream.samples(context) for stream in streams]
        total = sum(counts)
        if not total:
            documents = sum(split.documents for source in self.manifest.sources for split in source.splits.values())
            hint = "; all text is one document, and a document is held out as a whole: split it" * (documents == 1)
            raise DataError(
                f"dataset {self.dataset_id}: its {self.tokens('validation')} held-out tokens are fewer than one sample "
                f"of {context} + 1 from one source{hint}; raise data.validation_fraction, add text, or lower "
                "model.context"
            )
        count = min(total, max(1, max_tokens // context))
        bounds = np.cumsum([0, *counts]) * count // total  # whole samples, `count` together
        samples = self._validation(streams, np.diff(bounds).tolist(), context, rows)
        select = {"preferences": only_chosen, "unpaired": only_desirable}.get(self.kind)
        return samples if select is None or every_answer else map(select, samples)

    def _prompt_rows(self, context: int, max_tokens: int) -> Iterator[NDArray[np.int64]]:
        prompts, tokens = self.prompts("validation"), 0
        for number in range(len(prompts)):
            row = np.array(prompts[number].tokens[: context + 1], np.int64)
            if tokens and tokens + len(row) - 1 > max_tokens:
                return
            if len(row) > 1:
                tokens += len(row) - 1
                yield row[None]

    def validation_documents(self) -> Iterator[Tokens]:
        """The held-out text documents in order, source by source, without their end-of-text tokens."""
        for stream in self._streams["validation"]:
            yield from stream.documents(self.end_of_text)

    def tokenizer_json(self) -> str:
        """The tokenizer in Hugging Face format. Raises DataError if it was altered."""
        entry = self.manifest.tokenizer
        key = layout.dataset(self.dataset_id, entry.file)
        raw = self._store.get(key)
        if blake3(raw).hexdigest() != entry.digest:
            raise DataError(f"{self._store.url}/{key}: is not the tokenizer that was written; run preprocess again")
        return raw.decode("utf-8")

    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of text per token: int64 [vocabulary]; 0 for special tokens."""
        return bytes_of_tokens(self.tokenizer_json(), self.vocabulary)

    def prepended_bytes(self) -> NDArray[np.int64]:
        """For tokens that begin a document, the bytes that the tokenizer adds before it: int64 [vocabulary]."""
        return prepended_bytes(self.tokenizer_json(), self.vocabulary)

    def verify(self) -> None:
        """Verify every byte of every shard. Raises DataError."""
        for streams in self._streams.values():
            for stream in streams:
                stream.verify()

    def _packed_to(self, context: int) -> None:
        """Raises DataError if conversations were packed into samples of another length."""
        chat = self.manifest.chat
        if chat is not None and chat["packed"] != context:
            raise DataError(
                f"dataset {self.dataset_id}: its conversations are packed into samples of {chat['packed']} tokens, and "
                f"{context} are requested; run preprocess with this model.context"
            )

    @staticmethod
    def _validation(
        streams: Sequence[TokenStream], counts: Sequence[int], context: int, rows: int
    ) -> Iterator[NDArray[np.int64]]:
        for stream, count in zip(streams, counts, strict=True):
            for first in range(0, count, rows):
                samples = np.arange(first, min(first + rows, count), dtype=np.int64)
                yield stream.gather(samples * context, context + 1)

    def _stream(self, shards: Sequence[Shard]) -> TokenStream:
        files: list[ShardFile | RemoteShard] = []
        for shard in shards:
            key = layout.dataset(self.dataset_id, shard.name)
            path = self._store.local_path(key)
            if path is not None:
                files.append(ShardFile(shard, f"{self._store.url}/{key}", path, self._opened))
            else:
                name = f"{self.dataset_id}/{shard.name.removesuffix('.tokens')}"
                files.append(RemoteShard(shard, self._bucket, key, name))
        return TokenStream(files)


def damaged_shards(store: Store, manifest: Manifest) -> dict[str, str]:
    """Shards that are missing or have the wrong size: {name: problem}. Reads no shard."""
    prefix = layout.dataset(manifest.dataset_id, "")
    sizes = {info.key.removeprefix(prefix): info.size for info in store.list(prefix)}
    problems = {}
    for shard in manifest.shards():
        expected = file_bytes(shard)
        if shard.name not in sizes:
            problems[shard.name] = "is missing"
        elif sizes[shard.name] != expected:
            problems[shard.name] = f"has {sizes[shard.name]} bytes instead of {expected}"
    if manifest.tokenizer.file not in sizes:
        problems[manifest.tokenizer.file] = "is missing"
    return problems
