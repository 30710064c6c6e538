"""The catalogue: the tensors of a state by name, with their global shapes and dtypes, for any distribution over ranks.

A writer's index has the tensors of its boxes, a node those of its children, the root all. When two catalogues disagree
about a name, nothing is committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from holdfast.checkpoint.box import DTYPES
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


def merged(catalogues: Iterable[Catalogue], source: str) -> Catalogue:
    """All tensors of several catalogues. Raises DataError, naming `source`, for a name that two disagree on."""
    found: dict[str, TensorInfo] = {}
    distinct = {id(catalogue): catalogue for catalogue in catalogues}  # writers of the same tensors share one, parsed
    for catalogue in distinct.values():
        for name, info in catalogue.items():
            if found.setdefault(name, info) != info:
                raise DataError(
                    f"{source}: one writer holds {name} as {info.dtype} {list(info.shape)}, another as "
                    f"{found[name].dtype} {list(found[name].shape)}"
                )
    return dict(sorted(found.items()))


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
    found = {}
    for name, row in rows.items():
        shape, dtype = row
        if dtype not in DTYPES:
            raise ValueError(f"{name} has the unknown dtype {dtype!r}")
        require_shape(name, shape)
        found[name] = TensorInfo(tuple(shape), dtype)
    return found


def require_shape(name: str, shape: Iterable[object]) -> None:
    """Raises ValueError for an invalid shape."""
    sizes = list(shape)
    if len(sizes) > MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{name} has the shape {sizes!r}")
    if prod(max(1, size) for size in sizes if isinstance(size, int)) > MAX_ELEMENTS:
        raise ValueError(f"{name} has too many elements: {sizes!r}")
