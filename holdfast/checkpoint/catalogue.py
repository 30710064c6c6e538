"""The catalogue: the tensors of a state by name, with their global shapes and dtypes, for any distribution over ranks.

A writer's index has the tensors of its boxes, a node those of its children, the root all. When two catalogues disagree
about a name, nothing is committed.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.box import DTYPES, TensorBox
from holdfast.checkpoint.fingerprint import StateDigest, coordinate_keys, tensor_keys
from holdfast.spec.errors import DataError

MAX_DIMENSIONS = 16
MAX_ELEMENTS = 1 << 56


@dataclass(frozen=True)
class TensorInfo:
    """A global tensor."""

    shape: tuple[int, ...]
    dtype: Literal["float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8"]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize


Catalogue = Mapping[str, TensorInfo]  # in the order of the names
# The boxes to fill: known in advance, or a function of the catalogue of each checkpoint that is tried (None: no
# checkpoint). The function makes no collective call.
BoxSource = Sequence[TensorBox] | Callable[[Catalogue | None], Sequence[TensorBox]]


def boxes_for(source: BoxSource, catalogue: Catalogue | None) -> Sequence[TensorBox]:
    """The boxes to fill from a checkpoint with this catalogue."""
    return source(catalogue) if callable(source) else source


def merged(catalogues: Iterable[Catalogue], source: str) -> Catalogue:
    """All tensors of several catalogues. Raises DataError, naming `source`, for a name that two disagree on."""
    tensors: dict[str, TensorInfo] = {}
    distinct = {id(catalogue): catalogue for catalogue in catalogues}  # writers of the same tensors share one, parsed
    for catalogue in distinct.values():
        for name, info in catalogue.items():
            if tensors.setdefault(name, info) != info:
                raise DataError(
                    f"{source}: one writer holds {name} as {info.dtype} {list(info.shape)}, another as "
                    f"{tensors[name].dtype} {list(tensors[name].shape)}"
                )
    return dict(sorted(tensors.items()))


def catalogue_bytes(catalogue: Catalogue) -> bytes:
    """A catalogue as it is stored in an index."""
    rows = {name: [list(info.shape), info.dtype] for name, info in catalogue.items()}
    return json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()


@lru_cache(maxsize=64)
def catalogue_from_bytes(data: bytes) -> Catalogue:
    """The catalogue that `catalogue_bytes` wrote. Raises ValueError."""
    rows = json.loads(data)
    if not isinstance(rows, dict) or list(rows) != sorted(rows):
        raise ValueError("the catalogue is not in the order of its names")
    catalogue = {}
    for name, row in rows.items():
        shape, dtype = row
        if dtype not in DTYPES:
            raise ValueError(f"{name} has the unknown dtype {dtype!r}")
        require_shape(name, shape)
        catalogue[name] = TensorInfo(tuple(shape), dtype)
    return catalogue


def require_shape(name: str, shape: Iterable[object]) -> None:
    """Raises ValueError for an invalid shape."""
    sizes = list(shape)
    if len(sizes) > MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{name} has the shape {sizes!r}")
    if prod(max(1, size) for size in sizes if isinstance(size, int)) > MAX_ELEMENTS:
        raise ValueError(f"{name} has too many elements: {sizes!r}")


# The coverage: a sum that proves that the parts of many writers make up every tensor exactly once.
#
# Two independent sums modulo 2^64 run over the *positions* of elements, with the keys of the state digest. A position
# adds the product of the keys of its tensor and of its coordinates. So the coverage is the state digest of a state of
# zero bits. Sums of parts add up in any order. When they equal those of the whole catalogue, no element is missing and
# none occurs twice, except by a chance of about 2^-100. A box is a product of ranges, so its sum is a product of
# differences of prefix sums. Nothing grows with the number of elements, and no two parts are ever compared.

_MASK = (1 << 64) - 1
_TABLE = 1 << 17  # prefix sums kept for each dimension: 2 MiB
_CHUNK = 1 << 20  # coordinates summed together beyond them


def coverage_of(name: str, info: TensorInfo, offset: tuple[int, ...], shape: tuple[int, ...]) -> StateDigest:
    """The coverage of one box of a tensor."""
    if 0 in shape:
        return StateDigest()
    sums = list(tensor_keys(name, info.dtype, info.shape))
    for dimension, (low, size) in enumerate(zip(offset, shape, strict=True)):
        range_sums = _range_sums(dimension, low, low + size)
        sums = [total * part & _MASK for total, part in zip(sums, range_sums, strict=True)]
    return StateDigest(*sums)


def whole_coverage(catalogue: Catalogue) -> StateDigest:
    """The sum that the parts of all writers must reach."""
    parts = (coverage_of(name, info, (0,) * len(info.shape), info.shape) for name, info in catalogue.items())
    return sum(parts, StateDigest())


@lru_cache(maxsize=1 << 14)
def _range_sums(dimension: int, low: int, high: int) -> tuple[int, int]:
    """The sums of the keys of the coordinates [low, high)."""
    if high <= _TABLE:
        table = _prefix_sums(dimension)
        return tuple(int(table[stream, high]) - int(table[stream, low]) & _MASK for stream in (0, 1))  # type: ignore[return-value]
    first = second = 0
    for start in range(low, high, _CHUNK):
        keys = _keys(dimension, start, min(_CHUNK, high - start))
        first += int(keys[0].sum(dtype=np.uint64))
        second += int(keys[1].sum(dtype=np.uint64))
    return first & _MASK, second & _MASK


@lru_cache(maxsize=16)
def _prefix_sums(dimension: int) -> NDArray[np.uint64]:
    sums = np.zeros((2, _TABLE + 1), dtype=np.uint64)
    np.cumsum(_keys(dimension, 0, _TABLE), axis=1, out=sums[:, 1:])
    return sums


def _keys(dimension: int, start: int, count: int) -> NDArray[np.uint64]:
    keys: NDArray[np.uint64] = coordinate_keys(dimension, start, count).numpy().view(np.uint64)
    return keys
