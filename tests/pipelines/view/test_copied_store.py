"""Of several verdicts or registrations of a run, the newest one counts also after a copy of the store without times."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.components.compare.step import row_of
from holdfast.components.notify.summary import found_of
from holdfast.pipelines.backends.explain import verdict_reasons
from holdfast.pipelines.cli import app
from holdfast.pipelines.view.run_record import read_run
from holdfast.scoring import settings_key
from holdfast.spec import parse_spec, run_id
from holdfast.store import Store, layout, open_store

SPEC = parse_spec("{name: copied, data: {sources: [{uri: x}]}}")
RUN_ID = run_id(SPEC, "d")
SETTINGS = settings_key(SPEC)


def put(store: Store, key: str, record: dict[str, Any], modified: float) -> None:
    """Write a record whose file has this time."""
    store.put(key, json.dumps(record).encode())
    os.utime(Path(store.url.removeprefix("file://")) / key, (modified, modified))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with two verdicts and two registrations, whose files have their times the wrong way round."""
    store = open_store(f"file://{tmp_path}")
    run = {"spec": SPEC.model_dump(mode="json"), "dataset_id": "d"}
    put(store, layout.run(RUN_ID, "run.json"), run, 1.0)
    put(store, layout.result(RUN_ID), {"step": 10, "loss": 1.5, "state_digest": "0" * 32}, 1.0)
    settings = SPEC.evaluation.model_dump(mode="json")
    for champion, number, word, modified in (("v7", 1, "not_blessed", 2e9), ("none", 2, "blessed", 1e9)):
        metrics = {"loss": float(number), "perplexity": 2.0}
        verdict = {"number": number, "word": word, "reasons": [word], "metrics": metrics, "settings": settings}
        put(store, layout.verdict(RUN_ID, f"{SETTINGS}-{champion}"), verdict, modified)
    for key, version, modified in (("z", 1, 2e9), ("a", 2, 1e9)):
        registration = {"model": SPEC.registered_model, "version": version, "created": 100.0 * version}
        put(store, layout.registration(RUN_ID, key), registration, modified)
    return store


def test_a_run_whose_newest_verdict_is_damaged_is_not_taken_for_a_judged_one(store: Store) -> None:
    whole = read_run(store, RUN_ID, SETTINGS)
    store.put(layout.verdict(RUN_ID, f"{SETTINGS}-none"), b"{")
    damaged = read_run(store, RUN_ID, SETTINGS)
    assert whole is not None and not whole.has_damaged_verdict
    assert damaged is not None and damaged.has_damaged_verdict


def test_show_and_runs_read_the_newest_verdict_and_registration(store: Store) -> None:
    record = read_run(store, RUN_ID)
    assert record is not None
    assert (record.word, record.verdict_key) == ("blessed", f"{SETTINGS}-none")
    assert record.model_version == f"{SPEC.registered_model}/2"
    shown, listed = (
        json.loads(CliRunner().invoke(app, [*command, "--store", store.url, "--json"]).stdout)
        for command in (["show", RUN_ID], ["runs"])
    )
    assert (shown["verdict"]["word"], listed[0]["verdict"]) == ("blessed", "blessed")
    assert shown["version"] == listed[0]["version"] == record.model_version


def test_the_summary_the_comparison_and_the_reason_of_a_skip_read_the_newest_verdict(store: Store) -> None:
    unknown: list[str] = []
    for spec in (None, SPEC):
        _, verdict, registration = found_of(store, RUN_ID, spec, unknown)
        assert (verdict["word"], registration["version"], unknown) == ("blessed", 2, [])
    row = row_of((), SPEC, RUN_ID, store)
    assert row is not None
    assert (row.word, row.loss) == ("blessed", 2.0)
    assert verdict_reasons(store, RUN_ID) == ["blessed"]


@pytest.mark.parametrize("modified", [(1e9, 2e9), (2e9, 1e9)])
def test_verdicts_without_a_number_count_as_older_and_are_in_order_of_their_keys(
    store: Store, modified: tuple[float, float]
) -> None:
    for key, time in zip((f"{SETTINGS}-a", f"{SETTINGS}-z"), modified, strict=True):
        put(store, layout.verdict(RUN_ID, key), {"word": "not_blessed"}, time)
    record = read_run(store, RUN_ID)
    assert record is not None
    assert record.verdict_key == f"{SETTINGS}-none"
    for champion in ("v7", "none"):
        store.delete(layout.verdict(RUN_ID, f"{SETTINGS}-{champion}"))
    record = read_run(store, RUN_ID)
    assert record is not None
    assert record.verdict_key == f"{SETTINGS}-z"
