"""Records of a file in any format, as a stream in bounded memory.

No line, file or decompression bomb takes more than a few times `max_characters` of memory. Every record has a location:
the file, and its line or row. The caller handles bad records.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import BinaryIO

from holdfast.corpus.files import (
    LFS_ADVICE,
    LFS_POINTER,
    NOT_TEXT,
    CorruptFileError,
    Format,
    SourceFile,
    advice,
    is_lfs_pointer,
    opened,
)
from holdfast.corpus.json_csv import csv_records, json_records
from holdfast.corpus.record_types import Flaw, Reading, Record, json_document, shown, undecodable
from holdfast.corpus.tables import arrow_records, parquet_records, rows_before
from holdfast.spec.errors import DataError

Range = tuple[int, int]  # jsonl: bytes [start, end) that contain the start of a line; parquet: row groups [start, end)

SKIP_BYTES = 2**20


def records(file: SourceFile, reading: Reading, part: Range | None = None) -> Iterator[tuple[int, Record]]:
    """The documents of `file`, or of a part of it, in order. Each has its line or row in that part (from 1; 0 means
    the whole file). Conversations and preferences are canonical JSON. Raises DataError for problems that are not the
    fault of a record."""
    if file.format == "other":
        yield 0, Flaw(NOT_TEXT, advice(file.path))
        return
    if reading.kind != "text" and file.format == "text":
        raise DataError(f"{file.name}: is text, and {reading.kind} is read from records; convert it to jsonl")
    try:
        match file.format:
            case "parquet":
                yield from parquet_records(file, reading, part)
            case "arrow":
                yield from arrow_records(file, reading)
            case _:
                with opened(file) as stream:
                    yield from stream_records(stream, file.path, file.format, reading, part)
    except CorruptFileError as error:
        if is_lfs_pointer(file):
            yield 0, Flaw(NOT_TEXT, LFS_ADVICE)
        else:
            yield 0, Flaw(error.reason, str(error).removeprefix(f"{file.name}: "))


def stream_records(
    stream: BinaryIO, name: str, format_: Format, reading: Reading, part: Range | None = None
) -> Iterator[tuple[int, Record]]:
    """The documents of a stream in a format that is read in order. Raises CorruptFileError."""
    match format_:
        case "text":
            yield from _text(stream, reading.max_characters)
        case "json":
            yield from json_records(stream, reading)
        case "csv":
            yield from csv_records(stream, name, reading)
        case _:
            yield from _jsonl(stream, reading, part)


def place(file: SourceFile, at: int, before: int = 0) -> str:
    """The location of a record, for people: its file, and its line or row `at` as `records` counts. `before` is the
    number of lines or rows of the file before the part."""
    name = file.name.encode(errors="backslashreplace").decode()
    if not at:
        return name
    noun = {"parquet": "row ", "arrow": "row ", "csv": "row ", "json": "record "}.get(file.format)
    return f"{name}: {noun}{before + at}" if noun else f"{name}:{before + at}"


@lru_cache(maxsize=64)
def before(file: SourceFile, part: Range | None) -> int:
    """The number of lines or rows of a file before a part of it. Reads the file up to that part."""
    if part is None or not part[0]:
        return 0
    if file.format == "parquet":
        return rows_before(file, part[0])
    with opened(file) as stream:
        stream.seek(part[0] - 1)
        _skip_line(stream)
        return _newlines(file, part[0] - 1) + 1


def _text(stream: BinaryIO, max_characters: int) -> Iterator[tuple[int, Record]]:
    limit = 4 * max_characters + 3  # UTF-8 takes at most four bytes per character; a byte-order mark takes three
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
            yield data.count(b"\n", 0, error.start) + 1, Flaw("undecodable", undecodable(error))


def _read_up_to(stream: BinaryIO, limit: int) -> bytes:
    """Read `limit` bytes, or up to the end of the file. A decompressor may return less than requested."""
    parts, remaining = [], limit
    while remaining and (part := stream.read(remaining)):
        parts.append(part)
        remaining -= len(part)
    return b"".join(parts)


def _jsonl(stream: BinaryIO, reading: Reading, part: Range | None) -> Iterator[tuple[int, Record]]:
    limit = reading.line_limit
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
            allowed = f"the {limit:,} that data.cleaning.max_characters = {reading.max_characters} allows for a line"
            yield line, Flaw("too_long", f"is a line of {length:,} bytes, more than {allowed}", shown(raw))
        else:
            yield line, json_document(raw, reading) if raw.strip() else None
        at += length


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
