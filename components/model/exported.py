"""The exported model of a run, fetched from its store. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from holdfast.components.spec.errors import MissingError
from holdfast.components.store import Store, local_folder


class ExportedFiles:
    """The files of the exported model under the key prefix `export`, read from the store by ranges: no copy of them is
    made. What `hugging_face` calls `Files`."""

    def __init__(self, store: Store, export: str) -> None:
        """Raises MissingError when there is no exported model."""
        require_exported(store, export)
        self._store, self._prefix = store, f"{export.rstrip('/')}/"

    @property
    def where(self) -> str:
        """The folder in the store."""
        return f"{self._store.url}/{self._prefix}".rstrip("/")

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none."""
        found = self._store.stat(self._prefix + name)
        return None if found is None else found.size

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill `target` from `start`. Raises DataError or MissingError."""
        self._store.read_into(self._prefix + name, start, target)


def fetch_exported(store: Store, export: str, copies: Path) -> Path:
    """The folder of the exported model under the key prefix `export`: where it lies, or a copy of it in `copies`.
    Raises MissingError."""
    require_exported(store, export)
    folder = local_folder(store, export, copies)
    assert folder is not None
    return folder


def require_exported(store: Store, export: str) -> None:
    """Raises MissingError when there is no exported model under the key prefix `export`."""
    if store.stat(f"{export.rstrip('/')}/config.json") is None:
        raise MissingError(
            f"{store.url}/{export}: there is no exported model there; run the spec again, train writes it anew"
        )
