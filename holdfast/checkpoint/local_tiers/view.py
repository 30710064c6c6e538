"""A near step as a checkpoint's reader sees it: a store whose objects lie on several nodes.

Which node has an object follows from the writer whose it is; which writer a pack belongs to, from the index that names
it, and a reader has always read that one first.
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
    """Where one writer's part is read from: a store, or as much of one as a reader needs."""

    def get(self, key: str) -> bytes:
        """A whole object."""

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """A part of one."""


class TierView:
    """Reads the objects of one near step. No more of `Store` than that needs."""

    def __init__(
        self, url: str, run_id: str, indexes: Mapping[str, Sequence[Source]], nodes: Mapping[str, bytes]
    ) -> None:
        """`url` names it in messages; `indexes` has by its key where each index lies, the nearest place first; `nodes`
        what stands above them."""
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
        """See Store: of a pack. A reader calls it where what `read_many` brought is wrong: so the next place first."""
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
