"""The runs of a store: an unreadable run hides no other, and many runs cost few requests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.pipelines.backends.record import Record, find_record
from holdfast.pipelines.cli import app
from holdfast.pipelines.view.catalog import all_runs, find_run, some_runs
from holdfast.pipelines.view.run_record import read_run
from holdfast.pipelines.view.summary import model_place, next_commands
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout, open_store
from holdfast.store.interface import ObjectInfo
from holdfast.telemetry.rank_logs import RankLog, new_stream
from holdfast.telemetry.run_metadata import mark_name
from tests.protocol.bucket import Bucket, MemoryStore

SCRIPT = {"data": None, "train": {"script": "train.py"}}  # the sections of a run of a training script


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}")


class Counted(MemoryStore):
    """A store that counts its requests."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.requests: list[str] = []

    def _request(self, operation: str, key: str, effect: Any, again: Any = None) -> Any:
        self.requests.append(operation)
        return effect()

    def folders(self, prefix: str) -> Iterator[str]:
        self.requests.append("folders")
        return iter(dict.fromkeys(key.split("/")[1] for key in self.bucket.keys if key.startswith(prefix)))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return super().list(prefix, after)


def write(store: Store, run_id: str, name: str, **more: bytes) -> None:
    """Write a run with a result, and with more of its records."""
    document = {"spec": {"name": name, "training": {"steps": 10}}, "dataset_id": "d"}
    store.put(layout.run(run_id, "run.json"), json.dumps(document).encode())
    store.put(layout.result(run_id), b'{"step": 10, "loss": 1.5}')
    for file, data in more.items():
        store.put(layout.run(run_id, f"{file}.json"), data)


def test_the_number_of_steps_of_a_script_is_known_once_it_has_ended(folder_store: Store) -> None:
    run = b'{"spec": {"name": "s", "train": {"script": "train.py"}}, "dataset_id": "d"}'
    write(folder_store, "aaaa", "s", run=run)
    assert find_run(folder_store, "s").as_json()["steps"] == 10
    folder_store.delete(layout.result("aaaa"))
    assert find_run(folder_store, "s").as_json()["steps"] == 0


DAMAGED = [b"{", b"[" * 200_000, b"", b"\xff", b"null", b"[]", b'"x"', b'{"spec": NaN}']


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
@pytest.mark.parametrize("name", ["run", "result", "summary", "backend", "parent", "evaluations/a", "registrations/a"])
def test_a_damaged_record_of_a_run_hides_no_other_run_and_is_reported(
    folder_store: Store, name: str, data: bytes
) -> None:
    write(folder_store, "aaaa", "good")
    write(folder_store, "bbbb", "bad", **{name: data})
    records = {record.run_id: record for record in all_runs(folder_store)}
    assert records.keys() == {"aaaa", "bbbb"}
    assert records["aaaa"].unreadable == []
    (message,) = records["bbbb"].as_json()["unreadable"]
    assert f"runs/bbbb/{name}.json: is damaged" in message
    assert find_run(folder_store, "good").run_id == "aaaa"
    assert find_run(folder_store, "aa").run_id == "aaaa"
    assert find_record(folder_store, "aaaa") is None


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("run", b'{"spec": {"name": 3, "training": []}}'),
        ("run", b'{"spec": []}'),
        ("result", b'{"step": "x"}'),
        ("result", b'{"step": 3, "loss": []}'),
        ("summary", b'{"status": [], "ended": "x"}'),
        ("backend", b'{"submitted": "x", "backend": {}}'),
        ("evaluations/a", b'{"word": []}'),
        ("registrations/a", b'{"model": 1}'),
    ],
)
def test_a_record_of_other_types_hides_no_run(folder_store: Store, name: str, data: bytes) -> None:
    write(folder_store, "aaaa", "good")
    write(folder_store, "bbbb", "bad", **{name: data})
    for record in all_runs(folder_store):
        record.as_json()
        assert record.state
    result = CliRunner().invoke(app, ["runs", "--store", folder_store.url])
    assert result.exit_code == 0
    assert "good" in result.stdout


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("run", b'{"spec": {"name": "bad", "evaluation": "x"}}'),
        ("run", b'{"spec": {"name": "bad", "evaluation": null, "data": null, "training": null}}'),
        ("run", b'{"spec": {"name": "bad", "evaluation": {"prompts": {"a": 1}}}}'),
        ("run", b'{"spec": {"name": "bad", "data": []}}'),
        ("evaluations/a", b'{"word": "blessed", "settings": "x"}'),
        ("evaluations/a", b'{"word": "blessed", "settings": {"answers": []}}'),
        ("evaluations/a", b'{"word": "blessed", "metrics": []}'),
        ("evaluations/a", b'{"word": "blessed", "metrics": {"loss": "x", "pass_at_1": null}}'),
        ("evaluations/a", b'{"word": "blessed", "reasons": 5}'),
    ],
)
def test_a_run_with_a_record_of_other_types_is_shown(folder_store: Store, name: str, data: bytes) -> None:
    write(folder_store, "bbbb", "bad", **{name: data})
    for more in ([], ["--json"]):
        result = CliRunner().invoke(app, ["show", "bbbb", "--store", folder_store.url, *more])
        assert result.exit_code == 0, result.exception


def test_a_verdict_with_figures_that_are_not_finite_counts(folder_store: Store) -> None:
    verdict = b'{"word": "blessed", "metrics": {"perplexity": "Infinity", "metric.recall": "NaN", "loss": 800.5}}'
    write(folder_store, "bbbb", "good", **{"evaluations/a": verdict})
    record = read_run(folder_store, "bbbb")
    assert record is not None
    assert (record.word, record.verdict_key, record.unreadable) == ("blessed", "a", [])
    shown = CliRunner().invoke(app, ["show", "bbbb", "--store", folder_store.url])
    assert (shown.exit_code, "800.5" in shown.stdout) == (0, True)


def test_runs_reports_unreadable_records_and_the_number_of_omitted_runs_in_one_line_each(folder_store: Store) -> None:
    write(folder_store, "aaaa", "good")
    write(folder_store, "bbbb", "bad", result=b"{")
    result = CliRunner().invoke(app, ["runs", "--store", folder_store.url, "--json"])
    assert [bool(run["unreadable"]) for run in json.loads(result.stdout)].count(True) == 1
    assert result.stderr.count("runs/bbbb/result.json: is damaged") == 1
    for run_id in ("aaaa", "bbbb"):
        mark_name(folder_store, "n", run_id)
    result = CliRunner().invoke(app, ["runs", "--store", folder_store.url, "--limit", "1"])
    assert "note: 1 more runs are not shown; --limit 0 lists all" in result.stderr


def test_an_id_and_a_name_are_found_without_a_look_at_other_runs() -> None:
    store = Counted(Bucket())
    for number in range(300):
        write(store, f"{number:04x}", f"name-{number}")
        mark_name(store, f"name-{number}", f"{number:04x}")
    for wanted, run_id in (("0012", "0012"), ("name-7", "0007"), ("012b", "012b")):
        store.requests.clear()
        assert find_run(store, wanted).run_id == run_id
        assert len(store.requests) <= 6, wanted
        store.requests.clear()
        find_record(store, wanted)
    with pytest.raises(MissingError, match="'001': names 16 runs: 0010, 0011, 0012, 0013, 0014 and 11 more"):
        find_run(store, "001")
    with pytest.raises(MissingError, match="'name-999': no run in"):
        find_run(store, "name-999")


def test_a_name_refers_to_its_newest_run(folder_store: Store) -> None:
    for run_id in ("cccc", "aaaa", "bbbb"):
        write(folder_store, run_id, "tiny")
        mark_name(folder_store, "tiny", run_id)
    assert find_run(folder_store, "tiny").run_id == "bbbb"
    mark_name(folder_store, "tiny", "gone")
    assert find_run(folder_store, "tiny").run_id == "bbbb"
    write(folder_store, "dddd", "older")  # in no index
    assert find_run(folder_store, "older").run_id == "dddd"
    for wanted in ("..", ".", "a/b", "", "x" * 300, "*", "\x00"):
        with pytest.raises(MissingError):
            find_run(folder_store, wanted)


def test_listing_the_newest_runs_costs_requests_only_for_the_runs_shown() -> None:
    store = Counted(Bucket())
    for number in range(400):
        write(store, f"{number:04x}", "tiny")
        mark_name(store, "tiny", f"{number:04x}")
    store.requests.clear()
    records, remaining = some_runs(store, 20)
    assert (len(records), remaining) == (20, 380)
    assert len(store.requests) <= 20 * 4 + 4
    assert len(all_runs(store)) == 400


def test_the_newest_of_many_submissions_is_found_with_few_requests() -> None:
    store = Counted(Bucket())
    for number in range(400):
        Record("argo", f"w{number}", f"{number:04x}", "nightly", "", 5.0 + number).write(store)
    store.requests.clear()
    record = find_record(store, "nightly")
    assert record is not None
    assert record.id == "w399"
    assert len(store.requests) <= 40


def test_a_run_with_very_many_checkpoints_needs_few_listings() -> None:
    store = Counted(Bucket())
    write(store, "aaaa", "big")
    store.put(layout.verdict("aaaa", "key"), b'{"word": "blessed"}')
    store.bucket.write(layout.checkpoint("aaaa", 7), b"")
    for number in range(5000):
        store.bucket.write(layout.metrics("aaaa", number, number + 1, 1), b"")
        store.bucket.write(layout.events("aaaa", "w", number), b"")
    store.requests.clear()
    record = read_run(store, "aaaa")
    assert record is not None
    assert (record.word, record.step, record.checkpoints) == ("blessed", 10, [7])
    assert len(store.requests) <= 16


def test_a_submission_is_found_by_its_id_its_name_and_what_the_backend_calls_it(folder_store: Store) -> None:
    record = Record("argo", "workflow-x", "aaaa", "tiny", "", 5.0, job="job-x")
    record.write(folder_store)
    write(folder_store, "bbbb", "other", backend=b"{")
    for wanted in ("aaaa", "aa", "tiny", "workflow-x", "job-x"):
        run_record = find_record(folder_store, wanted)
        assert run_record is not None, wanted
        assert run_record.id == "workflow-x"
    assert find_record(folder_store, "none") is None


@pytest.mark.parametrize(
    ("spec", "command"),
    [
        ({"data": {"kind": "text"}}, "holdfast models generate aaaa 'Once upon a time'"),
        (
            {"data": {"kind": "text"}, "evaluation": {"prompts": ["Two\nlines"]}},
            "holdfast models generate aaaa 'Two lines'",
        ),
        ({"data": {"kind": "chat"}}, "holdfast chat aaaa"),
        ({"data": {"kind": "unpaired"}}, "holdfast chat aaaa"),
        ({"data": {"kind": "prompts"}}, "holdfast rollouts aaaa"),
        (SCRIPT, "holdfast checkpoints list aaaa"),
    ],
)
def test_the_next_command_is_one_that_suits_what_was_trained(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], command: str
) -> None:
    monkeypatch.setenv("HOLDFAST_STORE", folder_store.url)
    write(folder_store, "aaaa", "good", run=json.dumps({"spec": {"name": "good", **spec}, "dataset_id": "d"}).encode())
    record = read_run(folder_store, "aaaa")
    assert record is not None
    assert next_commands(folder_store, record)[0] == command


def test_a_silent_rank_is_named_as_silent(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STORE", folder_store.url)
    write(folder_store, "aaaa", "good")
    log = RankLog(lambda: folder_store, "aaaa", new_stream(rank=2, launch=1, pid=7))
    log.flush()
    result = CliRunner().invoke(app, ["logs", "aaaa", "--rank", "2"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "rank 2 of run aaaa has printed nothing yet" in result.stderr


@pytest.mark.parametrize(("section", "file"), [({"data": {"kind": "text"}}, "config.json"), (SCRIPT, "any/w.bin")])
def test_the_model_of_a_run_in_a_folder_is_a_path(folder_store: Store, section: dict[str, Any], file: str) -> None:
    result = json.dumps({"run_id": "aaaa", "dataset_id": "d", "step": 3, "export": "runs/aaaa/export/step-3/"})
    run = json.dumps({"spec": {"name": "good", **section}, "dataset_id": "d"})
    write(folder_store, "aaaa", "good", run=run.encode(), result=result.encode())
    folder_store.put(f"runs/aaaa/export/step-3/{file}", b"1")
    folder = folder_store.url.removeprefix("file://")
    record = read_run(folder_store, "aaaa")
    assert record is not None
    assert model_place(folder_store, record) == f"{folder}/runs/aaaa/export/step-3"
