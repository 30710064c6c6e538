"""Files of `torch.save`, read without torch's loader: their tensors, some rows at a time.

Every size is checked against the file before any allocation. The records of the archive are stored uncompressed, lie
inside it, and share no byte. A tensor has no more elements than its record. Pickled data is read as plain records
(`pickle_records`).
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from holdfast.exchange.pickle_records import PERSISTENT, Name, Record, Table, read_pickle
from holdfast.spec.errors import DataError
from holdfast.store import open_regular
from holdfast.store.durable import fill

MOST_RECORDS = 65_536
MOST_DIRECTORY_BYTES = 16 * 2**20
MOST_PICKLE_BYTES = 16 * 2**20
MOST_AXES = 64  # torch's limit
MOST_NUMBER = 2**63 - 1
_STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
}
_RAW = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
DTYPES = {f"torch.{name}": found for name in dir(torch) if isinstance(found := getattr(torch, name), torch.dtype)}
_TENSOR, _PARAMETER = "torch._utils._rebuild_tensor", "torch._utils._rebuild_parameter"
_WRAPPED = (_PARAMETER, f"{_PARAMETER}_with_state")
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_NAMES = frozenset(
    {
        *_STORAGES,
        *_RAW,
        *DTYPES,
        *_WRAPPED,
        _TENSOR,
        f"{_TENSOR}_v2",
        f"{_TENSOR}_v3",
        _SUBCLASS,
        *(f"torch.{kind}Storage" for kind in ("Long", "Int", "Short", "Char", "Byte", "Bool")),
        "torch.Size",
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "collections.OrderedDict",
    }
)


def numbers(value: Any) -> tuple[int, ...]:
    """A shape or an offset. Raises ValueError for anything but a few non-negative integers."""
    if isinstance(value, Record) and value.kind == "torch.Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or len(value) > MOST_AXES:
        raise ValueError("a shape is no short list of numbers")
    if not all(type(number) is int and 0 <= number <= MOST_NUMBER for number in value):
        raise ValueError("a shape has what is no size")
    return tuple(value)


@dataclass(frozen=True)
class StoredTensor:
    """A floating-point tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements, as in torch
    position: int  # of its first element, in bytes from the start of the file

    def rows(self, most_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensor's rows in order, about `most_bytes` at a time, each part with the index of its first row. A
        scalar is one part. Raises DataError if the file became shorter."""
        if not prod(self.shape):
            return
        with open_regular(self.path) as file:
            if self.strides != contiguous(self.shape):
                span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
                tensor = self._read(file.fileno(), 0, (span,)).as_strided(self.shape, self.strides)
            inner = prod(self.shape[1:])
            rows = max(1, most_bytes // (inner * self.dtype.itemsize))
            for first in range(0, self.shape[0], rows) if self.shape else (0,):
                size = (min(rows, self.shape[0] - first), *self.shape[1:]) if self.shape else ()
                if self.strides == contiguous(self.shape):
                    yield first, self._read(file.fileno(), first * inner, size)
                else:
                    yield first, tensor[first : first + size[0]]

    def _read(self, descriptor: int, first: int, shape: tuple[int, ...]) -> torch.Tensor:
        data = torch.empty(prod(shape) * self.dtype.itemsize, dtype=torch.uint8)
        fill(descriptor, data.numpy().data, self.position + first * self.dtype.itemsize, str(self.path))
        return data.view(self.dtype).reshape(shape)


def read_tensors(path: Path, start: int = 0, length: int | None = None) -> StoredTensor | dict[str, StoredTensor]:
    """The tensor, or the dictionary of tensors, that `torch.save` wrote into a file, or into `length` bytes of it
    from `start`. Values other than floating-point tensors are left out. Raises MissingError or DataError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = size - start if length is None else length
        if start < 0 or length < 0 or start + length > size:
            raise DataError(
                f"{path}: cannot be read: it has {size} bytes, and a part should lie at {start} to "
                f"{start + length}; fetch it again"
            )
        try:
            archive = _Archive(file.fileno(), start, length, path)
            content = read_pickle(archive.read("data.pkl", MOST_PICKLE_BYTES), str(path), _NAMES)
            order = archive.read("byteorder", 16) if "byteorder" in archive.records else b"little"
            if order != b"little":
                raise ValueError(f"its byte order is {order!r}; save it on a machine that is little-endian")
            if isinstance(content, Table):
                pairs = ((key, _tensor(value, archive, path)) for key, value in content.by_text().items())
                return {key: tensor for key, tensor in pairs if tensor is not None}
            if (tensor := _tensor(content, archive, path)) is None:
                raise ValueError("it holds no tensor of floating-point numbers")
        except (ValueError, struct.error) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None
        return tensor


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor with its elements in order and without gaps."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def file_inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder. Raises DataError for a name or a link that leads out of the folder."""
    if not name or Path(name).name != name or name in (".", "..") or "\0" in name or "\\" in name:
        raise DataError(f"{folder}: a part should lie in {name[:200]!r}, outside of the folder")
    if (path := (folder / name).resolve()).parent != folder.resolve():
        raise DataError(f"{folder / name}: is a link to {path}, outside of the folder; copy that file into the folder")
    return folder / name


class _Archive:
    """The records of a zip archive at offset `start` of a file, by their names without the top folder."""

    def __init__(self, descriptor: int, start: int, length: int, path: Path) -> None:
        self._descriptor, self._start, self._length, self._path = descriptor, start, length, path
        directory = self._directory()
        folder = {
            name.removesuffix("data.pkl") for name in directory if name == "data.pkl" or name.endswith("/data.pkl")
        }
        if len(folder) != 1:
            raise ValueError("it is no archive of torch.save: it has not one record data.pkl")
        (prefix,) = folder
        self.records = {name.removeprefix(prefix): at for name, at in directory.items() if name.startswith(prefix)}

    def read(self, name: str, most: int) -> bytes:
        """The content of a record of at most `most` bytes. Raises ValueError for a larger one."""
        position, size = self.records[name]
        if size > most:
            raise ValueError(f"its record {name} has {size} bytes, and at most {most} are read")
        return self._bytes(position, size)

    def place(self, name: str) -> tuple[int, int]:
        """The position of a record in the file, and its size, in bytes."""
        if name not in self.records:
            raise ValueError(f"it has no record {name[:100]!r}")
        position, size = self.records[name]
        return self._start + position, size

    def _bytes(self, position: int, size: int) -> bytes:
        if position < 0 or size < 0 or position + size > self._length:
            raise ValueError("it is no whole zip archive")
        target = bytearray(size)
        fill(self._descriptor, memoryview(target), self._start + position, str(self._path))
        return bytes(target)

    def _end(self) -> tuple[int, int, int]:
        """The number of records, and the size and start of their directory."""
        tail = min(self._length, 22 + 65_535)
        last = self._bytes(self._length - tail, tail)
        at = last.rfind(b"PK\x05\x06")
        if at < 0 or at + 22 > len(last):
            raise ValueError("it is no zip archive, as torch.save writes them since torch 1.6")
        count, size, begin = struct.unpack_from("<HII", last, at + 10)
        if count == 0xFFFF or 0xFFFFFFFF in (size, begin):
            signature, _, place = struct.unpack_from("<4sIQ", self._bytes(self._length - tail + at - 20, 20))
            if signature != b"PK\x06\x07":
                raise ValueError("it is no whole zip archive")
            signature, count, size, begin = struct.unpack_from("<4s28xQQQ", self._bytes(place, 56))
            if signature != b"PK\x06\x06":
                raise ValueError("it is no whole zip archive")
        return count, size, begin

    def _directory(self) -> dict[str, tuple[int, int]]:
        count, size, begin = self._end()
        if count > MOST_RECORDS or size > MOST_DIRECTORY_BYTES:
            raise ValueError(f"it has {count} records in a directory of {size} bytes, which no checkpoint needs")
        directory, at = self._bytes(begin, size), 0
        entries: dict[str, tuple[int, int]] = {}
        for _ in range(count):
            entry = struct.unpack_from("<4s4xHH8xIIHHH8xI", directory, at)
            signature, flags, method, packed, unpacked, of_name, of_extra, of_comment, place = entry
            name = directory[at + 46 : at + 46 + of_name].decode("utf-8")
            extra = directory[at + 46 + of_name : at + 46 + of_name + of_extra]
            at += 46 + of_name + of_extra + of_comment
            packed, unpacked, place = _long_sizes(extra, packed, unpacked, place)
            if signature != b"PK\x01\x02" or name in entries:
                raise ValueError("it is no whole zip archive")
            if method or flags & 1 or packed != unpacked:
                raise ValueError(
                    f"its record {name[:100]!r} is compressed or encrypted, which torch.save never does; "
                    "save it again with torch.save"
                )
            signature, of_name, of_extra = struct.unpack_from("<4s22xHH", self._bytes(place, 30))
            first = place + 30 + of_name + of_extra
            if signature != b"PK\x03\x04" or first + packed > begin:
                raise ValueError(f"its record {name[:100]!r} does not lie inside of it")
            entries[name] = first, packed
        end = 0
        for first, packed in sorted(entries.values()):
            if first < end:
                raise ValueError("its records overlap")
            end = first + packed
        return entries


def _long_sizes(extra: bytes, packed: int, unpacked: int, place: int) -> tuple[int, int, int]:
    """The sizes and the position of a record. Values that need more than 32 bits come from the extra field of zip64."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + size]
            values = iter(struct.unpack_from(f"<{len(field) // 8}Q", field))
            unpacked = next(values, unpacked) if unpacked == 0xFFFFFFFF else unpacked
            packed = next(values, packed) if packed == 0xFFFFFFFF else packed
            place = next(values, place) if place == 0xFFFFFFFF else place
        at += 4 + size
    return packed, unpacked, place


def _tensor(value: Any, archive: _Archive, path: Path) -> StoredTensor | None:
    """The tensor that a record describes, or None for anything else. Raises ValueError for an invalid one."""
    for _ in range(4):  # a parameter around a subclass around a tensor
        if not isinstance(value, Record):
            return None
        arguments = value.arguments
        if value.kind in _WRAPPED and arguments:
            value = arguments[0]
        elif value.kind == _SUBCLASS and len(arguments) > 2 and isinstance(arguments[0], Name):
            value = Record(arguments[0].text, arguments[2] if isinstance(arguments[2], tuple) else ())
    if not isinstance(value, Record) or not value.kind.startswith(_TENSOR) or len(value.arguments) < 4:
        return None
    storage, first, shape, strides = value.arguments[:4]
    location = storage.arguments[0] if isinstance(storage, Record) and storage.kind == PERSISTENT else None
    if not (
        isinstance(location, tuple)
        and len(location) == 5
        and isinstance(location[1], Name)
        and isinstance(location[2], str)
    ):
        raise ValueError("a tensor does not say where its numbers lie")
    dtype = _STORAGES.get(location[1].text)
    if value.kind == f"{_TENSOR}_v3" and location[1].text in _RAW and len(value.arguments) > 6:
        dtype_name = value.arguments[6]
        dtype = DTYPES.get(dtype_name.text) if isinstance(dtype_name, Name) else None
    if dtype is None or not dtype.is_floating_point:
        return None
    return _placed(
        dtype, numbers(shape), numbers(strides), numbers((first,))[0], archive.place(f"data/{location[2]}"), path
    )


def _placed(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    first: int,
    record: tuple[int, int],
    path: Path,
) -> StoredTensor:
    """Build a stored tensor. Raises ValueError if it reaches outside its record, or if its elements share memory."""
    if len(shape) != len(strides):
        raise ValueError("a tensor has other strides than axes")
    expected = contiguous(shape)
    strides = tuple(want if size == 1 else stride for size, stride, want in zip(shape, strides, expected, strict=True))
    if 0 in shape:
        return StoredTensor(path, dtype, shape, expected, record[0])
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < reach:
            raise ValueError(f"elements of a tensor of shape {list(shape)} lie in the same place")
        reach += (size - 1) * stride
    if (first + reach) * dtype.itemsize > record[1]:
        raise ValueError(f"a tensor of shape {list(shape)} should lie in {record[1]} bytes")
    return StoredTensor(path, dtype, shape, strides, record[0] + first * dtype.itemsize)
