"""Records of text, JSON lines, `.json` and `.csv` files, as a stream in bounded memory.

A `.json` file is an array of records, or records one after another (also one a line). A `.csv` file has a header.

No line, file or decompression bomb takes more than a few times `max_characters` of memory.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import BinaryIO

from holdfast.corpus.compression import CorruptFileError
from holdfast.corpus.files import LFS_ADVICE, LFS_POINTER, NOT_TEXT, Format
from holdfast.corpus.record_types import Flaw, Reading, Record, document_of, json_document, shown, text_of, undecodable

READ_CHARACTERS = 2**20
BLANK = re.compile(r"[ \t\n\r]*")
Range = tuple[int, int]  # jsonl: bytes [start, end) that contain the start of a line; parquet: row groups [start, end)
SKIP_BYTES = 2**20


def json_records(stream: BinaryIO, reading: Reading) -> Iterator[tuple[int, Record]]:
    """The documents of a .json file with their numbers from 1. What follows damage is not read."""
    text, decode = _Text(stream), json.JSONDecoder().raw_decode
    number = 0
    try:
        is_array = text.begins("[")
        while text.more():
            if is_array and text.begins("]"):
                yield from _rest(text, number)
                return
            number += 1
            size, value, problem = READ_CHARACTERS // 64, None, None
            while True:
                size = text.fill(2 * size)
                try:
                    value, end = decode(text.buffer, text.at)
                    if end < len(text.buffer) or text.ended:  # else a number may go on
                        break
                except (ValueError, RecursionError) as error:
                    problem = error
                    if text.ended or isinstance(error, RecursionError):
                        yield number, Flaw("not_json", f"is not JSON ({error}); what follows it is not read")
                        return
                if size > reading.line_limit:
                    detail = f"is a record of more than {reading.line_limit:,} bytes, or not JSON ({problem})"
                    yield number, Flaw("too_large", f"{detail}; what follows it is not read")
                    return
            text.at = end
            yield number, document_of(value, reading, mapped=True)
            if is_array and not text.begins(","):
                if text.begins("]"):
                    yield from _rest(text, number)
                else:
                    yield number + 1, Flaw("not_json", "follows a record without a comma; the rest is not read")
                return
        if is_array:
            yield number + 1, Flaw("not_json", "is missing: the array has no end")
    except UnicodeDecodeError as error:
        yield number + 1, Flaw("undecodable", undecodable(error))


def _rest(text: _Text, number: int) -> Iterator[tuple[int, Record]]:
    """What follows an array of `number` records."""
    if text.more():
        yield number + 1, Flaw("not_json", "follows the end of the array and is not read; use .jsonl, or one array")


class _Text:
    """Decoded text of a stream. What follows is in `buffer` from `at`."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self.buffer, self.at, self.ended = "", 0, False

    def fill(self, size: int) -> int:
        """Read until `size` characters follow, or to the end. Returns how many follow, or `size` if that is more."""
        length = len(self.buffer) - self.at
        if length < size and not self.ended:
            parts, self.at = [self.buffer[self.at :]], 0
            while length < size and not self.ended:
                raw = self._stream.read(READ_CHARACTERS)
                parts.append(self._decode(raw, final=not raw))
                length += len(parts[-1])
                self.ended = not raw
            self.buffer = "".join(parts)
        return max(size, length)

    def more(self) -> bool:
        """Skip blanks. Whether anything follows."""
        while True:
            match = BLANK.match(self.buffer, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.buffer) or self.ended:
                return self.at < len(self.buffer)
            self.fill(READ_CHARACTERS)

    def begins(self, character: str) -> bool:
        """Skip blanks, and the character if it follows. Whether it did."""
        found = self.more() and self.buffer[self.at] == character
        self.at += found
        return found


def csv_records(stream: BinaryIO, name: str, reading: Reading) -> Iterator[tuple[int, Record]]:
    """The documents of a .csv file, or a .tsv file by its `name`, with their rows from 1, without the header."""
    lines = _Lines(stream, reading.line_limit)
    limit = csv.field_size_limit(reading.line_limit)  # of the whole process
    rows = csv.reader(lines, delimiter="\t" if ".tsv" in PurePath(name).suffixes else ",", strict=True)
    columns: list[str] = []
    row = 0
    try:
        for values in rows:
            lines.size = 0
            if not columns:
                columns = values
                _require_columns(columns, reading)
                continue
            row += 1
            if not values:
                yield row, None
            elif len(values) != len(columns):
                yield row, Flaw("no_text", f"has {len(values)} values, and the header has {len(columns)}")
            else:
                yield row, _document(dict(zip(columns, values, strict=True)), reading)
    except csv.Error as error:
        raise CorruptFileError(f"is not CSV after row {row} ({error}); what follows is not read") from None
    finally:
        csv.field_size_limit(limit)


def _document(record: dict[str, str], reading: Reading) -> Record:
    for value in record.values():
        if isinstance(text_of(value, reading.text_field), Flaw):
            return Flaw("undecodable", "is not UTF-8; convert it to UTF-8")
    return document_of(record, reading, mapped=True)


def _require_columns(columns: list[str], reading: Reading) -> None:
    if not reading.columns(columns):
        wanted = f"text_field: {reading.text_field}" if reading.kind == "text" else ", ".join(reading.map.columns)
        raise CorruptFileError(
            f"has none of the columns of the spec ({wanted}); its first row has: {', '.join(columns[:20])}", "no_text"
        )


class _Lines:
    """Lines of a stream, as an iterator, with a limit for the lines of one row."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream, self._limit = stream, limit
        self._first = True
        self.size = 0  # bytes of the row

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        raw = self._stream.readline(self._limit + 1)
        if not raw:
            raise StopIteration
        self.size += len(raw)
        if self.size > self._limit:
            raise CorruptFileError(
                f"has a row of more than {self._limit:,} bytes, or a quote without an end; the rest is not read",
                "too_large",
            )
        text = raw.decode("utf-8", errors="surrogateescape")
        if self._first:
            self._first, text = False, text.removeprefix("\ufeff")
        return text


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
