"""What `holdfast run` may answer from the store alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.components.scoring import settings_key
from holdfast.components.spec import parse_spec
from holdfast.components.store import layout
from holdfast.components.tracking import registration_key
from holdfast.pipelines.backends.local.run import LocalRun, finished
from tests.exports import write_export

RUN_ID = "fedcba9876543210"


@pytest.mark.parametrize("given", ["", "sqlite:///{}", "sqlite:///{}?timeout=5"])
def test_a_registration_counts_only_while_its_mlflow_is_there(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "mlflow.db"
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given.format(database))
    spec = parse_spec("name: story\ndata:\n  sources:\n    - uri: corpus/*.txt\n")
    wanted = LocalRun(spec, (tmp_path / "store").as_uri(), "0123456789abcdef", RUN_ID, "")
    (tmp_path / "config.json").write_text("{}")
    export, digest = write_export(wanted.store, RUN_ID, 3, "state", tmp_path, ["config.json"])
    blessed_as = {"model": "story", "version": 1, "alias": "champion"}
    for key, value in (
        (layout.result(RUN_ID), {"step": 3, "export": export, "export_digest": digest}),
        (layout.verdict(RUN_ID, f"{settings_key(spec)}-none"), {"word": "blessed"}),
        (layout.registration(RUN_ID, registration_key(spec.registered_model)), blessed_as),
    ):
        wanted.store.put(key, json.dumps(value).encode())
    assert finished(wanted) is None
    database.touch()
    record = finished(wanted)
    assert record is not None
    assert record.model_version == "story/1"
    database.unlink()
    wanted.store.put(layout.verdict(RUN_ID, f"{settings_key(spec)}-none"), b'{"word": "not_blessed"}')
    assert finished(wanted) is not None
