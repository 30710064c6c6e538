"""Records of parquet files and of Arrow files, in bounded memory, and damage that is named.

Sizes are checked before anything is decoded: of parquet in the page headers, of Arrow in the header of each batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from holdfast.corpus.arrow_messages import batches_of
from holdfast.corpus.compression import CorruptFileError
from holdfast.corpus.files import SourceFile, opened
from holdfast.corpus.parquet_pages import ColumnChunks, largest_page
from holdfast.corpus.record_types import Flaw, Reading, Record, document_of, excerpt, text_of, undecodable
from holdfast.spec.errors import DataError, HoldfastError

Range = tuple[int, int]
MAX_ROW_GROUP = 16 * 2**30  # bytes of one text column in one row group
MAX_NESTED = 2 * 2**30  # the same for a nested column, of which one row may span pages
MAX_PAGE = 128 * 2**20  # bytes of a decompressed page of parquet, plus the bytes of one document of maximum length
BATCH_ROWS, BATCH_BYTES = 64, 64 * 2**20  # of parquet, decoded together


def parquet_records(file: SourceFile, reading: Reading, part: Range | None) -> Iterator[tuple[int, Record]]:
    """The documents of some row groups of a parquet file, or of all, with their rows in them from 1."""
    import pyarrow.parquet as pq

    if file.compression:
        raise DataError(f"{file.name}: parquet inside .{file.compression} cannot be read in parts; unpack it")
    with opened(file) as stream:
        with damage_named(file):
            table = pq.ParquetFile(stream, page_checksum_verification=True)
            columns = _columns(file, table.schema_arrow, reading)
            row_groups = range(*(part or (0, table.num_row_groups)))
            rows = sum(table.metadata.row_group(group).num_rows for group in row_groups)
        try:
            yield from _rows(file, stream, table, row_groups, columns, reading)
        except CorruptFileError:
            yield rows, None  # lost rows count in the locations of later rows
            raise


def arrow_records(file: SourceFile, reading: Reading) -> Iterator[tuple[int, Record]]:
    """The documents of an Arrow file (IPC stream or file), with their rows from 1."""
    row = 0
    with opened(file) as stream:
        batches = batches_of(stream)
        while True:
            with damage_named(file):
                batch = next(batches, None)
            if batch is None:
                return
            columns = _columns(file, batch.schema, reading)
            for record in _documents(batch, columns, reading):
                row += 1
                yield row, record


def row_groups(file: SourceFile) -> int:
    """The number of row groups of a parquet file. Raises CorruptFileError."""
    import pyarrow.parquet as pq

    with opened(file, decompress=False) as stream, damage_named(file):
        return int(pq.ParquetFile(stream).num_row_groups)


def rows_before(file: SourceFile, group: int) -> int:
    """The number of rows of a parquet file before a row group. Raises CorruptFileError."""
    import pyarrow.parquet as pq

    with opened(file) as stream, damage_named(file):
        metadata = pq.ParquetFile(stream).metadata
        return sum(metadata.row_group(number).num_rows for number in range(group))


def _rows(
    file: SourceFile, stream: BinaryIO, table: Any, groups: range, columns: list[str], reading: Reading
) -> Iterator[tuple[int, Record]]:
    row = 0
    with damage_named(file):
        chunks = [ColumnChunks(stream, table, column) for column in columns]
    for group in groups:
        with damage_named(file):
            size = _rows_per_batch(file, stream, chunks, group, reading.max_characters)
            batches = table.iter_batches(batch_size=size, row_groups=[group], columns=columns)
        while True:
            with damage_named(file):
                batch = next(batches, None)
            if batch is None:
                break
            for record in _documents(batch, columns, reading):
                row += 1
                yield row, record


def _documents(batch: Any, columns: list[str], reading: Reading) -> Iterator[Record]:
    """The documents of the rows of a record batch."""
    arrays = [batch.column(column) for column in columns]
    for row in range(batch.num_rows):
        try:
            values = [array[row].as_py() for array in arrays]
        except UnicodeDecodeError as error:
            yield Flaw("undecodable", undecodable(error))
            continue
        value = values[0]
        if reading.kind != "text":
            yield document_of(dict(zip(columns, values, strict=True)), reading)
        elif isinstance(value, str) and len(value) > (limit := reading.max_characters):
            detail = f"has {len(value)} characters, more than data.cleaning.max_characters = {limit}"
            yield Flaw("too_long", detail, excerpt(value))
        else:
            yield text_of(value, reading.text_field)


def _columns(file: SourceFile, schema: Any, reading: Reading) -> list[str]:
    """The columns that are read. Raises DataError if the schema has none of them, or one of them twice."""
    import pyarrow as pa

    names, text_field = list(schema.names), reading.text_field
    listed = ", ".join(names[:20])
    columns = reading.columns(names)
    for name in columns:
        if (count := names.count(name)) > 1:
            raise DataError(f"{file.name}: has {count} columns {name!r}; rename all but one")
    if reading.kind != "text":
        if not columns:
            wanted = ", ".join(sorted(reading.map.columns))
            raise DataError(
                f"{file.name}: has none of the columns {wanted}; name its columns in `fields` of the source, of: "
                f"{listed}"
            )
        return columns
    if not columns:
        raise DataError(f"{file.name}: has no column {text_field!r}; set `text_field` to one of: {listed}")
    kind = schema.field(text_field).type
    value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
    # A column of the type null has no values.
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(check(value_type) for check in is_text):
        raise DataError(f"{file.name}: column {text_field!r} holds {kind}, not text; set `text_field` to another one")
    return columns


@contextmanager
def damage_named(file: SourceFile) -> Iterator[None]:
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
        raise CorruptFileError(f"{file.name}: is not whole {file.format} data ({error}); fetch it again") from None


def _rows_per_batch(
    file: SourceFile, stream: BinaryIO, chunks: list[ColumnChunks], number: int, max_characters: int
) -> int:
    """The number of rows of a row group to decode together. Each row may be as long as a page, since a dictionary or
    a common prefix encodes it in a few bytes. Raises CorruptFileError for pages that are too large to decompress,
    and DataError for a row group with too much text."""
    largest = 0
    for chunk in chunks:
        columns = chunk.of_group(number)
        size, limit = sum(column.total_uncompressed_size for column in columns), MAX_ROW_GROUP
        if columns and columns[0].path_in_schema != chunk.name:
            limit = MAX_NESTED
        if size > limit:
            raise DataError(f"{file.name}: row group {number} holds {size} bytes of text; write smaller row groups")
        largest += max((largest_page(stream, column) for column in columns), default=0)
    if largest > (most := MAX_PAGE + 4 * max_characters):
        raise CorruptFileError(
            f"{file.name}: row group {number} has a page of {largest:,} bytes once decompressed, and {most:,} are "
            "read; write it with smaller pages or row groups, or raise data.cleaning.max_characters",
            reason="too_large",
        )
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, largest)))
