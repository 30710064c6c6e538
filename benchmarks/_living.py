"""The bytes of tensors that live during a computation, counted by torch's storages."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Living(TorchDispatchMode):
    """Counts the result of every operation under it until it is freed. Works on the meta device as well."""

    def __init__(self, known: list[torch.Tensor] | None = None) -> None:
        """`known` are tensors that exist already; they count too."""
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._total = self.peak = 0  # bytes
        for tensor in known or []:
            self._note(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        if self._total > self.peak:  # includes what was freed since the last count
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes that live now."""
        self._live = {key: reference for key, reference in self._live.items() if not reference[0].expired()}
        self._total = sum(size for _, size in self._live.values())
        return self._total

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        _, before = self._live.get(storage._cdata, (None, 0))
        self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._total += storage.nbytes() - before
