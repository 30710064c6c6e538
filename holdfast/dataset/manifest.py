"""Dataset manifest `dataset.json`: the parts of a dataset, checked at every read.

Writing it is the commit of a preprocess: a dataset without it does not exist. A loaded manifest is bounded and
consistent, and one from a newer Holdfast is refused. `shards` covers the bytes of the shards.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout

FORMAT_VERSION = 1
MAX_BYTES = 256 * 2**20  # a shard takes about 150 bytes: enough for tens of terabytes of tokens

SplitName = Literal["train", "validation"]
DtypeName = Literal["uint16", "uint32"]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**62)]


class Entry(BaseModel, extra="forbid", frozen=True):
    """A part of the manifest: strict and frozen."""


class Shard(Entry):
    """One file of tokens."""

    name: str = Field(pattern=r"^[a-z0-9-]{1,100}\.tokens$")
    tokens: int = Field(ge=1, le=2**40)
    digest: Digest  # blake3 over the digests of the file's blocks, see `shards`
    dtype: DtypeName


class Split(Entry):
    """The shards of one split of one source, in order."""

    tokens: Count
    documents: Count
    text_bytes: Count  # UTF-8, after cleaning
    shards: tuple[Shard, ...] = Field(max_length=2**20)

    @model_validator(mode="after")
    def _adds_up(self) -> Split:
        if sum(shard.tokens for shard in self.shards) != self.tokens:
            raise ValueError("the tokens of the shards do not add up")
        return self


class LeftOut(Entry):
    """Entries of a source's folders that are not files."""

    count: Count
    example: str  # the name of the first one


class Lineage(Entry):
    """The origin of a source's bytes."""

    kind: Literal["files", "s3", "dvc", "python", "hub"]
    files: Count
    bytes: Count  # as stored in the source, before decompression
    digest: Digest  # over the names, sizes and content digests of the files, in order
    repository: str | None = None  # dvc: the Git repository; hub: owner/name
    revision: str | None = None  # dvc, hub: the commit; python: the version of the interpreter
    hash: str | None = None  # dvc: the hash of the path that DVC tracks
    left_out: dict[str, LeftOut] = Field(default_factory=dict)  # by kind

    def left_out_in_words(self) -> list[str]:
        """A line for each kind of entry that was left out."""
        return [f"{group.count:,} left out, {kind}: {group.example}" for kind, group in sorted(self.left_out.items())]


class Example(Entry):
    """A dropped record."""

    place: str = Field(max_length=5000)  # its file, and its line or row if it has several
    detail: str = Field(max_length=1000)
    excerpt: str = Field(max_length=200)  # the beginning of its text; empty without text

    @classmethod
    def of(cls, place: str, detail: str, excerpt: str) -> Example:
        """An example, cut to the maximum lengths."""
        return cls(place=place[:5000], detail=detail[:1000], excerpt=excerpt[:200])

    def __str__(self) -> str:
        return f"{self.place} {self.detail}" + (f" ({self.excerpt!r})" if self.excerpt else "")


class Source(Entry):
    """One source of the spec, tokenized."""

    name: str = Field(min_length=1, max_length=200)
    uri: str
    lineage: Lineage
    splits: dict[SplitName, Split]
    dropped: dict[str, Count]  # documents, by reason
    examples: dict[str, Example] = Field(default_factory=dict)  # the first one for each reason


class Tokenizer(Entry):
    """The tokenizer of the tokens."""

    file: str = Field(pattern=r"^[a-z0-9.-]{1,100}$")
    digest: Digest  # blake3 of the file
    vocabulary: int = Field(ge=2, le=2**31)
    end_of_text: str
    end_of_text_id: Count

    @model_validator(mode="after")
    def _fits(self) -> Tokenizer:
        if self.end_of_text_id >= self.vocabulary:
            raise ValueError("the end-of-text id lies outside the vocabulary")
        return self


class Manifest(Entry):
    """The content of `dataset.json`."""

    format_version: Literal[1] = 1
    dataset_id: str = Field(pattern=r"^[0-9a-f]{16}$")
    tokenizer: Tokenizer
    sources: tuple[Source, ...] = Field(min_length=1, max_length=1000)
    settings: dict[str, Any]  # the fields of the spec's `data` section that determined it

    def tokens(self, split: SplitName) -> int:
        """The number of tokens in a split, over all sources."""
        return sum(source.splits[split].tokens for source in self.sources if split in source.splits)

    def shards(self) -> list[Shard]:
        """Every shard, in the order of sources and splits."""
        return [shard for source in self.sources for split in source.splits.values() for shard in split.shards]

    def dropped(self) -> dict[str, int]:
        """The number of dropped documents by reason, over all sources."""
        reasons = sorted({reason for source in self.sources for reason in source.dropped})
        return {reason: sum(source.dropped.get(reason, 0) for source in self.sources) for reason in reasons}

    def example(self, reason: str) -> Example | None:
        """The first record that was dropped for a reason, or None."""
        return next((source.examples[reason] for source in self.sources if reason in source.examples), None)

    def drops(self) -> list[str]:
        """What is not in the dataset: a line for each reason with the first example, and for each kind left out."""
        lines = []
        for reason, count in ((reason, count) for reason, count in self.dropped().items() if count):
            first = self.example(reason)
            lines.append(f"{count:,} {reason.replace('_', ' ')}" + (f", the first: {first}" if first else ""))
        for source in self.sources:
            lines += source.lineage.left_out_in_words()
        return lines

    @property
    def chat(self) -> dict[str, Any] | None:
        """For conversations: the template's `text`, and `packed`, the tokens of a sample. None for text."""
        settings: dict[str, Any] | None = self.settings.get("chat")
        return settings

    def dump(self) -> bytes:
        """The bytes of `dataset.json`. The same manifest always gives the same bytes."""
        return self.model_dump_json(indent=1).encode() + b"\n"


def parse_manifest(raw: bytes, name: str) -> Manifest:
    """Parse and check the bytes of the manifest `name`. Raises DataError."""
    if len(raw) > MAX_BYTES:
        raise DataError(f"{name}: {len(raw)} bytes are too many for a manifest; prepare the dataset again")
    try:
        newer = _Version.model_validate_json(raw).format_version > FORMAT_VERSION
        if newer:
            raise DataError(f"{name}: was written by a newer Holdfast; upgrade Holdfast, or prepare the dataset again")
        return Manifest.model_validate_json(raw)
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(str(part) for part in detail["loc"]) or "the file"
        raise DataError(f"{name}: {field}: {detail['msg']}; delete it and run preprocess again") from None


def load_manifest(store: Store, dataset_id: str) -> Manifest:
    """Read the manifest of a dataset. Raises MissingError if it does not exist, and DataError if it is invalid."""
    key = layout.dataset(dataset_id)
    info = store.stat(key)
    if info is None:
        raise MissingError(f"dataset {dataset_id}: {store.url}/{key} does not exist; run preprocess on the spec first")
    if info.size > MAX_BYTES:
        raise DataError(f"{store.url}/{key}: {info.size} bytes are too many for a manifest; prepare the dataset again")
    manifest = parse_manifest(store.get(key), f"{store.url}/{key}")
    if manifest.dataset_id != dataset_id:
        raise DataError(
            f"{store.url}/{key}: says it is dataset {manifest.dataset_id}; delete it and run preprocess again"
        )
    return manifest


def find_manifest(store: Store, dataset_id: str) -> Manifest | None:
    """The manifest of a dataset, or None if it does not exist or cannot be read."""
    try:
        return load_manifest(store, dataset_id) if dataset_id else None
    except (MissingError, DataError):
        return None


class _Version(BaseModel):
    format_version: int
