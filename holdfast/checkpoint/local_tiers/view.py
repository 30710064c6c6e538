"""A local-tier step as a store for the checkpoint reader: its objects lie on several nodes.

The writer of an object determines its node. The index that names a pack determines the pack's writer, and a reader
always reads the index first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from holdfast.checkpoint.index import Index
from holdfast.spec.errors import HoldfastError, MissingError
from holdfast.store import Read, layout
from holdfast.store.interface import WHOLE_BYTES
from holdfast.store.parallel import read_many


class Source(Protocol):
    """The source of one writer's part: a store, or the subset of its methods that a reader needs."""

    def get(self, key: str) -> bytes:
        """A whole object."""

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """A part of one."""


class TierView:
    """Reads the objects of one local-tier step. Has only the methods of `Store` that this needs."""

    def __init__(
        self, url: str, run_id: str, indexes: Mapping[str, Sequence[Source]], nodes: Mapping[str, bytes]
    ) -> None:
        """`url` names it in messages. `indexes` maps the key of each index to its sources, the nearest first. `nodes`
        has the nodes above them."""
        self.url, self._run_id, self._indexes, self._nodes = url, run_id, indexes, nodes
        self._packs: dict[str, Sequence[Source]] = {}

    def get(self, key: str, *, most: int = WHOLE_BYTES) -> bytes:  # noqa: ARG002 - each source has its own bound
        """See Store: an index, or a node above."""
        if key in self._nodes:
            return self._nodes[key]
        sources = self._indexes.get(key, ())
        failure: HoldfastError = MissingError(f"{key}: is no part of {self.url} that this node can reach")
        for source in sources:
            try:
                data = source.get(key)
                for name in Index.from_bytes(data, key).pack_names:
                    self._packs[layout.pack(self._run_id, str(name))] = sources
            except HoldfastError as error:
                failure = error
            else:
                return data
        raise failure

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See Store; for a pack. A reader calls it after damage in the result of `read_many`, so the next source is
        tried first."""
        sources = self._packs.get(key, ())
        self._read([*sources[1:], *sources[:1]], key, start, target)

    def read_many(self, reads: Iterable[Read]) -> None:
        """See Store."""
        read_many(lambda key, start, target: self._read(self._packs.get(key, ()), key, start, target), reads)

    def _read(self, sources: Sequence[Source], key: str, start: int, target: memoryview) -> None:
        failure: HoldfastError = MissingError(f"{key}: is no part of {self.url} that this node can reach")
        for source in sources:
            try:
                source.read_into(key, start, target)
            except HoldfastError as error:
                failure = error
            else:
                return
        raise failure
