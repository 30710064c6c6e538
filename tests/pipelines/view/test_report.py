"""The page of one run in the terminal."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from holdfast.corpus import prepare
from holdfast.pipelines.view.catalog import find_run
from holdfast.pipelines.view.report import accounts, print_run
from holdfast.pipelines.view.summary import figures, print_summary
from holdfast.spec import Spec, parse_spec
from holdfast.store import Store, layout, open_store
from holdfast.telemetry import emit, recording
from holdfast.telemetry.events import AttemptBegan, Progress
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
    output = capsys.readouterr().out
    assert "from step 0: ddp, 1 process on 1 node, cpu, torch 2.13.0" in output
    assert "from step 30: parallel.strategy: ddp before, fsdp now" in output


SPEC = "{name: small, data: {sources: [{uri: x}]}, training: {steps: 90}}"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with a run of 90 steps that has just begun."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    run_store = open_store((tmp_path / "store").as_uri())
    document = {"name": "small", "spec": parse_spec(SPEC).model_dump(mode="json")}
    run_store.put(layout.run(RUN_ID, "run.json"), json.dumps(document).encode())
    return run_store


def shown(store: Store, capsys: pytest.CaptureFixture[str], **more: bool) -> str:
    print_run(find_run(store, RUN_ID), store, **more)
    return capsys.readouterr().out


def test_the_report_of_a_running_run_has_its_progress_and_rank_changes(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with recording(store, RUN_ID, "rank 0"):
        emit(AttemptBegan(world=2, step=0, steps=90, device="cpu"))
        emit(Progress(step=7, steps=90, loss=1, tokens_per_second=1, seconds_left=1))
    page = shown(store, capsys)
    assert "7 of 90 (none is saved), in 0 attempts" in page
    assert "ranks " not in page
    store.put(layout.checkpoint(RUN_ID, 30), json.dumps({"step": 30, "state_digest": "ab" * 16}).encode())
    with recording(store, RUN_ID, "rank 0 again"):
        emit(AttemptBegan(world=2, step=0, steps=90, device="cpu"))
        emit(AttemptBegan(world=4, step=30, steps=90, device="cpu"))
        emit(Progress(step=41, steps=90, loss=1, tokens_per_second=1, seconds_left=1))
    page = shown(store, capsys)
    assert "41 of 90 (step 30 is saved)" in page
    assert f"digest      {'ab' * 16}, of step 30" in page
    assert "2 from step 0, 4 from step 30" in page


def test_the_report_names_the_model_that_a_run_started_from_with_what_its_weights_determine(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = parse_spec(SPEC, ["model.init_from=hf://a/b@c", "model.layers=4", "model.kv_heads=2"])
    document = {"name": "small", "spec": spec.model_dump(mode="json")}
    store.put(layout.run(RUN_ID, "run.json"), json.dumps(document).encode())
    lines = shown(store, capsys).splitlines()
    (line,) = [line for line in lines if line.startswith("from ")]
    assert "hf://a/b@c: family llama, layers 4, hidden 256, heads 4, kv_heads 2, head_dim 64" in line
    assert line.endswith("context 256")


def test_a_failed_run_shows_its_reason_until_it_is_resubmitted(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"status": "failed", "failed_step": "train", "reason": "no text", "next_command": "fix it", "ended": 5.0}
    store.put(layout.run(RUN_ID, "summary.json"), json.dumps(summary).encode())
    page = shown(store, capsys)
    assert "state       failed" in page
    assert "why         train: no text" in page
    assert "next        fix it" in page
    store.put(layout.run(RUN_ID, "backend.json"), json.dumps({"backend": "argo", "submitted": 6.0}).encode())
    page = shown(store, capsys)
    assert "state       begun" in page
    assert "no text" not in page


def test_the_report_shows_non_default_fields_or_the_whole_spec_on_request(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    page = shown(store, capsys)
    short = yaml.safe_load(page.split("spec, without the defaults (--spec: all)")[1])
    assert short == {"name": "small", "data": {"sources": [{"uri": "x"}]}, "training": {"steps": 90}}
    whole = yaml.safe_load(shown(store, capsys, whole_spec=True).split("\nspec\n")[1])
    assert whole == parse_spec(SPEC).model_dump(mode="json")


def test_dropped_documents_are_shown_with_an_example_per_reason(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "[not json]", lines[3], json.dumps({"other": 1})]))
    (tmp_path / "gone.jsonl").symlink_to("/nowhere")
    data = {"sources": [{"uri": f"{tmp_path}/*.jsonl"}], "workers": 1, "cleaning": {"on_bad_record": "skip"}}
    spec = Spec.model_validate({"name": "small", "data": {**data, "tokenizer": {"vocabulary": 300}}})
    document = {"name": "small", "spec": spec.model_dump(mode="json"), "dataset_id": prepare(spec, store).dataset_id}
    store.put(layout.run(RUN_ID, "run.json"), json.dumps(document).encode())
    page = shown(store, capsys)
    print_summary(Console(width=300), store, find_run(store, RUN_ID), None)
    summary = capsys.readouterr().out
    for text in (page, summary):
        assert f"1 duplicate, the first: {tmp_path}/a.jsonl:32 repeats an earlier one ('document 3')" in text
        assert f"1 no text, the first: {tmp_path}/a.jsonl:33 has no text under 'text'" in text
        assert f"1 not json, the first: {tmp_path}/a.jsonl:31 is not JSON" in text
        assert f"1 left out, link to nothing: {tmp_path}/gone.jsonl" in text
    report = accounts(find_run(store, RUN_ID), store)
    assert report["dropped"] == {"duplicate": 1, "no_text": 1, "not_json": 1}
    assert report["dropped_examples"]["duplicate"]["place"] == f"{tmp_path}/a.jsonl:32"  # type: ignore[index]


@pytest.mark.parametrize(("answers", "expected"), [(1, "pass@1 71.9%"), (4, "pass@1 71.9%, pass@4 80.0%")])
def test_the_figures_of_a_run_have_the_shares_of_solved_prompts(store: Store, answers: int, expected: str) -> None:
    verdict = {"metrics": {"pass_at_1": 0.71875, "pass_at_k": 0.8}, "settings": {"answers": answers}}
    assert figures(replace(find_run(store, RUN_ID), verdict=verdict)) == expected
