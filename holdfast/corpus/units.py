"""Units of work: pieces of the sources and their tokens, kept in the store by content.

A unit's key digests everything that determines its tokens (the files' content, the tokenizer, the cleaning). So a
killed preprocess resumes, and a changed corpus costs only what changed. A unit is written in parts of bounded size, so
an endless compressed file needs neither much memory nor a new start.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from holdfast.corpus.chat import ChatEncoder, ChatTemplate, ConversationError
from holdfast.corpus.cleaning import clean, filtered, texts
from holdfast.corpus.compression import CorruptFileError
from holdfast.corpus.decontamination import TaskNgrams
from holdfast.corpus.encode import Encoder, LossyError
from holdfast.corpus.field_maps import dump_map
from holdfast.corpus.files import SourceFile, here
from holdfast.corpus.json_csv import Range
from holdfast.corpus.megatron import TokenArray, document_count, megatron_documents, pairs
from holdfast.corpus.ngrams import BAND_BYTES, MinHash
from holdfast.corpus.own import NO_FUNCTIONS, OwnFunctions, cleaning_settings, reader_identity
from holdfast.corpus.record_types import FILTERS, Flaw, Kind, Reading, excerpt
from holdfast.corpus.records import before, place, records
from holdfast.corpus.sources import ResolvedSource
from holdfast.corpus.tables import row_groups
from holdfast.dataset.manifest import DtypeName
from holdfast.dataset.shards import DTYPES, Tokens
from holdfast.spec.data import Cleaning
from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.store import Store, layout

UNIT_VERSION = 4  # raised when the same input would give other bytes

UNIT_BYTES = 8 * 2**20  # approximate bytes of the sources per unit
MIN_UNIT_BYTES = UNIT_BYTES // 4
PART_BYTES = 16 * 2**20  # text in one part of a unit
SPLIT_PARQUET_BYTES = 64 * 2**20  # larger parquet files become units by row group
HEAD_BYTES = 128 * 2**10  # of a part, read first: its header and usually its index
NAMED_FAULTS = 5  # records that a part names per fault; for a filter it names one

# One entry per document. `file` is the number of its file in the piece, `at` its line or row as `records` counts.
INDEX = np.dtype([("digest", "V16"), ("tokens", "<u8"), ("bytes", "<u8"), ("file", "<u4"), ("at", "<u8")])
MAX_BANDS = 64


def index_type(bands: int) -> np.dtype[Any]:
    """The type of an index with the digests of MinHash bands: INDEX without bands. Raises ValueError."""
    if not 0 <= bands <= MAX_BANDS:
        raise ValueError(f"an index has {bands} bands")
    return np.dtype([*INDEX.descr, ("bands", f"V{BAND_BYTES}", (bands,))]) if bands else INDEX


@dataclass(frozen=True)
class Piece:
    """The content of one unit: some small files, or a range of one file."""

    source: int
    files: tuple[SourceFile, ...]
    text_field: str
    range: Range | None = None
    kind: Kind = "text"  # of its records
    reader: str = ""  # the identity of the source's reader, if user code reads it
    fields: str = ""  # the source's field map, as JSON

    @property
    def bytes(self) -> int:
        """Its size in bytes of the sources."""
        if self.range is not None and self.files[0].format == "jsonl":
            return self.range[1] - self.range[0]
        return sum(file.size for file in self.files)

    def reading(self, max_characters: int) -> Reading:
        """What is taken from its records."""
        return Reading(max_characters, self.text_field, self.kind, self.fields)

    def here(self) -> Piece:
        """The piece with its files on this machine. Raises MissingError or DataError if they are missing or differ."""
        return replace(self, files=tuple(here(file) for file in self.files))

    def key(self, settings: object) -> str:
        """The name of the unit. `settings` are the other values that determine the tokens."""
        content = [file.content for file in self.files]
        decisive = [UNIT_VERSION, content, self.kind, self.text_field, self.range, settings]
        if self.reader:
            decisive.append(self.reader)
        if self.fields:
            decisive.append({"fields": self.fields})
        text = json.dumps(decisive, sort_keys=True)
        return blake3(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Drop:
    """A dropped record: the number of its file in the piece, and its line or row as `records` counts."""

    file: int
    at: int
    flaw: Flaw


@dataclass
class Part:
    """Some documents in order: their index, their tokens, and the records dropped between them."""

    index: NDArray[Any]  # of INDEX
    tokens: Tokens
    records: int  # read from the piece up to the end of this part, including dropped ones
    lines: int  # its last line or row, as `records` counts
    last: bool
    dropped: dict[str, int] = field(default_factory=dict)
    drops: list[Drop] = field(default_factory=list)  # the first ones for each reason

    def dump(self) -> bytes:
        """The bytes of the part: header length, header, index, tokens."""
        index, bands = self.index.tobytes(), _bands(self.index)
        body = index + self.tokens.tobytes()
        header = json.dumps(
            {
                "documents": len(self.index),
                **({"bands": bands} if bands else {}),
                "tokens": len(self.tokens),
                "dtype": f"uint{8 * self.tokens.itemsize}",
                "records": self.records,
                "lines": self.lines,
                "last": self.last,
                "dropped": self.dropped,
                "drops": [[drop.file, drop.at, *astuple(drop.flaw)] for drop in self.drops],
                "digest": _digest(body),
                "index": _digest(index),
            }
        ).encode()
        return struct.pack("<I", len(header)) + header + body


def parse_part(raw: bytes) -> Part | None:
    """Parse a part. None if it is damaged."""
    try:
        (length,) = struct.unpack_from("<I", raw)
        header = parse_json_object(raw[4 : 4 + length], "part of a unit")
        body = memoryview(raw)[4 + length :]
        if _digest(body) != header["digest"]:
            return None
        dtype = index_type(header.get("bands", 0))
        middle = header["documents"] * dtype.itemsize
        return Part(
            index=np.frombuffer(body[:middle], dtype=dtype),
            tokens=np.frombuffer(body[middle:], dtype=DTYPES[header["dtype"]]),
            records=header["records"],
            lines=header["lines"],
            last=header["last"],
            dropped=header["dropped"],
            drops=[Drop(file, at, Flaw(*flaw)) for file, at, *flaw in header["drops"]],
        )
    except (struct.error, DataError, ValueError, KeyError, TypeError, OverflowError):
        return None


@dataclass(frozen=True)
class Outcome:
    """The result of work on a piece."""

    reused: bool  # nothing was tokenized
    bytes: int  # of the source


@dataclass(frozen=True)
class Job:
    """The settings that all pieces share."""

    tokenizer_json: str
    tokenizer_digest: str
    dtype: DtypeName
    end_of_text: int
    cleaning: Cleaning
    template: str = ""  # of conversations; empty for text
    template_name: str = ""  # for messages
    own: OwnFunctions = NO_FUNCTIONS
    tasks: TaskNgrams | None = None  # with which documents may not share words

    @property
    def settings(self) -> dict[str, object]:
        """The settings that determine the tokens of a piece, in addition to its bytes."""
        return {
            "tokenizer": self.tokenizer_digest,
            "end_of_text": self.end_of_text,
            "dtype": self.dtype,
            "cleaning": cleaning_settings(self.cleaning, "deduplicate"),
            **({"template": self.template} if self.template else {}),
            **({"tasks": self.tasks.digest} if self.tasks else {}),
        }

    @property
    def bands(self) -> int:
        """Bands of MinHash of each document; 0 if near duplicates are kept."""
        return self.cleaning.near_duplicates.bands if self.cleaning.near_duplicates else 0

    def encoder(self) -> Encoder | ChatEncoder:
        """The encoder from documents to tokens."""
        if self.template:
            template = ChatTemplate.parse(self.template, self.template_name)
            return ChatEncoder(self.tokenizer_json, template, self.end_of_text)
        return Encoder(self.tokenizer_json, self.dtype)


def plan(sources: Sequence[ResolvedSource], kind: Kind = "text") -> list[Piece]:
    """Divide the sources into pieces, in the order of their documents. The same files always give the same pieces."""
    return [
        replace(piece, kind=kind, reader=reader_identity(source.source.reader), fields=dump_map(source.source.fields))
        for number, source in enumerate(sources)
        for piece in _plan(number, source)
    ]


def _plan(number: int, source: ResolvedSource) -> Iterator[Piece]:
    text_field = source.source.text_field
    if source.source.format == "megatron":
        for pair in pairs(source.files):
            for part in _document_ranges(*pair):
                yield Piece(number, pair, text_field, part)
        return
    group: list[SourceFile] = []
    size = 0
    for file in source.files:
        ranges = _ranges(file)
        if ranges:
            if group:
                yield Piece(number, tuple(group), text_field)
                group, size = [], 0
            for part in ranges:
                yield Piece(number, (file,), text_field, part)
            continue
        group.append(file)
        size += file.size
        # Content determines where groups end, so an added or removed file moves only the nearest borders.
        anchor = int(blake3(file.digest.encode()).hexdigest()[:2], 16) < 8
        if size >= UNIT_BYTES or len(group) >= 4096 or (size >= MIN_UNIT_BYTES and anchor):
            yield Piece(number, tuple(group), text_field)
            group, size = [], 0
    if group:
        yield Piece(number, tuple(group), text_field)


def _document_ranges(bin_file: SourceFile, index_file: SourceFile) -> list[Range]:
    """The ranges of documents in which a corpus of Megatron is read."""
    try:
        count = document_count(bin_file, index_file)
    except CorruptFileError:  # reading the file reports it
        return [(0, 1)]
    parts = max(1, min(count, bin_file.size // UNIT_BYTES))
    return list(pairwise(count * part // parts for part in range(parts + 1)))


def _ranges(file: SourceFile) -> list[Range]:
    """The ranges in which a large file is read. Empty for a file that is read as a whole."""
    if file.compression:
        return []
    if file.format == "jsonl" and file.size > UNIT_BYTES:
        bounds = [*range(0, file.size, UNIT_BYTES), file.size]
        return list(pairwise(bounds))
    if file.format == "parquet" and file.size > SPLIT_PARQUET_BYTES:
        try:
            return [(group, group + 1) for group in range(row_groups(file))]
        except CorruptFileError:  # reading the file reports it
            return []
    return []


def documents(
    piece: Piece, cleaning: Cleaning, own: OwnFunctions = NO_FUNCTIONS
) -> Iterator[tuple[int, int, str | TokenArray | Flaw | None]]:
    """The cleaned documents of a piece, in order: the number of the file, the line or row as `records` counts, and
    the document, or its tokens if the source is tokenized. The document is a Flaw if it was dropped, and None for a
    blank line. Raises DataError with the location for a fault, if the spec requires that."""
    if piece.files[0].format == "megatron":
        yield from _tokenized(piece, cleaning)
        return
    for number, file in enumerate(piece.files):
        if piece.reader:
            found = own.read(piece.source, file, piece.reader)
        else:
            found = records(file, piece.reading(cleaning.max_characters), piece.range)
        for at, record in found:
            cleaned = clean(record, cleaning, piece.kind) if isinstance(record, str) else record
            if isinstance(cleaned, str):
                cleaned = own.dropped(cleaned) or cleaned
            if isinstance(cleaned, Flaw):
                _refuse(piece, Drop(number, at, cleaned), cleaning)
            yield number, at, cleaned


def _tokenized(piece: Piece, cleaning: Cleaning) -> Iterator[tuple[int, int, TokenArray | Flaw]]:
    """The documents of a corpus of Megatron, whose tokens are cleaned when they are decoded."""
    limit = cleaning.max_characters
    bin_file, index_file = piece.files
    try:
        for at, tokens in megatron_documents(bin_file, index_file, piece.range, limit):
            if isinstance(tokens, int):
                yield 0, at, Flaw("too_long", f"has {tokens} tokens, more than data.cleaning.max_characters = {limit}")
            else:
                yield 0, at, tokens
    except CorruptFileError as error:
        flaw = Flaw(error.reason, str(error).removeprefix(f"{bin_file.name}: "))
        _refuse(piece, Drop(1, 0, flaw), cleaning)
        yield 1, 0, flaw


def _refuse(piece: Piece, drop: Drop, cleaning: Cleaning) -> None:
    """Raises DataError for a fault, if the spec requires that."""
    if drop.flaw.reason in FILTERS or cleaning.on_bad_record == "skip":
        return
    file = piece.files[drop.file]
    location = place(file, drop.at, before(file, piece.range) if drop.at else 0)
    raise DataError(
        f"{location}: {drop.flaw.detail}; correct it, or skip such records with data.cleaning.on_bad_record: skip"
    )


def tokenise(piece: Piece, job: Job, encoder: Encoder | ChatEncoder, store: Store) -> Outcome:
    """Make sure that every part of the unit is in the store. Raises DataError for records that the spec refuses."""
    key = piece.key(job.settings)
    number, records_done = 0, 0
    while (part := read_part(store, key, number)) is not None:
        number, records_done = number + 1, part.records
        if part.last:
            return Outcome(True, piece.bytes)
    stream = islice(documents(piece, job.cleaning, job.own), records_done, None)
    last = False
    while not last:
        part = _make_part(piece, stream, records_done, job, encoder)
        store.put(_part_key(key, number), part.dump())
        number, records_done, last = number + 1, part.records, part.last
    return Outcome(False, piece.bytes)


def read_part(store: Store, key: str, number: int) -> Part | None:
    """A part of a unit. None if it is missing or damaged."""
    name = _part_key(key, number)
    return parse_part(store.get(name)) if store.stat(name) is not None else None


def read_index(store: Store, key: str, number: int) -> tuple[NDArray[Any], bool] | None:
    """The index of a part of a unit without its tokens, and whether it is the last part. None if it is missing or
    damaged."""
    name = _part_key(key, number)
    info = store.stat(name)
    if info is None:
        return None
    try:
        head = store.get(name, 0, min(info.size, HEAD_BYTES))
        (length,) = struct.unpack_from("<I", head)
        if len(head) < 4 + length <= info.size:
            head += store.get(name, len(head), 4 + length - len(head))
        header = parse_json_object(head[4 : 4 + length], name)
        dtype = index_type(header.get("bands", 0))
        end = 4 + length + header["documents"] * dtype.itemsize
        if end > info.size:
            return None
        if end > len(head):
            head += store.get(name, len(head), end - len(head))
        raw = head[4 + length : end]
        return (np.frombuffer(raw, dtype=dtype), header["last"]) if _digest(raw) == header["index"] else None
    except (struct.error, DataError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _bands(index: NDArray[Any]) -> int:
    """The MinHash bands of each document of an index."""
    return index["bands"].shape[1] if "bands" in (index.dtype.names or ()) else 0


def _digest(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()


def _part_key(key: str, number: int) -> str:
    return layout.unit(key, f"{number:06d}")


def _make_part(
    piece: Piece,
    stream: Iterator[tuple[int, int, str | TokenArray | Flaw | None]],
    done: int,
    job: Job,
    encoder: Encoder | ChatEncoder,
) -> Part:
    end = b"" if job.template else np.array([job.end_of_text], dtype=DTYPES[job.dtype]).tobytes()
    width = DTYPES[job.dtype].itemsize
    minhash = MinHash(job.cleaning.near_duplicates) if job.cleaning.near_duplicates else None
    dtype = index_type(job.bands)
    index: list[tuple[Any, ...]] = []
    encoded: list[bytes] = []
    dropped: Counter[str] = Counter()
    drops: list[Drop] = []
    size, last, lines = 0, True, 0
    for file, at, document in stream:
        done, lines = done + 1, max(lines, at)
        if document is None:
            continue
        if isinstance(document, str):
            found = _encoded(document, encoder, job)
        elif isinstance(document, Flaw):
            found = document
        else:
            assert isinstance(encoder, Encoder)
            found = _taken(piece, document, encoder, job)
        plain = "" if isinstance(found, Flaw) or not (job.tasks or minhash) else _plain(found[0], job)
        if job.tasks and plain:
            found = job.tasks.overlap(plain) or found
        if isinstance(found, Flaw):
            dropped[found.reason] += 1
            drop = Drop(file, at, found)
            _refuse(piece, drop, job.cleaning)
            if dropped[found.reason] <= (1 if found.reason in FILTERS else NAMED_FAULTS):
                drops.append(drop)
            continue
        raw, tokens = found[0], found[1] + end
        bands = (np.frombuffer(minhash.bands(plain), dtype=f"V{BAND_BYTES}"),) if minhash else ()
        index.append((blake3(raw).digest(length=16), len(tokens) // width, len(raw), file, at, *bands))
        encoded.append(tokens)
        size += len(raw)
        if size >= PART_BYTES:
            last = False
            break
    return Part(
        index=np.array(index, dtype=dtype),
        tokens=np.frombuffer(b"".join(encoded), dtype=DTYPES[job.dtype]),
        records=done,
        lines=lines,
        last=last,
        dropped=dict(sorted(dropped.items())),
        drops=drops,
    )


def _encoded(document: str, encoder: Encoder | ChatEncoder, job: Job) -> tuple[bytes, bytes] | Flaw:
    """The text of a document as bytes and its tokens, or the reason why it has none."""
    try:
        tokens = encoder.encode(document)
    except ConversationError as error:
        return Flaw("bad_conversation", str(error), excerpt(next(texts(json.loads(document)), "")))
    except LossyError as error:
        return Flaw("lossy", str(error), excerpt(next(texts(json.loads(document)), "") if job.template else document))
    if not job.template and bool((np.frombuffer(tokens, DTYPES[job.dtype]) == job.end_of_text).any()):
        return _end_in_text(document, job)
    return document.encode(), tokens


def _plain(raw: bytes, job: Job) -> str:
    """The text of a document, without the JSON of a conversation."""
    return "\n".join(texts(json.loads(raw))) if job.template else raw.decode()


def _end_in_text(document: str, job: Job) -> Flaw:
    detail = (
        f"gives token {job.end_of_text}, which is data.tokenizer.end_of_text and would end the document there; "
        "name a token there that text cannot give, and add it to the tokenizer as a special one"
    )
    return Flaw("end_in_text", detail, excerpt(document))


def _taken(piece: Piece, tokens: TokenArray, encoder: Encoder, job: Job) -> tuple[bytes, bytes] | Flaw:
    """The text of a tokenized document and its tokens as they are, without an end of text that closes them. Filters
    see the text. Raises DataError for tokens that the tokenizer does not have."""
    if len(tokens) and not 0 <= (worst := int(tokens.max() if tokens.min() >= 0 else tokens.min())) < encoder.size:
        raise DataError(
            f"{piece.files[0].name}: has token {worst}, and data.tokenizer.path has {encoder.size} tokens; name the "
            "tokenizer that made this file"
        )
    if len(tokens) and tokens[-1] == job.end_of_text:
        tokens = tokens[:-1]
    encoded = tokens.astype(DTYPES[job.dtype]).tobytes()
    text = encoder.decode(encoded)
    if (flaw := filtered([text], job.cleaning) or job.own.dropped(text)) is not None:
        return flaw
    if (tokens == job.end_of_text).any():
        return _end_in_text(text, job)
    return text.encode(errors="replace"), encoded
