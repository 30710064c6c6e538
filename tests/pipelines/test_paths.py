"""Paths in a spec are relative to the folder of the command."""

from pathlib import Path

import pytest

from holdfast.pipelines.backends.request import check_for_cluster
from holdfast.pipelines.paths import absolute, load_spec, store_root, with_absolute_paths
from holdfast.runtime.environment import store_url
from holdfast.spec import SpecError, parse_spec
from holdfast.spec.errors import UsageError
from tests.rollouts.prompt_run import prompt_spec


def test_a_store_that_is_neither_a_url_nor_a_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="'s3:/bucket' is neither a URL nor a path; write a URL with two slashes"):
        store_root("s3:/bucket")


@pytest.mark.parametrize("value", ["file:///tmp/store", "/tmp/store", "s3://bucket/prefix", "s3:/bucket"])
def test_the_variable_of_the_store_may_be_the_path_of_a_folder(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOLDFAST_STORE", value)
    assert store_url() == (f"file://{value}" if value.startswith("/") else value)


def test_a_script_that_does_not_exist_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: mine\ntrain:\n  script: lost.py\n")
    with pytest.raises(SpecError) as error:
        load_spec(path)
    assert [problem.place for problem in error.value.problems] == [f"{path}:3:3"]


def test_local_paths_become_absolute_and_urls_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = parse_spec(
        """
        name: paths
        data:
          sources:
            - {uri: texts/*.txt}
            - {uri: /already/absolute}
            - {uri: s3://bucket/key}
            - {uri: python:stdlib}
            - {uri: dvc:data/raw, repo: ../elsewhere}
            - {uri: dvc:data/raw, repo: https://host/repo}
          tokenizer: {kind: file, path: tokenizer.json}
        model: {init_from: base}
        """
    )
    absolute = with_absolute_paths(spec)
    assert [source.uri for source in absolute.data.sources] == [
        f"{tmp_path}/texts/*.txt", "/already/absolute", "s3://bucket/key", "python:stdlib", "dvc:data/raw",
        "dvc:data/raw",
    ]  # fmt: skip
    assert absolute.data.sources[4].repo == f"{tmp_path}/../elsewhere"
    assert absolute.data.sources[5].repo == "https://host/repo"
    assert absolute.data.tokenizer.path == f"{tmp_path}/tokenizer.json"
    assert absolute.model.init_from == f"{tmp_path}/base"


def test_the_paths_of_reward_models_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    models = ("scores", "/already/absolute", "s3://bucket/key", "hf://owner/name")
    rewards = ", ".join(f"{{kind: model, model: '{model}'}}" for model in models)
    spec = prompt_spec(f"training.grpo.rewards=[exact, {rewards}]")
    found = [reward.model for reward in with_absolute_paths(spec).training.grpo.rewards]
    assert found == [None, f"{tmp_path}/scores", *models[1:]]
    with pytest.raises(SpecError) as error:
        check_for_cluster(spec, "s3://bucket/store")
    refused = {problem.field for problem in error.value.problems}
    assert {"training.grpo.rewards.1.model", "training.grpo.rewards.2.model"} == {
        field for field in refused if field.startswith("training.")
    }


def test_a_folder_is_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_root("my store") == f"file://{tmp_path}/my%20store"
    assert store_root("s3://bucket/x") == "s3://bucket/x"
    assert absolute("~/x") == str(Path.home() / "x")
