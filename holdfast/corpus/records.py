"""Records of a file in any format, as a stream in bounded memory.

No line, file or decompression bomb takes more than a few times `max_characters` of memory. Every record has a location:
the file, and its line or row. The caller handles bad records.
"""

from collections.abc import Iterator
from functools import lru_cache

from holdfast.corpus.archives import archive_records
from holdfast.corpus.compression import CorruptFileError
from holdfast.corpus.files import (
    LFS_ADVICE,
    NOT_TEXT,
    Format,
    SourceFile,
    advice,
    is_lfs_pointer,
    opened,
)
from holdfast.corpus.json_csv import SKIP_BYTES, Range, skip_line, stream_records
from holdfast.corpus.record_types import Flaw, Reading, Record, printable
from holdfast.corpus.tables import arrow_records, parquet_records, rows_before
from holdfast.spec.errors import DataError

NOUNS: dict[Format, str] = {
    "parquet": "row ",
    "arrow": "row ",
    "csv": "row ",
    "json": "record ",
    "zip": "record ",
    "tar": "record ",
    "megatron": "document ",
}


def records(file: SourceFile, reading: Reading, part: Range | None = None) -> Iterator[tuple[int, Record]]:
    """The documents of `file`, or of a part of it, in order. Each has its line or row in that part (from 1; 0 means
    the whole file). Conversations and preferences are canonical JSON. Raises DataError for problems that are not the
    fault of a record."""
    if file.format == "other":
        yield 0, Flaw(NOT_TEXT, advice(file.path))
        return
    if reading.kind != "text" and file.format == "text":
        raise DataError(f"{file.name}: is text, and {reading.kind} is read from records; convert it to jsonl")
    if reading.kind == "prompts" and file.format != "jsonl":  # all keys of a record are kept
        raise DataError(f"{file.name}: is {file.format}, and prompts are read from jsonl; convert it")
    try:
        match file.format:
            case "parquet":
                yield from parquet_records(file, reading, part)
            case "zip" | "tar":
                yield from archive_records(file, reading)
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


def place(file: SourceFile, at: int, before: int = 0) -> str:
    """The location of a record, for people: its file, and its line or row `at` as `records` counts. `before` is the
    number of lines or rows of the file before the part."""
    name = printable(file.name)
    if not at:
        return name
    noun = NOUNS.get(file.format)
    return f"{name}: {noun}{before + at}" if noun else f"{name}:{before + at}"


@lru_cache(maxsize=64)
def before(file: SourceFile, part: Range | None) -> int:
    """The number of lines or rows of a file before a part of it. Reads the file up to that part."""
    if part is None or not part[0]:
        return 0
    if file.format == "megatron":
        return part[0]
    if file.format == "parquet":
        return rows_before(file, part[0])
    with opened(file) as stream:
        stream.seek(part[0] - 1)
        skip_line(stream)
        return _newlines(file, part[0] - 1) + 1


def _newlines(file: SourceFile, before: int) -> int:
    count = 0
    with opened(file) as stream:
        while before > 0 and (piece := stream.read(min(SKIP_BYTES, before))):
            count += piece.count(b"\n")
            before -= len(piece)
    return count
