"""Segments: where documents lie in the rows of a batch."""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Segments:
    """Where documents lie in the rows of a batch, laid end to end.

    Segment n has the queries [queries[n], queries[n + 1]) of the B x T queries and the keys [keys[n], keys[n + 1]) of
    the B x S keys. The queries are the last positions of the keys (context parallelism has more keys than queries).
    Segments do not change, but for the mask of compiled layers, which follows from them. They are no dataclass, because
    FSDP2 would copy one at every layer.
    """

    def __init__(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
        self.queries, self.keys = queries, keys
        self.row: int | None = None  # the length of each, where they are known to be whole rows
        self.row_mask: Any = None  # of compiled layers (see `rows`)
        lengths = [(q, k) for _, q, _, k in self.each()] if len(queries) == len(keys) else []
        fit = len(queries) == len(keys) and all(0 <= q <= k for q, k in lengths)
        if not fit or queries[:1] != (0,) or keys[:1] != (0,):
            raise ValueError(
                f"segments with the bounds {queries} of queries and {keys} of keys; "
                "begin both at 0, and give each segment at least as many keys as queries"
            )
        self.bounds = torch.tensor([queries, keys])  # both, on the CPU, for a compiled layer
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.maybe_mark_dynamic(self.bounds, 1)  # one compiled layer for any number of documents
        self._on_device: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)

    @property
    def _values(self) -> tuple[object, ...]:
        return self.queries, self.keys, self.row

    def __repr__(self) -> str:
        return f"Segments({self.queries}, {self.keys})"

    @classmethod
    def of_rows(cls, rows: int, length: int, chunk: int | None = None) -> Segments:
        """Each row is one document, cut into chunks of `chunk` positions if given."""
        starts = [row * length + at for row in range(rows) for at in range(0, length, chunk or length)]
        bounds = (*starts, rows * length)
        segments = cls(bounds, bounds)
        segments.row = length if chunk is None else None
        return segments

    @classmethod
    def of_documents(cls, document_BT: Tensor, chunk: int | None = None) -> Segments:
        """From the document number of each token, on the CPU (see `decoder.document_ids`). Chunks count from the
        beginning of a document."""
        starts_BT = torch.ones_like(document_BT, dtype=torch.bool)
        starts_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
        edges = [*starts_BT.flatten().nonzero()[:, 0].tolist(), document_BT.numel()]
        cut = [at for start, end in itertools.pairwise(edges) for at in range(start, end, chunk or end)]
        bounds = (*cut, document_BT.numel())
        return cls(bounds, bounds)

    def documents(self, rows: int) -> Tensor:
        """The number of each query's segment: [rows, T], on the CPU. The opposite of `of_documents`."""
        lengths = self.bounds[0].diff()
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths).view(rows, -1)

    def each(self) -> Iterator[tuple[int, int, int, int]]:
        """First query, number of queries, first key and number of keys of each segment."""
        for index in range(len(self.queries) - 1):
            q, k = self.queries[index], self.keys[index]
            yield q, self.queries[index + 1] - q, k, self.keys[index + 1] - k

    def on(self, device: torch.device, slots: int) -> tuple[Tensor, Tensor]:
        """The bounds of queries and of keys as int32 on a device, with empty segments up to `slots`."""
        if (device, slots) not in self._on_device:
            missing = max(0, slots + 1 - len(self.queries))
            padded = [(*bounds, *(bounds[-1:] * missing)) for bounds in (self.queries, self.keys)]
            first, second = torch.tensor(padded, dtype=torch.int32).to(device).unbind()
            self._on_device[device, slots] = first, second
        return self._on_device[device, slots]
