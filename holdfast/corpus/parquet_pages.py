"""Page sizes of a parquet column, read from the page headers.

The footer of a file also has sizes, but readers do not rely on them: the header of each page determines their memory.
pyarrow reads the values. A header is a struct of Thrift's compact protocol.
"""

import io
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

MAX_HEADER = 16 * 2**20  # bytes, pyarrow's limit
FIRST_READ = 4096
MAX_DEPTH = 16
STOP, TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 11, 12
INTEGERS = (4, 5, 6)
INT32 = 5
WHOLE, STORED, DATA_PAGE, DATA_PAGE_2, COUNT = 2, 3, 5, 8, 1  # field numbers
ELEMENT = -(2**15) - 1  # not a valid field number


class _MetadataReadError(Exception):
    """The metadata of a column were read without an error, and its data are next."""


class _WithoutData(io.RawIOBase):
    """A file of a size, whose data must not be read."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = at + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes:  # noqa: ARG002
        raise _MetadataReadError


class ColumnChunks:
    """The metadata of a column's chunks; of a nested column, those of all its leaves.

    `RowGroupMetaData.column` of pyarrow 25 ends the process if they are damaged, and a reader of the rows raises an
    error. So this first begins to read rows, from a file without data.
    """

    def __init__(self, stream: BinaryIO, table: Any, name: str) -> None:
        """`table` is the ParquetFile of `stream`."""
        import pyarrow.parquet as pq

        self._metadata, self.name = table.metadata, name
        self._reader = pq.ParquetFile(_WithoutData(stream.seek(0, io.SEEK_END)), metadata=table.metadata)
        paths = [table.schema.column(at).path for at in range(len(table.schema))]
        self._indexes = [at for at, path in enumerate(paths) if path == name or path.startswith(f"{name}.")]

    def of_group(self, group: int) -> list[Any]:
        """pyarrow's metadata of the column in a row group. Raises an error of pyarrow's if they are damaged."""
        with suppress(_MetadataReadError):
            columns = [self.name]
            next(self._reader.iter_batches(batch_size=1, row_groups=[group], columns=columns, use_threads=False), None)
        return [self._metadata.row_group(group).column(index) for index in self._indexes]


def largest_page(stream: BinaryIO, column: Any) -> int:
    """The bytes of the largest decompressed page of a column chunk, given pyarrow's metadata. Raises ValueError for
    damaged headers."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < (first := column.dictionary_page_offset) < start:
        start = first
    at, end, largest, values = start, start + column.total_compressed_size, 0, 0
    while at < end and values < column.num_values:
        length, header = _header(stream, at)
        if header.whole < 0 or header.stored < 0:
            raise ValueError(f"the page at byte {at} has no size")
        largest = max(largest, header.whole, header.stored)
        values += max(0, header.values)
        at += length + header.stored
    return largest


@dataclass(frozen=True)
class _Header:
    whole: int  # bytes of the page, decompressed
    stored: int  # bytes of the page in the file
    values: int  # of a data page


def _header(stream: BinaryIO, at: int) -> tuple[int, _Header]:
    """The length and content of the page header at a position of the stream."""
    size = FIRST_READ
    while True:
        stream.seek(at)
        data = stream.read(size)
        try:
            parser = _Parser(data)
            fields = parser.fields
            values = fields.get((DATA_PAGE, COUNT), 0) + fields.get((DATA_PAGE_2, COUNT), 0)
            return parser.at, _Header(fields.get((WHOLE,), -1), fields.get((STORED,), -1), values)
        except IndexError:
            if len(data) < size or size >= MAX_HEADER:
                raise ValueError(f"the page at byte {at} has no whole header") from None
            size *= 16


class _Parser:
    """Parses one struct. Raises IndexError if the data ends inside it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0
        self.fields: dict[tuple[int, ...], int] = {}  # 32-bit integers, by the path of field numbers
        self._struct(())

    def _struct(self, path: tuple[int, ...]) -> None:
        if len(path) > MAX_DEPTH:
            raise ValueError("a page header is nested too deeply")
        number = 0
        while (head := self._byte()) & 15 != STOP:
            number = number + (head >> 4) if head >> 4 else _signed(self._varint(), 64)
            if head & 15 == INT32:
                self.fields[*path, number] = _signed(self._varint(), 32)
            else:
                self._skip(head & 15, (*path, number))

    def _skip(self, kind: int, path: tuple[int, ...], *, element: bool = False) -> None:
        """Skip a value. A boolean is a byte as an element of a list, and part of the type as a field."""
        if kind in (TRUE, FALSE):
            self.at += element
        elif kind == BYTE:
            self.at += 1
        elif kind in INTEGERS:
            self._varint()
        elif kind == DOUBLE:
            self.at += 8
        elif kind == BINARY:
            length = self._varint()
            self.at += length
        elif kind == STRUCT:
            self._struct(path)
        elif kind in (LIST, SET):
            head = self._byte()
            count = head >> 4 if head >> 4 != 15 else self._varint()
            self._skip_all([head & 15], count, (*path, ELEMENT))
        elif kind == MAP:
            if count := self._varint():
                kinds = self._byte()
                self._skip_all([kinds >> 4, kinds & 15], count, (*path, ELEMENT))
        else:
            raise ValueError(f"a page header has a field of the unknown type {kind}")
        if self.at > len(self._data):
            raise IndexError

    def _skip_all(self, kinds: list[int], count: int, path: tuple[int, ...]) -> None:
        if len(path) > MAX_DEPTH:
            raise ValueError("a page header is nested too deeply")
        for _ in range(count):
            before = self.at
            for kind in kinds:
                self._skip(kind, path, element=True)
            if self.at == before:
                raise ValueError("a page header has elements without a size")

    def _varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number & (2**64 - 1)
            if shift > 63:
                raise ValueError("a page header has a number that is too long")

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]


def _signed(number: int, bits: int) -> int:
    """The integer of a zigzag number, truncated to its bits as readers do."""
    value = ((number >> 1) ^ -(number & 1)) & (2**bits - 1)
    return value - 2**bits if value >> (bits - 1) else value
