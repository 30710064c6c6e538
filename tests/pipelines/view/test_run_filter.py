"""Tags, conditions on runs and the page that compares them, on records in a real store."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.pipelines.cli import app
from holdfast.pipelines.view.catalog import all_runs, find_run
from holdfast.pipelines.view.comparison import draw_runs
from holdfast.pipelines.view.run_filter import LONGEST, select_runs
from holdfast.pipelines.view.run_record import RunRecord
from holdfast.spec.errors import UsageError
from holdfast.store import Store, layout, open_store
from holdfast.telemetry.run_metadata import MAX_TAGS, change_labels
from tests.telemetry.histories import write_committed
from tests.tracking import made

IDS = ("a" * 16, "b" * 16, "c" * 16)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three runs: losses 2.5 and 3.5, and one that has not finished."""
    store = open_store(f"file://{tmp_path / 'store'}")
    for number, run_id in enumerate(IDS):
        spec = made.spec(f"training.seed={number}").model_dump(mode="json")
        record = {"run_id": run_id, "name": f"story-{number}", "dataset_id": "d" * 16, "spec": spec}
        store.put(layout.run(run_id, "run.json"), json.dumps(record).encode())
        write_committed(
            store, run_id, 0, [{**row, "evaluation.step": 1, "evaluation.loss": 4.0} for row in made.rows(1, 3)]
        )
        if number < 2:
            store.put(layout.result(run_id), json.dumps({"step": 3, "loss": 2.5 + number}).encode())
    verdict = {"word": "blessed", "metrics": {"bits": 1.25}}
    store.put(layout.verdict(IDS[0], "key"), json.dumps(verdict).encode())
    change_labels(store, IDS[0], ["x", "long-tag"])
    change_labels(store, IDS[1], ["x"], note="<script>the second</script>")
    return store


def ids(store: Store, where: str = "", sort: str = "run") -> str:
    """The first letters of the chosen runs, in order."""
    return "".join(record.run_id[0] for record in select_runs(all_runs(store), where, sort))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("loss < 3", "a"), ("loss >= 2.5 and tag == x", "ab"), ("tag == 'long-tag'", "a"), ("tag != x", "c"),
        ("not tag == x or loss > 3", "bc"), ("training.seed in [0, 2]", "ac"), ("training.seed == -1", ""),
        ("name == story", "abc"), ("evaluation.bits < 2", "a"), ("verdict == blessed", "a"), ("loss == none", "c"),
        ("loss", "ab"), ("1 < loss", None), ("3 > loss > 2", None), ("note == ''", "ac"), ("loss > 2 < 3", "ab"),
        ("loss == None", "c"), ("loss < training.seed", ""), ("training.seed < loss", "ab"), ("tag > w", "ab"),
        ("tag in [x, y]", "ab"), ("tag not in [x]", "c"), ("loss not in [2.5]", "bc"), ("loss < evaluation.bits", ""),
        ("tag == long-tag", "a"), ("tag in [y, long-tag] and loss < 3", "a"), ("tag == long-tag-2", ""),
        ("tag == run-007 or loss < 3", "a"), ("tag in [gpt-4o, a-in-b, x-y.z]", ""), ("tag == 'long-tag'", "a"),
        ("note == 'gpt-4o' or loss > 3", "b"), ("loss > 1e-3", "ab"),
    ],
)  # fmt: skip
def test_a_condition_chooses_runs(store: Store, where: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(UsageError, match="position 1: is no field; write FIELD OPERATOR VALUE"):
            select_runs(all_runs(store), where)
        return
    assert ids(store, where) == expected


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("loss < ", "position 7: cannot be read"),
        ("los < 3", "position 1: 'los' is no field of a run; did you mean 'loss'?"),
        ("loss < 3 or los > 1", "position 13: 'los' is no field"),
        ("tag == long-tag and los < 3", "position 21: 'los' is no field"),
        ("tag == a - b", "position 8: is no value; put text with other characters in quotes"),
        ("loss < 'x'", "position 8: is compared with 2.5"),
        ("tag < 3", "position 7: is compared with ["),
        ("tag in 3", "position 8: is compared with ["),
        ("loss < " + "-" * 980 + "1", "position 8: is no value"),
        ("loss is 3", "position 9: follows an unknown comparison"),
        ("__import__('os').system('true')", "position 1: is no field"),
        ("loss < (lambda: 3)()", "position 8: is no value"),
        ("loss < 9 ** 9 ** 9", "position 8: is no value"),
        ("(" * 400 + "loss" + ")" * 400, "cannot be read"),
        ("loss < 3" + " " * LONGEST, "use at most 1,000"),
        ("not " * 240 + "loss", ""),
    ],
)
def test_a_wrong_condition_is_refused_with_its_position(store: Store, where: str, message: str) -> None:
    if not message:
        assert ids(store, where) == "ab"
        return
    with pytest.raises(UsageError) as error:
        select_runs(all_runs(store), where)
    assert message in str(error.value)
    assert error.value.field == "--where"


def test_runs_are_sorted_and_one_without_the_value_is_last(store: Store) -> None:
    assert ids(store, sort="loss") == "abc"
    assert ids(store, sort="-loss") == "bac"
    assert ids(store, sort="-training.seed") == "cba"
    with pytest.raises(UsageError, match="--sort: 'size' is no field of a run"):
        ids(store, sort="size")


def test_a_condition_evaluates_no_unknown_name_of_an_empty_store(tmp_path: Path) -> None:
    assert select_runs([], "loss < 3", "-loss") == []


def test_concurrent_tags_are_all_kept_and_limits_hold(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: change_labels(store, IDS[2], [f"t{number}"]), range(8)))
    assert find_run(store, IDS[2]).tags == [f"t{number}" for number in range(8)]
    assert change_labels(store, IDS[2], remove=["t0", "absent"]).tags == [f"t{number}" for number in range(1, 8)]
    with pytest.raises(UsageError, match="'a b' is no tag; use 1 to 63 letters"):
        change_labels(store, IDS[2], ["a b"])
    with pytest.raises(UsageError, match="remove some; 64 are allowed"):
        change_labels(store, IDS[2], [f"more{number}" for number in range(MAX_TAGS)])
    assert find_run(store, IDS[1]).note == "<script>the second</script>"


def test_a_tag_changes_neither_the_time_of_a_run_nor_another_record(store: Store) -> None:
    before = find_run(store, IDS[0])
    change_labels(store, IDS[0], ["later"])
    after = find_run(store, IDS[0])
    assert (after.changed, after.described, after.result) == (before.changed, before.described, before.result)
    assert after.tags == ["later", "long-tag", "x"]


def test_the_page_has_curves_differences_and_verdicts_and_escapes_notes(store: Store) -> None:
    page = draw_runs(store, select_runs(all_runs(store), sort="training.seed"))
    assert page.count("<svg") == 5  # a single held-out score of each run is enough for the chart
    assert '<th scope="row">training.seed</th><td>0</td><td>1</td><td>2</td>' in page
    assert "training.steps</th>" not in page
    assert "<td>blessed</td><td>1.25</td>" in page
    assert "<script" not in page
    assert "://" not in page.replace(store.url, "")


def test_the_commands_tag_list_and_compare(store: Store, tmp_path: Path) -> None:
    def holdfast(*arguments: str) -> Any:
        result = CliRunner().invoke(app, [*arguments, "--store", store.url])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert json.loads(holdfast("runs", "tag", "aaaa", "new", "--remove", "x", "--note", "n", "--json")) == {
        "run_id": IDS[0], "tags": ["long-tag", "new"], "note": "n",
    }  # fmt: skip
    found = json.loads(holdfast("runs", "--where", "tag == new", "--json"))
    assert [(each["run_id"], each["tags"], each["note"]) for each in found] == [(IDS[0], ["long-tag", "new"], "n")]
    assert "long-tag, new" in holdfast("runs", "--sort", "loss", "--limit", "1")
    page = tmp_path / "pages" / "page.html"
    assert str(page) in holdfast("runs", "compare", "aaaa", "bbbb", "--output", str(page))
    assert "2 runs" in page.read_text()


def test_a_condition_that_no_run_meets_is_not_shown_as_an_empty_store(store: Store, tmp_path: Path) -> None:
    def printed(url: str) -> str:
        result = CliRunner().invoke(app, ["runs", "--where", "tag in [none]", "--store", url])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert printed(store.url).startswith(f"No run in {store.url} matches --where: tag in [none].")
    assert "No runs in" in printed(f"file://{tmp_path / 'empty'}")


def test_a_record_without_labels_has_none() -> None:
    assert (RunRecord("a").tags, RunRecord("a").note) == ([], "")
