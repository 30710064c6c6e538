"""The documents of a file: text (one a file), jsonl and parquet, as a stream in bounded memory.

Promises that no line, file or compressed bomb makes more than a few times `max_characters` be held, and that whatever
is wrong is named by file and line. What to do about it is the caller's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from holdfast.components.corpus.chat import conversation_text
from holdfast.components.corpus.files import CorruptFileError, SourceFile, opened
from holdfast.components.corpus.pairs import pair_text
from holdfast.components.spec.errors import DataError

Range = tuple[int, int]  # jsonl: bytes [start, end) in which a line starts; parquet: row groups [start, end)

MAX_ROW_GROUP = 16 * 2**30  # bytes of one text column in one row group
SKIP_BYTES = 2**20


@dataclass(frozen=True)
class Flaw:
    """Why a record is no document."""

    reason: str  # "undecodable", "not_json", "no_text", "corrupt", or "too_long" (which is a filter, not a fault)
    where: str  # file and line
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.detail}"


Record = str | Flaw
Kind = Literal["text", "chat", "preferences"]

READERS: dict[Kind, tuple[Callable[[Any], str | None], str]] = {
    "chat": (conversation_text, "conversation under 'messages', a list of {role, content}"),
    "preferences": (pair_text, "pair under 'prompt', 'chosen' and 'rejected', texts or lists of {role, content}"),
}


def records(
    file: SourceFile, text_field: str, max_characters: int, part: Range | None = None, kind: Kind = "text"
) -> Iterator[Record]:
    """The documents of `file`, or of a part of it, in order; of conversations and preferences each as canonical JSON.
    Raises DataError for what is no record's fault."""
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
        yield Flaw("corrupt", file.name, str(error).removeprefix(f"{file.name}: "))


def place(file: SourceFile, number: int, max_characters: int, part: Range | None = None) -> str:
    """Where record `number` (from 0) of what `records` gives for the same file lies, for people: a file, its line, or
    its row."""
    if file.format == "text":
        return file.name
    if file.format == "parquet":
        import pyarrow.parquet as pq

        with opened(file) as stream:
            metadata = pq.ParquetFile(stream).metadata
            before = sum(metadata.row_group(group).num_rows for group in range(part[0] if part else 0))
        return f"{file.name}: row {before + number + 1}"
    limit, start = _line_limit(max_characters), part[0] if part else 0
    with opened(file) as stream:
        line = 0
        if start:
            stream.seek(start - 1)
            _skip_line(stream)
            line = _newlines(file, start - 1) + 1
        while raw := stream.readline(limit + 1):
            line += 1
            too_long = len(raw) > limit
            if too_long and not raw.endswith(b"\n"):
                _skip_line(stream)
            if too_long or raw.strip():
                if not number:
                    break
                number -= 1
    return f"{file.name}:{line}"


def row_groups(file: SourceFile) -> int:
    """How many row groups a parquet file has."""
    import pyarrow.parquet as pq

    with opened(file, decompress=False) as stream:
        return int(pq.ParquetFile(stream).num_row_groups)


def _text(file: SourceFile, max_characters: int) -> Iterator[Record]:
    limit = 4 * max_characters + 3  # UTF-8 takes at most four bytes a character; a byte-order mark takes three
    with opened(file) as stream:
        data = _read_up_to(stream, limit + 1)
    if len(data) > limit:
        yield Flaw("too_long", file.name, f"is longer than {max_characters} characters")
        return
    try:
        yield data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        yield Flaw("undecodable", f"{file.name}:{line}", _undecodable(error))


def _read_up_to(stream: BinaryIO, limit: int) -> bytes:
    """`limit` bytes, or what there is: a decompressor may return less than it was asked for."""
    parts, left = [], limit
    while left and (part := stream.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _jsonl(file: SourceFile, text_field: str, max_characters: int, part: Range | None, kind: Kind) -> Iterator[Record]:
    limit = _line_limit(max_characters)
    with opened(file) as stream:
        start, end = part or (0, None)
        first_line = 1
        if start:
            stream.seek(start - 1)
            start += _skip_line(stream) - 1
            first_line = 0  # counted when it is first needed
        at, line = start, 0
        while end is None or at < end:
            raw = stream.readline(limit + 1)
            if not raw:
                return
            length = len(raw)
            too_long = length > limit
            if too_long and not raw.endswith(b"\n"):
                length += _skip_line(stream)

            def where(line: int = line) -> str:
                nonlocal first_line
                first_line = first_line or 1 + _newlines(file, start)
                return f"{file.name}:{first_line + line}"

            if too_long:
                yield Flaw("too_long", where(), f"is longer than {max_characters} characters")
            elif raw.strip():
                yield _json_record(raw, text_field, where, kind)
            at += length
            line += 1


def _line_limit(max_characters: int) -> int:
    return 12 * max_characters + 2**20  # JSON may write a character as two escapes of six bytes; 1 MiB for other keys


def _skip_line(stream: BinaryIO) -> int:
    """Go behind the end of the line, and say how many bytes that was."""
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


def _json_record(raw: bytes, text_field: str, where: Callable[[], str], kind: Kind) -> Record:
    try:
        record = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Flaw("undecodable", where(), _undecodable(error))
    except (ValueError, RecursionError) as error:
        return Flaw("not_json", where(), f"is not JSON ({error})")
    if kind == "text":
        return _text_of(record.get(text_field) if isinstance(record, dict) else None, text_field, where)
    read, wanted = READERS[kind]
    found = read(record)
    return Flaw("no_text", where(), f"has no {wanted}") if found is None else _text_of(found, kind, where)


def _text_of(value: Any, text_field: str, where: Callable[[], str]) -> Record:
    if not isinstance(value, str):
        return Flaw("no_text", where(), f"has no text under {text_field!r}; check `text_field` of the source")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            return Flaw("undecodable", where(), f"has a lone surrogate at character {error.start}")
    return value


def _parquet(file: SourceFile, text_field: str, max_characters: int, part: Range | None) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.compression:
        raise DataError(f"{file.name}: parquet inside .{file.compression} cannot be read in parts; unpack it")
    with opened(file) as stream:
        table = pq.ParquetFile(stream)
        schema = table.schema_arrow
        if text_field not in schema.names:
            names = ", ".join(schema.names[:20])
            raise DataError(f"{file.name}: has no column {text_field!r}; set `text_field` to one of: {names}")
        kind = schema.field(text_field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(
                f"{file.name}: column {text_field!r} holds {kind}, not text; set `text_field` to another one"
            )
        first, end = part or (0, table.num_row_groups)
        row = sum(table.metadata.row_group(group).num_rows for group in range(first))
        for group in range(first, end):
            _bounded(file, table.metadata.row_group(group), text_field, group)
            for batch in table.iter_batches(batch_size=64, row_groups=[group], columns=[text_field]):
                for cell in batch.column(0):
                    row += 1
                    place = f"{file.name}: row {row}"
                    try:
                        value = cell.as_py()
                    except UnicodeDecodeError as error:
                        yield Flaw("undecodable", place, _undecodable(error))
                        continue
                    if isinstance(value, str) and len(value) > max_characters:
                        yield Flaw("too_long", place, f"is longer than {max_characters} characters")
                    else:
                        yield _text_of(value, text_field, lambda place=place: place)  # type: ignore[misc]


def _bounded(file: SourceFile, group: Any, text_field: str, number: int) -> None:
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == text_field and column.total_uncompressed_size > MAX_ROW_GROUP:
            raise DataError(
                f"{file.name}: row group {number} holds {column.total_uncompressed_size} bytes of text; "
                "write it with smaller row groups"
            )


def _undecodable(error: UnicodeDecodeError) -> str:
    return f"is not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start}); convert it to UTF-8"
