"""Lossless compression of tensor bytes: their numbers, alone or as differences from an earlier save.

Trained state is nearly random in its low bits and smooth in its exponents. pcodec (bins and tANS over numbers) comes
within a percent of the entropy of such bytes. Byte planes under zstd, which were measured as well, stay 0.5 to 1.5
points behind. A Huffman code spends a whole bit where an exponent holds a tenth of one. Figures: docs/benchmarks.md.

Differences are taken of the bits as integers, with wraparound, so that nothing is lost. The base may be scaled first. A
second moment decays by a factor at every step and grows by squares, so the differences from a decayed base all have one
sign.
"""

import struct
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from holdfast.spec.errors import DataError

MIN_GAIN = 0.01  # minimum saving, as a share of the raw bytes; below it they are stored raw
LEVEL = 8  # of 12: level 4 leaves 2 points more bytes and is 1.5 times as fast; above 8 nothing is gained here

# The types in which pcodec sees the elements: it orders floats by value. It has no bfloat16; the raw bits do as well.
_NUMBERS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
}

_SCALE = struct.Struct("<f")

Buffer = bytes | bytearray | memoryview


class Codec(IntEnum):
    """How the bytes of a piece are stored."""

    RAW = 0
    NUMBERS = 1
    DIFFERENCES = 2  # differences from the bytes of a base, which is stored without one
    TILED = 3  # raw, but not row after row: see `tiles`


class Choice(NamedTuple):
    """The codec of a tensor's bytes, and the scale of its base."""

    codec: Codec
    scale: float = 1.0


def encode(data: Buffer, dtype: str, base: Buffer | None = None, scale: float = 1.0) -> bytes:
    """`data`, elements of `dtype` as a manifest names it, compressed. With `base`, of the same length, it holds the
    differences from `base` times `scale`. Raises KeyError for a dtype that cannot be compressed (see `choose`)."""
    from pcodec import standalone

    numbers = np.frombuffer(data, _NUMBERS[dtype])
    if base is None:
        return bytes(standalone.simple_compress(numbers, _settings()))
    differences = _bits(numbers) - _expected(base, dtype, scale)
    signed = differences.view(f"i{differences.itemsize}")
    return _SCALE.pack(scale) + bytes(standalone.simple_compress(signed, _settings()))


def decode_into(stored: Buffer, codec: Codec, dtype: str, target: memoryview, base: Buffer | None = None) -> None:
    """Fill `target` with the decoded bytes. Raises DataError for input that is not valid encoded data. Only the digest
    of the piece proves that it is the *expected* data."""
    if codec == Codec.RAW:
        if len(stored) != len(target):
            raise DataError(f"{len(stored)} bytes are stored for {len(target)}")
        target[:] = stored
        return
    from pcodec import standalone

    if dtype not in _NUMBERS or (codec == Codec.DIFFERENCES) != (base is not None):
        raise DataError(f"{dtype} cannot be stored as {codec!r} {'with' if base is not None else 'without'} a base")
    numbers = np.frombuffer(target, _NUMBERS[dtype])
    bits = _bits(numbers)
    target_numbers, scale = numbers, 1.0
    if base is not None:
        if len(stored) < _SCALE.size:
            raise DataError("the compressed bytes are damaged: they end before they begin")
        target_numbers, (scale,) = bits.view(f"i{bits.itemsize}"), _SCALE.unpack_from(stored)
        stored = memoryview(stored)[_SCALE.size :]
    try:
        progress = standalone.simple_decompress_into(bytes(stored), target_numbers)
    except RuntimeError as error:
        raise DataError(f"the compressed bytes are damaged: {error}") from None
    if progress.n_processed != len(target_numbers) or not progress.finished:
        raise DataError(f"the compressed bytes hold other than {len(target_numbers)} numbers")
    if base is not None:
        np.add(bits, _expected(base, dtype, scale), out=bits)


def choose(sample: Buffer, dtype: str, base: Buffer | None = None) -> Choice:
    """The choice that saves space for bytes like `sample`, by measurement. Differences must save MIN_GAIN beyond the
    numbers alone, and numbers must save as much against raw bytes."""
    if dtype not in _NUMBERS or not len(sample):
        return Choice(Codec.RAW)
    alone = len(encode(sample, dtype)) / len(sample)
    if base is not None:
        sizes = {scale: len(encode(sample, dtype, base, scale)) for scale in (1.0, _decay(sample, dtype, base))}
        scale = min(sizes, key=lambda each: sizes[each])
        if sizes[scale] / len(sample) <= min(1.0, alone) - MIN_GAIN:
            return Choice(Codec.DIFFERENCES, scale)
    return Choice(Codec.NUMBERS if alone <= 1 - MIN_GAIN else Codec.RAW)


def _decay(data: Buffer, dtype: str, base: Buffer) -> float:
    """The factor by which most elements have shrunk at most: a number that fp32 holds exactly; 1 if there is none."""
    if _NUMBERS[dtype].kind != "f":
        return 1.0
    now, before = (np.frombuffer(buffer, _NUMBERS[dtype]).astype(np.float64) for buffer in (data, base))
    usable = np.isfinite(now) & np.isfinite(before) & (before != 0)
    if not usable.any():
        return 1.0
    factor = float(np.float32(np.percentile(now[usable] / before[usable], 1)))
    return factor if 0.0 < factor < 1.0 else 1.0


def _expected(base: Buffer, dtype: str, scale: float) -> np.ndarray:
    """The bits of the expected elements."""
    numbers = np.frombuffer(base, _NUMBERS[dtype])
    if scale == 1.0:
        return _bits(numbers)
    if numbers.dtype.kind != "f":
        raise DataError(f"{dtype} has no scaled base")
    with np.errstate(all="ignore"):
        return _bits(numbers * numbers.dtype.type(scale))


def _bits(numbers: np.ndarray) -> np.ndarray:
    return numbers.view(f"u{numbers.itemsize}")


@cache
def _settings() -> Any:
    from pcodec import ChunkConfig, DeltaSpec, ModeSpec

    return ChunkConfig(compression_level=LEVEL, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
