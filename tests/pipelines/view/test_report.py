"""The page of one run in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.components.store import layout, open_store
from holdfast.pipelines.view.catalog import find_run
from holdfast.pipelines.view.report import print_run
from tests.spec.plans import two_segments

RUN_ID = "fedcba9876543210"


@pytest.mark.parametrize("key", [layout.result(RUN_ID), layout.checkpoint(RUN_ID, 30)])
def test_a_run_shows_the_plans_that_it_was_computed_under_finished_or_not(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    store = open_store((tmp_path / "store").as_uri())
    store.put(key, json.dumps({"step": 30, "segments": two_segments()}).encode())
    print_run(find_run(store, RUN_ID), store)
    shown = capsys.readouterr().out
    assert "from step 0: ddp, 1 process on 1 node, cpu, torch 2.13.0" in shown
    assert "from step 30: parallel.strategy: ddp before, fsdp now" in shown
