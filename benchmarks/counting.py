"""A store that counts its requests and bytes, as a server would see them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from holdfast.store import Store
from holdfast.store.interface import ObjectInfo, Read


class CountingStore:
    """Passes operations on, and counts requests (a listing: one for each thousand keys) and bytes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.requests = self.read = self.written = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.requests += 1
            if name in ("put", "put_if_absent", "compare_and_swap"):
                data = arguments[1]
                self.written += sum(map(len, data)) if isinstance(data, list) else len(data)
            result = operation(*arguments, **options)
            if name in ("get", "get_versioned"):
                self.read += len(result if name == "get" else result[0])
            return result

        return counted if callable(operation) else operation

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See Store."""
        self.requests += 1
        self.read += target.nbytes
        self._store.read_into(key, start, target)

    def read_many(self, reads: Iterable[Read]) -> None:
        """See Store."""

        def counted() -> Iterator[Read]:
            for read in reads:
                self.requests += 1
                self.read += read.target.nbytes
                yield read

        self._store.read_many(counted())

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """See Store."""
        for number, info in enumerate(self._store.list(prefix, after)):
            self.requests += number % 1000 == 999
            self.read += len(info.key)
            yield info
        self.requests += 1
