"""Reading pickles of strangers: only of types that are named, each of which does nothing but hold values."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.components.spec.errors import DataError

MAX_PICKLE_BYTES = 1 << 30


class _Restricted(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (found := self._allowed.get((module, name))) is not None:
            return found
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which is not on the list of harmless types")


def unpickled(data: bytes, source: str, allowed: Mapping[tuple[str, str], Any]) -> Any:
    """What a pickle holds, made of built-in values, torch's dtypes and the `allowed` types by (module, name). Raises
    DataError, naming `source`, for anything else; nothing of it was called then but those types."""
    if len(data) > MAX_PICKLE_BYTES:
        raise DataError(f"{source}: {len(data)} bytes is too large")
    try:
        return _Restricted(data, allowed).load()
    except Exception as error:  # noqa: BLE001 - a hostile pickle raises whatever it likes
        raise DataError(f"{source}: cannot be read safely: {error}") from None
