"""The copy of an exported model on this machine is the one that the store has."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.store import layout, open_store
from pipelines.models import fetch

EXPORT = layout.export("fedcba9876543210", 3)


def test_a_cached_export_is_that_of_its_store_and_whole(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    stores = [open_store(s3_url), open_store(f"{s3_url}/another")]
    for number, store in enumerate(stores):
        store.put(f"{EXPORT}config.json", f"config {number}".encode())
    folders = [fetch(store, EXPORT) for store in stores]
    assert [(folder / "config.json").read_text() for folder in folders] == ["config 0", "config 1"]
    for folder in folders:
        (folder / "config.json").write_text("conf")  # torn
    assert [(fetch(store, EXPORT) / "config.json").read_text() for store in stores] == ["config 0", "config 1"]
