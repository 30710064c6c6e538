"""Verified files of an exported model: its record, and reads that check every byte against it.

A file's record has a digest for each block of 4 MiB, so a part of a file is verified without reading the rest. This
module is packaged with registered models, so it imports no store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from blake3 import blake3
from pydantic import BaseModel, Field, ValidationError, field_validator

from holdfast.model.files import Files
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.identity import digest

BLOCK_BYTES = 4 * 2**20
CACHED_BLOCKS = 8  # for reads of neighboring small tensors
_DIGEST_BYTES = 16
REMEDY = "delete that file and run the spec again: train writes it anew"


class FileRecord(BaseModel, frozen=True):
    """The record of one file of an export."""

    size: int = Field(ge=0)  # bytes
    blocks: tuple[str, ...]  # digests of BLOCK_BYTES each, in hexadecimal
    version: str = ""  # the store's, when it was written

    @property
    def digest(self) -> str:
        """The digest of the whole file, from those of its blocks."""
        return blake3(bytes.fromhex("".join(self.blocks))).hexdigest()[: 2 * _DIGEST_BYTES]


class ExportRecord(BaseModel, frozen=True):
    """`runs/<run-id>/export/step-N-<state digest>.json`: the files of an export."""

    state_digest: str
    files: dict[str, FileRecord]
    whole: bool  # all files are written

    @field_validator("files")
    @classmethod
    def _below_the_folder(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        for name in files:
            if any(part in ("", ".", "..") for part in name.split("/")):
                raise ValueError(f"{name[:100]!r} is no path below the folder of the export")
        return files

    @property
    def digest(self) -> str:
        """The export's digest in verdicts and registrations, over the names, sizes and content of its files."""
        files = {name: [file.size, file.digest] for name, file in self.files.items()}
        return digest({"state_digest": self.state_digest, "files": files})

    @classmethod
    def parse(cls, data: bytes, source: str) -> ExportRecord:
        """Parse the record in `data`, which came from `source`. Raises DataError."""
        try:
            return cls.model_validate_json(data)
        except (ValidationError, RecursionError) as error:
            raise DataError(f"{source}: is no record of an export ({type(error).__name__}); {REMEDY}") from None


class Digester:
    """Digests of the blocks of a file that is being written."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._current = blake3()
        self._filled = 0
        self._size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the file."""
        view = memoryview(data).cast("B")
        self._size += view.nbytes
        while view.nbytes:
            part = view[: BLOCK_BYTES - self._filled]
            self._current.update(part)
            self._filled += part.nbytes
            view = view[part.nbytes :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def record(self, version: str) -> FileRecord:
        """The record of the file, after all its bytes were added."""
        if self._filled:
            self._end_block()
        return FileRecord(size=self._size, blocks=tuple(self._blocks), version=version)

    def _end_block(self) -> None:
        self._blocks.append(self._current.hexdigest(length=_DIGEST_BYTES))
        self._current, self._filled = blake3(), 0


class VerifiedFiles:
    """The files of an export, with each byte verified before use. It implements `Files`. Files without a record do
    not exist."""

    def __init__(self, files: Files, record: ExportRecord) -> None:
        self._files = files
        self.record = record
        self._cache: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    @property
    def where(self) -> str:
        """The folder."""
        return self._files.where

    def size(self, name: str) -> int | None:
        """The size of a file in bytes, or None if the export has no such file."""
        file = self.record.files.get(name)
        return None if file is None else file.size

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill `target` with bytes from `start` on. Raises DataError for bytes that differ from the export, and
        MissingError."""
        target = target.cast("B")
        file = self._file(name)
        end = start + target.nbytes
        if end > file.size:
            raise DataError(f"{self.where}/{name}: ends after {file.size} bytes, and {end} are needed")
        first, last = -(-start // BLOCK_BYTES), end // BLOCK_BYTES  # whole blocks within `target`
        if end == file.size:
            last = len(file.blocks)
        if first >= last:
            self._copy(name, start, target)
            return
        head, tail = first * BLOCK_BYTES, min(last * BLOCK_BYTES, file.size)
        self._copy(name, start, target[: head - start])
        self._read_blocks(name, range(first, last), target[head - start : tail - start])
        self._copy(name, tail, target[tail - start :])

    def damages(self, name: str) -> Iterator[str]:
        """Descriptions of the damage of a file. Empty if it is intact."""
        file = self._file(name)
        try:
            size = self._files.size(name)
            if size != file.size:
                yield "is missing" if size is None else f"has {size} bytes, and {file.size} were exported"
                return
            buffer = memoryview(bytearray(min(BLOCK_BYTES, file.size)))
            for block in range(len(file.blocks)):
                try:
                    self._read_blocks(name, range(block, block + 1), buffer[: self._length(file, block)])
                except DataError as error:
                    yield str(error).removeprefix(f"{self.where}/{name}: ").removesuffix(f"; {REMEDY}")
        except MissingError:
            yield "is missing"

    def _file(self, name: str) -> FileRecord:
        try:
            return self.record.files[name]
        except KeyError:
            raise MissingError(f"{self.where}/{name}: is no file of this export") from None

    @staticmethod
    def _length(file: FileRecord, block: int) -> int:
        return min(BLOCK_BYTES, file.size - block * BLOCK_BYTES)

    def _copy(self, name: str, start: int, target: memoryview) -> None:
        """Fill a target within partly needed blocks."""
        while target.nbytes:
            block, skipped = divmod(start, BLOCK_BYTES)
            data = self._block(name, block)[skipped : skipped + target.nbytes]
            target[: len(data)] = data
            start, target = start + len(data), target[len(data) :]

    def _block(self, name: str, block: int) -> bytes:
        key = (name, block)
        if key not in self._cache:
            data = bytearray(self._length(self._file(name), block))
            self._read_blocks(name, range(block, block + 1), memoryview(data))
            self._cache[key] = bytes(data)
            if len(self._cache) > CACHED_BLOCKS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]

    def _read_blocks(self, name: str, blocks: range, target: memoryview) -> None:
        """Read whole blocks in one request. A damaged block is read once more."""
        start = blocks[0] * BLOCK_BYTES
        self._files.read_into(name, start, target)
        for block in blocks:
            at = block * BLOCK_BYTES - start
            part = target[at : at + BLOCK_BYTES]
            wanted = self._file(name).blocks[block]
            if blake3(part).hexdigest(length=_DIGEST_BYTES) == wanted:
                continue
            self._files.read_into(name, block * BLOCK_BYTES, part)
            if blake3(part).hexdigest(length=_DIGEST_BYTES) != wanted:
                first = block * BLOCK_BYTES
                raise DataError(
                    f"{self.where}/{name}: bytes {first} to {first + part.nbytes} are not those that were exported: "
                    f"the file is damaged, or it was replaced; {REMEDY}"
                )
