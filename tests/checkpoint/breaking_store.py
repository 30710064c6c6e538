"""A real store whose user dies, or is refused, at a chosen operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from holdfast.spec.errors import StoreUnreachableError
from holdfast.store import Store
from holdfast.store.interface import Read


class Killed(BaseException):
    """The process that used the store is dead: no handler for ordinary failures sees this."""


class BreakingStore:
    """Passes operations on. Operation number `at` (from 0) fails, and with `kill` so does everything after it;
    `before(operation, key)` is called ahead of each."""

    def __init__(
        self, store: Store, at: int | None = None, *, kill: bool, before: Callable[[str, str], None] | None = None
    ) -> None:
        self._store, self._at, self._kill, self._before = store, at, kill, before
        self.operations = 0

    @property
    def url(self) -> str:
        return self._store.url

    def read_many(self, reads: Iterable[Read]) -> None:
        """One after another, so that each is an operation."""
        for read in reads:
            self.read_into(read.key, read.start, read.target)
            read.use()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def counted(key: str, *arguments: Any, **options: Any) -> Any:
            number, self.operations = self.operations, self.operations + 1
            if self._at is not None and self._kill and number >= self._at:
                raise Killed
            if number == self._at:
                raise StoreUnreachableError(f"{name} {key}: unreachable")
            if self._before is not None:
                self._before(name, key)
            return operation(key, *arguments, **options)

        return counted
