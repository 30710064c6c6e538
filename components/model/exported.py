"""The exported model of a run, fetched from its store. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from holdfast.components.spec.errors import MissingError
from holdfast.components.store import Store, local_folder


def fetch_exported(store: Store, export: str, copies: Path) -> Path:
    """The folder of the exported model under the key prefix `export`: where it lies, or a copy of it in `copies`.
    Raises MissingError."""
    folder = local_folder(store, export, copies)
    if folder is None or not (folder / "config.json").is_file():
        raise MissingError(
            f"{store.url}/{export}: there is no exported model there; run the spec again, train writes it anew"
        )
    return folder
