"""Megatron's indexed data (`.bin` and `.idx`): the documents of a corpus that is tokenized already.

Tokens are taken as they are. The index is read in parts, and its numbers are compared with the sizes of the files
before anything is allocated for them.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from holdfast.corpus.compression import CorruptFileError
from holdfast.corpus.files import SourceFile, opened
from holdfast.spec.errors import DataError

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the type, sequences, documents + 1
DTYPES: dict[int, str] = {1: "u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
READ_DOCUMENTS = 2**14  # whose index is held
MAX_TOKENS = 2**28  # of a document

TokenArray = NDArray[np.int64]


@dataclass(frozen=True)
class _IndexHeader:
    dtype: np.dtype[Any]
    sequences: int
    documents: int

    @property
    def pointers(self) -> int:
        """The position of the sequences' positions in the .bin file."""
        return HEADER.size + 4 * self.sequences

    @property
    def bounds(self) -> int:
        """The position of the first sequences of the documents."""
        return self.pointers + 8 * self.sequences


def pairs(files: Sequence[SourceFile]) -> list[tuple[SourceFile, SourceFile]]:
    """The .bin and the .idx file of each corpus, by name. Raises DataError for one without the other."""
    by_name = {file.name: file for file in files}
    found = []
    for name, file in by_name.items():
        stem, _, suffix = name.partition("@")[0].rpartition(".") if file.kind == "dvc" else name.rpartition(".")
        if suffix not in ("bin", "idx") or file.compression:
            raise DataError(f"{name}: is no .bin or .idx of Megatron; leave it out of the pattern")
        other = by_name.get(f"{stem}.{'idx' if suffix == 'bin' else 'bin'}{name[len(stem) + 4 :]}")
        if other is None:
            raise DataError(f"{name}: has no .{'idx' if suffix == 'bin' else 'bin'} next to it; name both files")
        if suffix == "bin":
            found.append((file, other))
    return found


def document_count(bin_file: SourceFile, index_file: SourceFile) -> int:
    """The number of documents of a corpus. Raises CorruptFileError."""
    with opened(index_file) as index:
        return _header(index, index_file, bin_file).documents


def megatron_documents(
    bin_file: SourceFile, index_file: SourceFile, part: tuple[int, int] | None, max_tokens: int
) -> Iterator[tuple[int, TokenArray | int]]:
    """The documents of a corpus, or of a part of it, with their numbers in it from 1. A document with more than
    `max_tokens` tokens is their number. Raises CorruptFileError for an index that contradicts the files."""
    with ExitStack() as stack:
        index = stack.enter_context(opened(index_file))
        header = _header(index, index_file, bin_file)
        data = stack.enter_context(opened(bin_file))
        first, last = part or (0, header.documents)
        for start in range(first, last, READ_DOCUMENTS):
            count = min(READ_DOCUMENTS, last - start)
            bounds = _numbers(index, header.bounds + 8 * start, "<i8", count + 1)
            for number, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True), 1):
                if not 0 <= begin <= end <= header.sequences:
                    raise CorruptFileError(f"document {start + number} has the sequences {begin} to {end}")
                tokens = _tokens(index, data, header, (begin, end), min(max_tokens, MAX_TOKENS))
                yield start - first + number, tokens


def _header(index: BinaryIO, index_file: SourceFile, bin_file: SourceFile) -> _IndexHeader:
    raw = index.read(HEADER.size)
    if len(raw) < HEADER.size:
        raise CorruptFileError("is no index of Megatron: it is too short")
    magic, version, code, sequences, bounds = HEADER.unpack(raw)
    if magic != MAGIC or version != 1 or code not in DTYPES or not bounds:
        raise CorruptFileError("is no index of Megatron's version 1 with whole numbers; write it with Megatron-Core")
    header = _IndexHeader(np.dtype(DTYPES[code]), sequences, bounds - 1)
    size = header.bounds + 8 * bounds
    if index_file.size not in (size, size + sequences):  # with modes, of several modalities
        raise CorruptFileError(f"has {index_file.size:,} bytes, and its header gives {size:,}; fetch it again")
    if bin_file.size % header.dtype.itemsize:
        raise CorruptFileError(f"{bin_file.name} has {bin_file.size:,} bytes, no multiple of the size of a token")
    return header


def _tokens(
    index: BinaryIO, data: BinaryIO, header: _IndexHeader, sequences: tuple[int, int], max_tokens: int
) -> TokenArray | int:
    begin, end = sequences
    if begin == end:
        return np.zeros(0, dtype=np.int64)
    if end - begin > max_tokens:
        return end - begin
    lengths = _numbers(index, HEADER.size + 4 * begin, "<i4", end - begin).astype(np.int64)
    pointers = _numbers(index, header.pointers + 8 * begin, "<i8", end - begin)
    width = header.dtype.itemsize
    if (lengths < 0).any() or (pointers[1:] != pointers[:-1] + lengths[:-1] * width).any() or pointers[0] < 0:
        raise CorruptFileError(f"the sequences {begin} to {end} do not follow each other in the .bin file")
    total = int(lengths.sum())
    if total > max_tokens:
        return total
    return _numbers(data, int(pointers[0]), header.dtype.str, total).astype(np.int64)


def _numbers(stream: BinaryIO, at: int, dtype: str, count: int) -> NDArray[Any]:
    """`count` numbers from position `at`. Raises CorruptFileError if they are not all there."""
    stream.seek(at)
    size, parts = count * np.dtype(dtype).itemsize, []
    while size and (part := stream.read(min(size, 2**24))):
        parts.append(part)
        size -= len(part)
    if size:
        raise CorruptFileError("ends before the last token that its index names; fetch it again")
    return np.frombuffer(b"".join(parts), dtype=dtype)
