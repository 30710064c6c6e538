"""Records of a stream: text, JSON lines, .json and .csv, in bounded memory.

No line, file or decompression bomb takes more than a few times `max_characters` of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from holdfast.corpus.files import LFS_ADVICE, LFS_POINTER, NOT_TEXT, Format
from holdfast.corpus.json_csv import csv_records, json_records
from holdfast.corpus.record_types import Flaw, Reading, Record, json_document, shown, undecodable

Range = tuple[int, int]  # jsonl: bytes [start, end) that contain the start of a line; parquet: row groups [start, end)

SKIP_BYTES = 2**20


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
        start += skip_line(stream) - 1
    at, line = start, 0
    while end is None or at < end:
        raw = stream.readline(limit + 1)
        if not raw:
            return
        length = len(raw)
        too_long = length > limit
        if too_long and not raw.endswith(b"\n"):
            length += skip_line(stream)
        line += 1
        if too_long:
            allowed = f"the {limit:,} that data.cleaning.max_characters = {reading.max_characters} allows for a line"
            yield line, Flaw("too_long", f"is a line of {length:,} bytes, more than {allowed}", shown(raw))
        else:
            yield line, json_document(raw, reading) if raw.strip() else None
        at += length


def skip_line(stream: BinaryIO) -> int:
    """Skip the rest of the line. Returns the number of skipped bytes."""
    skipped = 0
    while piece := stream.readline(SKIP_BYTES):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
