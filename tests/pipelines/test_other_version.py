"""Runs of another version of Holdfast name it, and none of them begins again in silence."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from holdfast.pipelines.backends.local import run as local_run
from holdfast.pipelines.backends.local.run import LocalRun, identified, run_to_end
from holdfast.pipelines.backends.record import record_of
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.cli import app
from holdfast.scoring import settings_key
from holdfast.spec import ExitCode, parse_spec
from holdfast.spec.identity import DATA_PLANE_VERSION, GENERATOR_VERSION
from holdfast.store import layout
from holdfast.telemetry import run_metadata
from holdfast.telemetry.run_metadata import Maker, OtherResultsError, write_run_metadata
from tests.exports import write_export

OLD = DATA_PLANE_VERSION - 1


@contextmanager
def older(monkeypatch: pytest.MonkeyPatch, data_plane: int = OLD) -> Iterator[None]:
    """What runs inside is an older Holdfast."""
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.spec.identity.DATA_PLANE_VERSION", data_plane)
        patch.setattr(run_metadata, "_installed", lambda: "0.0.9")
        yield


def run_of(folder: Path) -> LocalRun:
    """The run of a spec in `folder`, by this Holdfast."""
    (folder / "corpus.txt").write_text("the ship sails on")
    spec = parse_spec(f"name: story\ndata:\n  sources:\n    - uri: {folder}/corpus.txt\n")
    return identified(spec, (folder / "store").as_uri())


def finish(run: LocalRun, folder: Path) -> None:
    """Leave the records of a trained run that is not blessed."""
    (folder / "config.json").write_text("{}")
    export, digest = write_export(run.store, run.run_id, 3, "state", folder, ["config.json"])
    result = {"step": 3, "export": export, "export_digest": digest, "loss": 1.5}
    run.store.put(layout.result(run.run_id), json.dumps(result).encode())
    run.store.put(layout.verdict(run.run_id, f"{settings_key(run.spec)}-none"), b'{"word": "not_blessed"}')
    record = record_of(RunRequest(run.spec, run.store_url, "", run.run_id), "local", run.run_id)
    replace(record, log=str(folder / "run.log"), outcomes=str(folder / "outcomes")).write(run.store)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))


@pytest.fixture
def run(tmp_path: Path) -> LocalRun:
    """A finished run, without its run.json."""
    made = run_of(tmp_path)
    finish(made, tmp_path)
    return made


def holdfast(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_a_run_of_another_package_is_named_and_resumed(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with older(monkeypatch, DATA_PLANE_VERSION):
        write_run_metadata(run.store, run.run_id, run.spec, run.dataset_id, "")
    assert "made by     Holdfast 0.0.9 (here " in holdfast("show", run.run_id, "--store", run.store_url).stdout
    (row,) = json.loads(holdfast("runs", "--store", run.store_url, "--json").stdout)
    assert (row["holdfast_version"], row["data_plane_version"]) == ("0.0.9", DATA_PLANE_VERSION)
    assert row["other_results"] is False
    resumed = holdfast("resume", run.run_id, "--store", run.store_url)
    assert resumed.exit_code == ExitCode.NOT_BLESSED, resumed.output
    assert "note: the run was made by Holdfast 0.0.9" in resumed.stderr


def test_a_run_of_other_results_is_named_and_does_not_begin_again(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with older(monkeypatch):
        write_run_metadata(run.store, run.run_id, run.spec, run.dataset_id, "")
    shown = holdfast("show", run.run_id, "--store", run.store_url).stdout
    assert f"data plane {OLD} (here {DATA_PLANE_VERSION}); this Holdfast makes another run of its spec" in shown
    (row,) = json.loads(holdfast("runs", "--store", run.store_url, "--json").stdout)
    assert (row["data_plane_version"], row["other_results"]) == (OLD, True)
    before = {info.key for info in run.store.list("")}
    resumed = holdfast("resume", run.run_id, "--store", run.store_url)
    assert isinstance(resumed.exception, OtherResultsError)
    assert resumed.exception.exit_code == ExitCode.MISMATCH
    assert "made by a Holdfast of other results: Holdfast 0.0.9" in str(resumed.exception)
    assert {info.key for info in run.store.list("")} == before


def test_a_run_of_this_version_says_nothing(run: LocalRun) -> None:
    write_run_metadata(run.store, run.run_id, run.spec, run.dataset_id, "")
    assert "made by" not in holdfast("show", run.run_id, "--store", run.store_url).stdout
    assert "note" not in holdfast("resume", run.run_id, "--store", run.store_url).stderr


@pytest.mark.parametrize("data_plane", [1, OLD])
def test_a_new_run_names_the_run_of_its_spec_that_an_older_holdfast_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, data_plane: int
) -> None:
    with older(monkeypatch, data_plane):
        former = run_of(tmp_path)
        write_run_metadata(former.store, former.run_id, former.spec, former.dataset_id, "")
    new = run_of(tmp_path)
    assert new.run_id != former.run_id
    monkeypatch.setattr(local_run, "follow", lambda *_: pytest.fail("the note comes before the run begins"))
    printed = io.StringIO()
    with pytest.raises(pytest.fail.Exception):
        run_to_end(new, "", Console(file=printed))
    assert f"note: run {former.run_id} of the same spec was made by an older Holdfast" in printed.getvalue()
    write_run_metadata(new.store, new.run_id, new.spec, new.dataset_id, "")
    assert f"run {former.run_id} of the same spec was made by an older Holdfast" in caplog.text
    assert (
        f"run {former.run_id}, which has the same spec" in holdfast("show", new.run_id, "--store", new.store_url).stdout
    )
    rows = {row["run_id"]: row for row in json.loads(holdfast("runs", "--store", new.store_url, "--json").stdout)}
    assert (rows[new.run_id]["earlier_run"], rows[former.run_id]["earlier_run"]) == (former.run_id, "")


def test_the_generator_counts_for_runs_that_generate_and_no_version_for_scripts() -> None:
    record = {"data_plane_version": DATA_PLANE_VERSION, "generator_version": GENERATOR_VERSION - 1}
    assert not Maker.of({**record, "spec": {"data": {"kind": "text"}}}).other_results
    assert Maker.of({**record, "spec": {"data": {"kind": "prompts"}}}).other_results
    by_server = {"data": {"kind": "prompts"}, "training": {"grpo": {"server": {"url": "http://x"}}}}
    assert not Maker.of({**record, "spec": by_server}).other_results
    script = {"data_plane_version": OLD, "spec": {"train": {"script": "train.py"}, "data": None}}
    assert not Maker.of(script).other_results
    assert f"data plane {OLD}" in Maker.of(script).in_words
    all_damaged: tuple[dict[str, object], ...] = ({}, {"spec": []}, {"spec": {"data": 1}})
    for damaged in all_damaged:
        assert Maker.of(damaged).in_words == ""
