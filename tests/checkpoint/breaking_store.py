"""A real store whose process dies, or whose operation fails, at a chosen operation."""

from collections.abc import Callable, Iterable
from typing import Any

from holdfast.spec.errors import StoreUnreachableError
from holdfast.store import Store
from holdfast.store.interface import Read


class Killed(BaseException):
    """The process that uses the store is dead. Handlers of ordinary errors do not catch this."""


class BreakingStore:
    """A store that passes operations on. Operation number `at` (from 0) fails. With `kill`, all later operations fail
    too. `before(operation, key)` is called before each operation.
    """

    def __init__(
        self, store: Store, at: int | None = None, *, kill: bool, before: Callable[[str, str], None] | None = None
    ) -> None:
        self._store, self._at, self._kill, self._before = store, at, kill, before
        self.operations = 0

    @property
    def url(self) -> str:
        return self._store.url

    def read_many(self, reads: Iterable[Read]) -> None:
        """Read one object at a time, so that each read is an operation."""
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
