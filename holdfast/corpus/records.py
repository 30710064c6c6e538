"""Records of a file: text (one document per file), jsonl and parquet, as a stream in bounded memory.

No line, file or decompression bomb takes more than a few times `max_characters` of memory. Every record has a location:
the file, and its line or row. The caller handles bad records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO, Literal

from holdfast.corpus.chat import ConversationError, conversation_text, labeled_text, pair_text
from holdfast.corpus.files import (
    LFS_ADVICE,
    LFS_POINTER,
    NOT_TEXT,
    CorruptFileError,
    SourceFile,
    advice,
    is_lfs_pointer,
    opened,
)
from holdfast.corpus.parquet_pages import ColumnChunks, largest_page
from holdfast.runtime.secrets import redact
from holdfast.spec.errors import DataError, HoldfastError

Range = tuple[int, int]  # jsonl: bytes [start, end) that contain the start of a line; parquet: row groups [start, end)

MAX_ROW_GROUP = 16 * 2**30  # bytes of one text column in one row group
MAX_PAGE = 128 * 2**20  # bytes of a decompressed page of parquet, plus the bytes of one document of maximum length
BATCH_ROWS, BATCH_BYTES = 64, 64 * 2**20  # of parquet, decoded together
SKIP_BYTES = 2**20
EXCERPT = 60  # characters


@dataclass(frozen=True)
class Flaw:
    """The reason why a record is no document of the dataset."""

    reason: str  # one word, the key of the count
    detail: str  # a sentence about the record
    excerpt: str = ""  # the beginning of its text


Record = str | Flaw | None  # None: a blank line
Kind = Literal["text", "chat", "preferences", "unpaired"]

FILTERS = ("too_short", "too_long", "repetitive", "filtered")  # reasons of `data.cleaning`; any other reason is a fault
READERS: dict[Kind, tuple[Callable[[Any], str | None], str]] = {
    "chat": (conversation_text, "conversation under 'messages', a list of {role, content}"),
    "unpaired": (labeled_text, "answer under 'prompt', 'completion' and 'label', texts or lists of {role, content}"),
    "preferences": (pair_text, "pair under 'prompt', 'chosen' and 'rejected', texts or lists of {role, content}"),
}


def records(
    file: SourceFile, text_field: str, max_characters: int, part: Range | None = None, kind: Kind = "text"
) -> Iterator[tuple[int, Record]]:
    """The documents of `file`, or of a part of it, in order. Each has its line or row in that part (from 1; 0 means
    the whole file). Conversations and preferences are canonical JSON. Raises DataError for problems that are not the
    fault of a record."""
    if file.format == "other":
        yield 0, Flaw(NOT_TEXT, advice(file.path))
        return
    if kind != "text" and file.format != "jsonl":
        raise DataError(f"{file.name}: is {file.format}, and {kind} is read from jsonl; convert it")
    try:
        match file.format:
            case "text":
                yield from _text(file, max_characters)
            case "jsonl":
                yield from _jsonl(file, text_field, max_characters, part, kind)
            case "parquet":
                yield from _parquet(file, text_field, max_characters, part)
    except CorruptFileError as error:
        if is_lfs_pointer(file):
            yield 0, Flaw(NOT_TEXT, LFS_ADVICE)
        else:
            yield 0, Flaw(error.reason, str(error).removeprefix(f"{file.name}: "))


def place(file: SourceFile, at: int, before: int = 0) -> str:
    """The location of a record, for people: its file, and its line or row `at` as `records` counts. `before` is the
    number of lines or rows of the file before the part."""
    name = file.name.encode(errors="backslashreplace").decode()
    if not at:
        return name
    return f"{name}: row {before + at}" if file.format == "parquet" else f"{name}:{before + at}"


@lru_cache(maxsize=64)
def before(file: SourceFile, part: Range | None) -> int:
    """The number of lines or rows of a file before a part of it. Reads the file up to that part."""
    if part is None or not part[0]:
        return 0
    if file.format == "parquet":
        import pyarrow.parquet as pq

        with opened(file) as stream, _damage_named(file):
            metadata = pq.ParquetFile(stream).metadata
            return sum(metadata.row_group(group).num_rows for group in range(part[0]))
    with opened(file) as stream:
        stream.seek(part[0] - 1)
        _skip_line(stream)
        return _newlines(file, part[0] - 1) + 1


def row_groups(file: SourceFile) -> int:
    """The number of row groups of a parquet file. Raises CorruptFileError."""
    import pyarrow.parquet as pq

    with opened(file, decompress=False) as stream, _damage_named(file):
        return int(pq.ParquetFile(stream).num_row_groups)


def excerpt(text: str) -> str:
    """The beginning of a text, for people: on one line, and without secrets."""
    redacted = redact(text[: 4 * EXCERPT]).encode(errors="replace").decode()
    return "".join(char if char.isprintable() else " " for char in redacted[:EXCERPT]).strip()


def _text(file: SourceFile, max_characters: int) -> Iterator[tuple[int, Record]]:
    limit = 4 * max_characters + 3  # UTF-8 takes at most four bytes per character; a byte-order mark takes three
    with opened(file) as stream:
        data = _read_up_to(stream, limit + 1)
    if len(data) > limit:
        yield 0, Flaw("too_long", f"is longer than data.cleaning.max_characters = {max_characters} characters")
    elif (nul := data.find(0)) >= 0:
        detail = f"has a NUL byte at offset {nul}: it is UTF-16 or no text; convert it to UTF-8, or leave it out"
        yield 0, Flaw(NOT_TEXT, detail)
    elif data.startswith(LFS_POINTER):
        yield 0, Flaw(NOT_TEXT, LFS_ADVICE)
    else:
        try:
            yield 0, data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            yield data.count(b"\n", 0, error.start) + 1, Flaw("undecodable", _undecodable(error))


def _read_up_to(stream: BinaryIO, limit: int) -> bytes:
    """Read `limit` bytes, or up to the end of the file. A decompressor may return less than requested."""
    parts, remaining = [], limit
    while remaining and (part := stream.read(remaining)):
        parts.append(part)
        remaining -= len(part)
    return b"".join(parts)


def _jsonl(
    file: SourceFile, text_field: str, max_characters: int, part: Range | None, kind: Kind
) -> Iterator[tuple[int, Record]]:
    limit = _line_limit(max_characters)
    with opened(file) as stream:
        start, end = part or (0, None)
        if start:
            stream.seek(start - 1)
            start += _skip_line(stream) - 1
        at, line = start, 0
        while end is None or at < end:
            raw = stream.readline(limit + 1)
            if not raw:
                return
            length = len(raw)
            too_long = length > limit
            if too_long and not raw.endswith(b"\n"):
                length += _skip_line(stream)
            line += 1
            if too_long:
                allowed = f"the {limit:,} that data.cleaning.max_characters = {max_characters} allows for a line"
                yield line, Flaw("too_long", f"is a line of {length:,} bytes, more than {allowed}", _shown(raw))
            else:
                yield line, _json_record(raw, text_field, kind) if raw.strip() else None
            at += length


def _line_limit(max_characters: int) -> int:
    return 12 * max_characters + 2**20  # JSON may write a character as two escapes of six bytes; 1 MiB for other keys


def _skip_line(stream: BinaryIO) -> int:
    """Skip the rest of the line. Returns the number of skipped bytes."""
    skipped = 0
    while piece := stream.readline(SKIP_BYTES):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _newlines(file: SourceFile, before: int) -> int:
    count = 0
    with opened(file) as stream:
        while before > 0 and (piece := stream.read(min(SKIP_BYTES, before))):
            count += piece.count(b"\n")
            before -= len(piece)
    return count


def _json_record(raw: bytes, text_field: str, kind: Kind) -> Record:
    if raw.startswith(LFS_POINTER):
        return Flaw(NOT_TEXT, LFS_ADVICE)
    try:
        record = json.loads(raw.decode("utf-8-sig"))
        value = READERS[kind][0](record) if kind != "text" else None
    except UnicodeDecodeError as error:
        return Flaw("undecodable", _undecodable(error))
    except (ValueError, RecursionError) as error:
        is_conversation_error = isinstance(error, ConversationError)
        detail = str(error) if is_conversation_error else f"is not JSON ({error})"
        return Flaw("bad_conversation" if is_conversation_error else "not_json", detail, _shown(raw))
    if kind == "text":
        return _text_of(record.get(text_field) if isinstance(record, dict) else None, text_field, raw)
    if value is None:
        return Flaw("no_text", f"has no {READERS[kind][1]}", _shown(raw))
    return _text_of(value, kind, raw)


def _text_of(value: Any, text_field: str, raw: bytes = b"") -> Record:
    if not isinstance(value, str):
        return Flaw("no_text", f"has no text under {text_field!r}; check `text_field` of the source", _shown(raw))
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            return Flaw("undecodable", f"has a lone surrogate at character {error.start}")
    return value


def _shown(raw: bytes) -> str:
    return excerpt(raw[: 8 * EXCERPT].decode(errors="replace"))


def _parquet(
    file: SourceFile, text_field: str, max_characters: int, part: Range | None
) -> Iterator[tuple[int, Record]]:
    import pyarrow.parquet as pq

    if file.compression:
        raise DataError(f"{file.name}: parquet inside .{file.compression} cannot be read in parts; unpack it")
    with opened(file) as stream:
        with _damage_named(file):
            table = pq.ParquetFile(stream, page_checksum_verification=True)
            _require_text(file, table.schema_arrow, text_field)
            row_groups = range(*(part or (0, table.num_row_groups)))
            rows = sum(table.metadata.row_group(group).num_rows for group in row_groups)
        try:
            yield from _rows(file, stream, table, row_groups, text_field, max_characters)
        except CorruptFileError:
            yield rows, None  # lost rows count in the locations of later rows
            raise


def _rows(
    file: SourceFile, stream: BinaryIO, table: Any, row_groups: range, text_field: str, max_characters: int
) -> Iterator[tuple[int, Record]]:
    row = 0
    with _damage_named(file):
        chunks = ColumnChunks(stream, table, text_field)
    for group in row_groups:
        with _damage_named(file):
            rows_per_batch = _rows_per_batch(file, stream, chunks, group, max_characters)
            batches = table.iter_batches(batch_size=rows_per_batch, row_groups=[group], columns=[text_field])
        while True:
            with _damage_named(file):
                batch = next(batches, None)
            if batch is None:
                break
            for cell in batch.column(0):
                row += 1
                try:
                    value = cell.as_py()
                except UnicodeDecodeError as error:
                    yield row, Flaw("undecodable", _undecodable(error))
                    continue
                if isinstance(value, str) and len(value) > max_characters:
                    detail = f"has {len(value)} characters, more than data.cleaning.max_characters = {max_characters}"
                    yield row, Flaw("too_long", detail, excerpt(value))
                else:
                    yield row, _text_of(value, text_field)


def _require_text(file: SourceFile, schema: Any, text_field: str) -> None:
    """Raises DataError if the schema has no text column of that name, or several."""
    import pyarrow as pa

    names = list(schema.names)
    if text_field not in names:
        columns = ", ".join(names[:20])
        raise DataError(f"{file.name}: has no column {text_field!r}; set `text_field` to one of: {columns}")
    if (count := names.count(text_field)) > 1:
        raise DataError(f"{file.name}: has {count} columns {text_field!r}; rename all but one")
    kind = schema.field(text_field).type
    value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value_type) or pa.types.is_large_string(value_type)):
        raise DataError(f"{file.name}: column {text_field!r} holds {kind}, not text; set `text_field` to another one")


@contextmanager
def _damage_named(file: SourceFile) -> Iterator[None]:
    """Convert pyarrow's errors for damage, which have many types, into CorruptFileError. It must wrap only calls
    into pyarrow. An error with an errno comes from the disk."""
    try:
        yield
    except HoldfastError:
        raise
    except MemoryError as error:  # too little memory or damage: the cause is unknown
        raise MemoryError(f"{file.name}: {error}; give the step more memory, or fetch the file again") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise CorruptFileError(f"{file.name}: is not whole parquet data ({error}); fetch it again") from None


def _rows_per_batch(file: SourceFile, stream: BinaryIO, chunks: ColumnChunks, number: int, max_characters: int) -> int:
    """The number of rows of a row group to decode together. Each row may be as long as a page, since a dictionary or
    a common prefix encodes it in a few bytes. Raises CorruptFileError for pages that are too large to decompress,
    and DataError for a row group with too much text."""
    largest = 0
    for column in chunks.of_group(number):
        if column.total_uncompressed_size > MAX_ROW_GROUP:
            raise DataError(
                f"{file.name}: row group {number} holds {column.total_uncompressed_size} bytes of text; "
                "write it with smaller row groups"
            )
        largest = max(largest, largest_page(stream, column))
    if largest > (most := MAX_PAGE + 4 * max_characters):
        raise CorruptFileError(
            f"{file.name}: row group {number} has a page of {largest:,} bytes once decompressed, and {most:,} are "
            "read; write it with smaller pages or row groups, or raise data.cleaning.max_characters",
            reason="too_large",
        )
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, largest)))


def _undecodable(error: UnicodeDecodeError) -> str:
    return f"is not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start}); convert it to UTF-8"
