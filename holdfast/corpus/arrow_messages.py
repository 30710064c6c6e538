"""Record batches of an Arrow file, read as a stream: the IPC stream format, and the IPC file format (Feather 2).

pyarrow allocates what the header of a message asks for. So the header is read here first, a table of flatbuffers, and
a batch that is too large is refused. pyarrow reads the values, and checks their offsets.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

from holdfast.corpus.compression import CorruptFileError

MAGIC = b"ARROW1\0\0"
CONTINUATION = b"\xff\xff\xff\xff"
MAX_HEADER = 64 * 2**20
MAX_BATCH = 2**30  # bytes of a record batch, decompressed
SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # types of a message
TYPE, HEADER, BODY_LENGTH = 1, 2, 3  # field numbers of Message
BUFFERS, COMPRESSION, DATA = 2, 3, 1  # field numbers of RecordBatch, and of DictionaryBatch


def batches_of(stream: BinaryIO) -> Iterator[Any]:
    """The record batches of a stream, each checked. Raises CorruptFileError for one that is too large, and what
    pyarrow raises for damage, or ValueError."""
    import pyarrow as pa

    begin = b""  # the schema and the dictionaries
    for kind, message in _messages(stream):
        if kind == BATCH:
            with pa.ipc.open_stream(pa.BufferReader(begin + message)) as reader:
                batch = reader.read_next_batch()
            batch.validate(full=True)
            yield batch
        else:
            begin += message
            if len(begin) > MAX_BATCH:
                raise CorruptFileError(
                    f"has dictionaries of more than {MAX_BATCH:,} bytes; write it without", "too_large"
                )


def _messages(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The messages of a stream with their types, up to its end."""
    prefix = _exactly(stream, 8, ends=True)
    if not prefix:
        raise EOFError("it is empty")
    if prefix == MAGIC:
        prefix = _exactly(stream, 8)
    while prefix:
        if prefix[:4] != CONTINUATION:
            raise ValueError("it is no Arrow stream: a message has no begin")
        (size,) = struct.unpack("<i", prefix[4:])
        if not size:
            return
        if not 0 < size <= MAX_HEADER:
            raise ValueError(f"a message has a header of {size} bytes")
        header = _exactly(stream, size)
        try:
            table = _Table.root(header)
            kind, length = table.byte(TYPE), table.long(BODY_LENGTH)
        except struct.error:
            raise ValueError("the header of a message is damaged") from None
        if not 0 <= length <= MAX_BATCH:
            raise _too_large(length)
        body = _exactly(stream, length)
        if kind in (DICTIONARY, BATCH):
            try:
                whole = _decompressed_size(table.table(HEADER), kind, body)
            except struct.error:
                raise ValueError("the header of a batch is damaged") from None
            if whole > MAX_BATCH:
                raise _too_large(whole)
        yield kind, prefix + header + body
        prefix = _exactly(stream, 8, ends=True)


def _too_large(size: int) -> CorruptFileError:
    return CorruptFileError(
        f"has a batch of {size:,} bytes, and {MAX_BATCH:,} are read; write it with smaller batches", "too_large"
    )


def _decompressed_size(header: _Table, kind: int, body: bytes) -> int:
    """The bytes of a batch's buffers, which begin with their size if they are compressed."""
    batch = header.table(DATA) if kind == DICTIONARY else header
    if not batch.has(COMPRESSION):
        return len(body)
    total = 0
    for offset, length in batch.structs(BUFFERS):
        if length:
            (size,) = struct.unpack_from("<q", body, offset)
            total += size if size >= 0 else length
    return total


class _Table:
    """A table of a flatbuffer. Raises struct.error for a position outside of it."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - self._number("<i", at)
        self._size = self._number("<H", self._fields)

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data, struct.unpack_from("<I", data)[0])

    def has(self, field: int) -> bool:
        """Whether a field has a value."""
        return self._place(field) > 0

    def byte(self, field: int) -> int:
        """An unsigned byte; 0 by default."""
        return self._number("<B", self._place(field)) if self.has(field) else 0

    def long(self, field: int) -> int:
        """A 64-bit integer; 0 by default."""
        return self._number("<q", self._place(field)) if self.has(field) else 0

    def table(self, field: int) -> _Table:
        """A table in a field."""
        return _Table(self._data, self._reference(field))

    def structs(self, field: int) -> Iterator[tuple[int, int]]:
        """The structs of two 64-bit integers in a vector."""
        if self.has(field):
            at = self._reference(field)
            for number in range(self._number("<I", at)):
                yield self._number("<q", at + 4 + 16 * number), self._number("<q", at + 12 + 16 * number)

    def _reference(self, field: int) -> int:
        place = self._place(field)
        if not place:
            raise struct.error("a field is missing")
        return place + self._number("<I", place)

    def _place(self, field: int) -> int:
        """The position of a field's value; 0 if it has none."""
        entry = 4 + 2 * field
        if entry >= self._size:
            return 0
        offset = self._number("<H", self._fields + entry)
        return self._at + offset if offset else 0

    def _number(self, form: str, at: int) -> int:
        if at < 0:  # struct would count from the end
            raise struct.error("a position is negative")
        return int(struct.unpack_from(form, self._data, at)[0])


def _exactly(stream: BinaryIO, size: int, *, ends: bool = False) -> bytes:
    """The next `size` bytes. With `ends`, none at the end of the stream. Raises EOFError."""
    parts, remaining = [], size
    while remaining and (part := stream.read(min(remaining, 2**20))):
        parts.append(part)
        remaining -= len(part)
    if remaining and not (ends and remaining == size):
        raise EOFError("it ends inside a message")
    return b"".join(parts)
