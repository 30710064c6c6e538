"""Reading the YAML of task bundles: other files in the folder, includes, aliases, and mistakes before the training."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.scoring.task_configs import MAX_LISTED, read_configs
from holdfast.scoring.task_files import find_task, require_tasks
from holdfast.spec.errors import DataError
from holdfast.store import Store, open_store
from tests.scoring.task_bundle import bundle

HUGE = f"0x{'f' * 5000}"  # Python refuses to print it


def counting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, list[str]]:
    """A store, and the names of the files that are read from it."""
    store, names = open_store(f"file://{folder}"), list[str]()
    get = store.get

    def recorded(key: str, *options: Any, **more: Any) -> bytes:
        names.append(key)
        return get(key, *options, **more)

    monkeypatch.setattr(store, "get", recorded)
    return store, names


@pytest.mark.parametrize(
    "text",
    ["tag: 1.0", "tag: true", "include: true", "include: [1]", "task: 1", "{task: x, tag: [[1]]}", "? [a]\n: b",
     "!!bool x", "''", "[" * 3000, "a: &a [*a]", f"a: {HUGE}"],
)  # fmt: skip
def test_other_yaml_in_the_folder_is_ignored(tmp_path: Path, text: str) -> None:
    task = bundle(tmp_path)
    digest = find_task(task).digest
    (tmp_path / "values.yaml").write_text(text)
    assert find_task(task).digest == digest


def test_two_files_with_one_name_matter_only_if_it_is_needed(tmp_path: Path) -> None:
    task = bundle(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("task: theirs\n")
    found = find_task(task)
    assert set(found.contents) == {"deep/algebra.jsonl", "deep/law.jsonl"}
    (tmp_path / "a.yaml").write_text("task: mmlu_law\n")
    with pytest.raises(DataError, match=r"a\.yaml and deep/law\.yaml both define 'mmlu_law'; remove or rename one"):
        find_task(task)


@pytest.mark.parametrize(
    "text",
    [
        "group: mmlu\ntask: &a [{group: g, task: *a}]\naggregate_metric_list: [{metric: acc}]\n",
        "group: mmlu\ntask: [mmlu_law]\naggregate_metric_list: &a [*a]\n",
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
        + "group: mmlu\ntask: [*a8]\n",
        f"group: mmlu\na: &a {'x' * 9000}\ntask: [{', '.join(['*a'] * 9000)}]\n",
    ],
    ids=["itself", "metrics", "nested", "long"],
)
def test_aliases_that_would_be_written_out_without_end_are_refused(tmp_path: Path, text: str) -> None:
    task = bundle(tmp_path)
    (tmp_path / "mmlu.yaml").write_text(text)
    with pytest.raises(
        DataError, match=r"mmlu\.yaml: its lists and mappings are more than .* write it without aliases"
    ):
        find_task(task)


def test_keys_that_would_be_merged_without_end_are_refused(tmp_path: Path) -> None:
    task = bundle(tmp_path)
    merged = "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 9))
    (tmp_path / "mmlu.yaml").write_text(f"a0: &a0 {{x: 1}}\n{merged}group: mmlu\ntask: [mmlu_law]\n")
    with pytest.raises(DataError, match=r"mmlu\.yaml is no plain YAML \(its keys `<<` merge more than 1,048,576 keys"):
        find_task(task)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (f"task: [{{x: {HUGE}}}]", r"member .* of group 'mmlu'; name a task"),
        (f"aggregate_metric_list: {HUGE}", "aggregate_metric_list is a number with too many digits"),
        ("1: 2\nx: 3", "group 'mmlu' sets `1`"),
        ("group: 5", "`group` is 5; give the name"),
    ],
)
def test_values_of_another_type_are_refused(tmp_path: Path, lines: str, words: str) -> None:
    task = bundle(tmp_path)
    path = tmp_path / "mmlu.yaml"
    path.write_text(f"{path.read_text()}\n{lines}\n")
    with pytest.raises(DataError, match=words):
        find_task(task)


def test_each_file_is_read_once_and_its_text_is_the_one_of_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = bundle(tmp_path)
    store, names = counting(tmp_path, monkeypatch)
    configs = read_configs(store, "mmlu.yaml", task)
    assert sorted(names) == ["_base.yaml", "deep/algebra.yaml", "deep/law.yaml", "mmlu.yaml", "other.yaml"]
    texts = {name: (tmp_path / name).read_text() for name in ("_base.yaml", "deep/algebra.yaml", "deep/law.yaml")}
    assert configs.others == texts and configs.text == (tmp_path / "mmlu.yaml").read_text()


def test_includes_of_one_file_on_two_ways_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = bundle(tmp_path)
    base = yaml.safe_load((tmp_path / "_base.yaml").read_text())
    for level in range(18):
        (tmp_path / f"l{level}.inc").write_text(yaml.safe_dump({"include": [f"l{level + 1}.inc"] * 2}))
    (tmp_path / "l18.inc").write_text(yaml.safe_dump({**base, "dataset_kwargs": {"data_files": "deep/law.jsonl"}}))
    (tmp_path / "top.yaml").write_text(yaml.safe_dump({"include": ["l0.inc", "l0.inc"], "task": "top"}))
    store, names = counting(tmp_path, monkeypatch)
    (config,) = read_configs(store, "top.yaml", task).tasks
    assert config["task"] == "top" and len(names) == len(set(names)) == 20
    (tmp_path / "l18.inc").write_text("include: l19.inc\n")
    for level in range(19, 30):
        (tmp_path / f"l{level}.inc").write_text(f"include: l{level + 1}.inc\n")
    with pytest.raises(DataError, match=r"l20\.inc includes \['l21\.inc'\]; name files, at most 20 of which"):
        read_configs(open_store(f"file://{tmp_path}"), "top.yaml", task)


def test_a_folder_with_too_many_files_is_refused_after_a_bounded_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = bundle(tmp_path)
    store = open_store(f"file://{tmp_path}")
    info = next(iter(store.list("")))
    listed = []

    def endless(_prefix: str, _after: str = "") -> Any:
        while True:
            listed.append(1)
            yield info

    monkeypatch.setattr(store, "list", endless)
    with pytest.raises(
        DataError, match=r"have more than 20,000 files; move the task files and their data to a separate"
    ):
        read_configs(store, "mmlu.yaml", task)
    assert len(listed) == MAX_LISTED + 1


STRICT = [{"name": "strict", "filter": [{"function": "take_first"}]}]


@pytest.mark.parametrize(
    ("name", "changes", "asked", "words"),
    [
        ("mmlu", {}, {"filter": "other"}, "no metric 'acc' of filter 'other'; it has the filters none"),
        ("law", {}, {"filter": "other"}, "no metric 'acc' of filter 'other'; it has the filters none"),
        ("law", {"filter_list": STRICT}, {"filter": "none"}, "of filter 'none'; it has the filters strict"),
        ("law", {"metric_list": None}, {"metric": "f1"}, "no metric 'f1'; it has acc, acc_norm"),
        ("law", {"filter_list": 5}, {}, "filter_list is 5; list entries with `name`"),
        ("mmlu", {"aggregate_metric_list": None}, {}, "has no metric 'acc'; it has none: add it to its aggregate_met"),
        ("mmlu", {"aggregate_metric_list": [{"metric": "acc", "filter_list": "strict"}]}, {}, "of filter 'strict'"),
        (
            "mmlu",
            {"aggregate_metric_list": [{"metric": "acc", "filter_list": ["none"]}]},
            {"filter": "x"},
            "filter 'x'",
        ),
        ("law", {"metric_list": [{"metric": "acc", "higher_is_better": "no"}]}, {}, "write true or false"),
    ],
)
def test_a_missing_filter_or_metric_is_found_before_the_training(
    tmp_path: Path, name: str, changes: dict[str, Any], asked: dict[str, Any], words: str
) -> None:
    task = bundle(tmp_path)
    law = {"include": "_base.yaml", "task": "law", "dataset_kwargs": {"data_files": {"test": "deep/law.jsonl"}}}
    (tmp_path / "law.yaml").write_text(yaml.safe_dump(law))
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))
    with pytest.raises(DataError, match=words):
        require_tasks([task.model_copy(update={"uri": str(path), **asked})], 64)


def test_a_group_whose_tasks_disagree_about_better_is_refused(tmp_path: Path) -> None:
    task = bundle(tmp_path)
    path = tmp_path / "deep" / "law.yaml"
    lower = {"metric_list": [{"metric": "acc", "higher_is_better": False}]}
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **lower}))
    with pytest.raises(DataError, match="a higher acc is better in task 'mmlu_algebra' and worse in task 'mmlu_law'"):
        require_tasks([task], 64)
    path = tmp_path / "deep" / "algebra.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **lower}))
    assert not find_task(task).configs.higher_is_better
