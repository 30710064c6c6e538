"""Tensor files in safetensors format, read by ranges from any location.

The library reads only whole files from the local disk. A large model is in a bucket, and a machine that scores it has
neither the disk space nor twice the memory for it. No value outside a file's bounds is trusted, and a read takes only
the requested bytes. The format: 8 bytes with the length of the header, the header as JSON, the tensors.
"""

import json
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.model.files import Files
from holdfast.spec.errors import DataError, MissingError, shown

HEADER_BYTES = 100_000_000  # the format's limit
MOST_TENSORS = 1_000_000  # of one file
MOST_AXES = 64  # torch's limit
MOST_NUMBER = 2**63 - 1
SLAB_BYTES = 64 * 2**20  # of a tensor, read at a time by callers that can process rows
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Place(NamedTuple):
    """A tensor in a file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its bytes in the file


def read_header(files: Files, file: str) -> dict[str, Place]:
    """The tensors of a file. Raises MissingError, and DataError for an incomplete file."""
    size = files.size(file)
    if size is None:
        raise MissingError(f"{files.where}/{file}: no such file")
    try:
        if size < 8:
            raise ValueError(f"{size} bytes")
        head = bytearray(8)
        files.read_into(file, 0, memoryview(head))
        length = int.from_bytes(head, "little")
        if length > min(HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        text = bytearray(length)
        files.read_into(file, 8, memoryview(text))
        if text.count(b"[") + text.count(b"{") > 3 * MOST_TENSORS:  # two lists and an object each
            raise ValueError(f"a header of more than {MOST_TENSORS} tensors")
        header = json.loads(text)
        header.pop("__metadata__", None)
        places = {name: _place(file, name, entry, 8 + length, size) for name, entry in header.items()}
        _require_whole([entry["data_offsets"] for entry in header.values()], size - 8 - length)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{files.where}/{file}: not a whole safetensors file: {error}; download it again") from None
    return places


def _require_whole(ranges: list[list[int]], size: int) -> None:
    """Raises ValueError unless the ranges cover all bytes, each of them once, as the format requires. Otherwise a
    small file could describe a model of any size by using the same bytes for many tensors."""
    end = 0
    for first, last in sorted(ranges):
        if first != end:
            raise ValueError(f"its tensors overlap or leave a gap at byte {min(first, end)}")
        end = last
    if end != size:
        raise ValueError("its tensors do not end where it ends")


def _place(file: str, name: str, entry: dict[str, Any], base: int, size: int) -> Place:
    first, last = entry["data_offsets"]
    shape, dtype = entry["shape"], entry["dtype"]
    if not isinstance(shape, list) or not isinstance(dtype, str) or len(shape) > MOST_AXES:
        raise ValueError(f"{shown(name)}: a shape of more than {MOST_AXES} axes, or no shape")
    if not all(type(number) is int and 0 <= number <= MOST_NUMBER for number in (first, last, *shape)):
        raise ValueError(f"{shown(name)}: sizes that are no sizes")
    item = DTYPES[dtype].itemsize if dtype in DTYPES else None
    if first > last or base + last > size or (item is not None and last - first != item * math.prod(shape)):
        raise ValueError(f"{shown(name)}: bytes {first} to {last} are not {shown(dtype)} {shown(shape)} in this file")
    return Place(file, dtype, tuple(shape), base + first)


def read_part(files: Files, name: str, place: Place, part: tuple[slice, ...] = ()) -> Tensor:
    """A tensor, or a part of it, as fp32 on the CPU. If `part` begins with a range of rows, only those are read.
    Raises DataError for a data type that weights do not have."""
    dtype = DTYPES.get(place.dtype)
    if dtype is None:
        raise DataError(f"{files.where}/{place.file}: {name} is {place.dtype}; only {', '.join(DTYPES)} can be read")
    shape = place.shape
    first, last, _ = part[0].indices(shape[0]) if part and shape else (0, shape[0] if shape else 1, 1)
    row = math.prod(shape[1:]) * dtype.itemsize
    data = torch.empty((max(last - first, 0), *shape[1:]) if shape else (), dtype=dtype)
    if data.numel():
        target: np.ndarray = data.view(-1).view(torch.uint8).numpy()
        files.read_into(place.file, place.start + first * row, target.data)
    return data[(slice(None), *part[1:])].float() if len(part) > 1 else data.float()


class Source(NamedTuple):
    """Where some rows of a tensor are: rows of a tensor in a file, or experts along its first axis, each transposed.
    With `scales`, the file's tensor has numbers of 4 bits (MXFP4)."""

    place: Place
    shape: tuple[int, ...]
    experts: int = 0
    scales: Place | None = None


def read_rows(files: Files, name: str, source: Source, part: tuple[slice, ...] = ()) -> Tensor:
    """A tensor, or a part of it, as `read_part` returns it."""
    if source.scales is not None:
        return _read_mxfp4(files, source, source.scales, part)
    if not source.experts:
        return read_part(files, name, source.place, part)
    height = source.shape[0] // source.experts
    first, last, _ = part[0].indices(source.shape[0]) if part else (0, source.shape[0], 1)
    parts = [torch.empty(0, *source.shape[1:])]
    for expert in range(first // height, -(-last // height) if last > first else first // height):
        matrix = read_part(files, name, source.place, (slice(expert, expert + 1),))[0]
        rows = slice(max(first - expert * height, 0), min(last - expert * height, height))
        parts.append((matrix.T if matrix.dim() > 1 else matrix)[rows])
    whole = torch.cat(parts)
    return whole[(slice(None), *part[1:])] if len(part) > 1 else whole


# The 16 numbers of FP4 (E2M1); of two in a byte, the low half is the first.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
MXFP4_BLOCK = 32  # numbers with one scale, a power of two
_SCALE_BIAS = 127


def _read_mxfp4(files: Files, source: Source, scales: Place, part: tuple[slice, ...]) -> Tensor:
    """Rows in MXFP4 (OCP Microscaling Formats, version 1.0), as fp32. The conversion is exact."""
    first, last, _ = part[0].indices(source.shape[0]) if part else (0, source.shape[0], 1)
    count, columns = max(last - first, 0), source.shape[1]

    def read(place: Place, width: int) -> Tensor:
        data = torch.empty(count, width, dtype=torch.uint8)
        if data.numel():
            files.read_into(place.file, place.start + first * width, data.view(-1).numpy().data)
        return data

    halves = read(source.place, columns // 2)
    numbers = _FP4[torch.stack((halves & 15, halves >> 4), dim=-1).long()].view(count, -1, MXFP4_BLOCK)
    exponents = read(scales, columns // MXFP4_BLOCK).int() - _SCALE_BIAS
    whole = torch.ldexp(numbers, exponents[..., None]).view(count, columns)
    return whole[(slice(None), *part[1:])] if len(part) > 1 else whole
