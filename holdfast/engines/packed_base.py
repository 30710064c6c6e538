"""Packed base: the NF4 matrices of frozen weights, quantized once and kept in the store.

An object has one matrix. Its key names the digest of the weights and the matrix, which determine every byte. The object
begins with the digest of its content. A start reads it in place of the weights, which have up to seven times as many
bytes. A missing or damaged object is quantized again, to the same bytes.
"""

import logging

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from holdfast.model import nf4
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout

log = logging.getLogger("holdfast.train")
DIGEST_BYTES = 32
Packed = tuple[Tensor, Tensor]  # codes and scales, as in `nf4.quantise`


class PackedBase:
    """The packed matrices of the weights with the digest `weights`."""

    def __init__(self, store: Store, weights: str, copy: int = 0, copies: int = 1) -> None:
        """Of the `copies` ranks that hold the same matrices, this one writes every `copies`-th that is missing."""
        self._store, self._weights, self._copy, self._copies, self._count = store, weights, copy, copies, 0

    def read(self, name: str, shape: tuple[int, int]) -> Packed | None:
        """A matrix of this shape. None if it is missing or damaged."""
        rows, columns = shape
        codes, scales = rows * columns // 2, 4 * rows * columns // nf4.BLOCK
        key = layout.packed_base(self._weights, name)
        try:
            found = self._store.get(key, most=DIGEST_BYTES + codes + scales + 1)
        except MissingError:
            return None
        content = memoryview(found)[DIGEST_BYTES:]
        if len(content) != codes + scales or blake3(content).digest() != found[:DIGEST_BYTES]:
            log.warning("%s/%s is damaged; the matrix is quantized again", self._store.url, key)
            return None
        packed = torch.from_numpy(np.frombuffer(content, np.uint8, codes).copy()).view(rows, columns // 2)
        scale = torch.from_numpy(np.frombuffer(content, np.float32, offset=codes).copy())
        return packed, scale.view(rows, columns // nf4.BLOCK)

    def keep(self, name: str, packed: Packed) -> None:
        """Write a matrix that `read` did not find, if it is this rank's turn."""
        self._count += 1
        if self._count % self._copies == self._copy:
            content = b"".join(part.contiguous().numpy().tobytes() for part in packed)
            self._store.put(layout.packed_base(self._weights, name), blake3(content).digest() + content)
