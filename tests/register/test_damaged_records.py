"""Records that another writer damaged are reported with their place. No other error is raised."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.components.register.registration import _read
from holdfast.corpus.chat import read_settings
from holdfast.spec.errors import DataError
from holdfast.store import open_store
from holdfast.tracking.artifacts import whole_text

DEEP = b"[" * 200_000


@pytest.mark.parametrize("damage", [b"{", DEEP, b"[]", b"\xff"])
def test_a_damaged_record_is_reported(damage: bytes, tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    store.put("a.json", damage)
    with pytest.raises(DataError, match=r"a\.json: is damaged"):
        _read(store, "a.json", "register it again")


@pytest.mark.parametrize("damage", [b"{", DEEP])
def test_a_damaged_configuration_of_a_tokenizer_is_reported(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(damage)
    with pytest.raises(DataError, match=r"tokenizer_config\.json: is damaged .*; bring another one"):
        read_settings(str(tmp_path / "tokenizer_config.json"), "data.tokenizer.path")


@pytest.mark.parametrize("rest", ["", "1}", "[" * 100_000])
def test_a_tampered_mlflow_tag_is_a_data_error(rest: str) -> None:
    with pytest.raises(DataError, match="a tag of MLflow"):
        whole_text(cast(Any, SimpleNamespace()), '{"artifact":' + rest)
