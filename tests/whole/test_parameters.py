"""The compiled pipeline as the form of the KFP UI starts it, with one changed field, and again while it still runs.
Its store is a bucket, as on a cluster."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from holdfast.pipelines.backends.kubeflow.compile import compile_pipeline
from holdfast.spec import load_spec
from holdfast.store import layout, open_store
from tests import empty_mlflow
from tests.whole.small import ROOT, environment, write_corpus, write_spec

PAGE = "https://mlflow.example.com"


class Started:
    """A run with these values in its form."""

    def __init__(self, folder: Path, name: str, **changed: Any) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        (self.folder / "pipeline.yaml").write_text((folder / "pipeline.yaml").read_text())
        parameters = next(yaml.safe_load_all((folder / "pipeline.yaml").read_text()))["root"]["inputDefinitions"]
        form = {  # JSON from a browser: an integer has no fraction there
            key: int(definition["defaultValue"])
            if definition["parameterType"] == "NUMBER_INTEGER"
            else definition["defaultValue"]
            for key, definition in parameters["parameters"].items()
        }
        assert changed.keys() <= form.keys()
        (self.folder / "arguments.json").write_text(json.dumps({**form, **changed}))
        pod = {"HOLDFAST_WORKFLOW": f"small-{name}", "HOLDFAST_POD_NAMESPACE": "team", "HOLDFAST_MLFLOW_UI": PAGE}
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.whole.kfp_local", str(self.folder)],
                env=environment(folder / "home", PYTHONPATH=str(ROOT), **pod), cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip

    def ended(self) -> dict[str, str]:
        """The results of the steps, once all have succeeded."""
        code = self.process.wait(timeout=300)
        assert code == 0, self.log
        files = (self.folder / "outcomes").glob("*.json")
        outcomes: list[Mapping[str, str]] = [json.loads(file.read_text()) for file in files]
        return {outcome["step"]: outcome["result"] for outcome in outcomes}

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def artifact(self, name: str) -> str:
        """An artifact that a step has written."""
        (file,) = (self.folder / "artifacts").rglob(name)
        return file.read_text()


@pytest.mark.drill
def test_runs_from_the_form_that_overlap_train_once_and_show_where_everything_is(tmp_path: Path, s3_url: str) -> None:
    empty_mlflow.place(tmp_path / "home")
    write_corpus(tmp_path)
    uri = os.fspath(tmp_path / "corpus/*.txt")
    spec = load_spec(write_spec(tmp_path), [f"data.sources=[{{uri: '{uri}'}}]", f"store={s3_url}"])
    compile_pipeline(spec, tmp_path / "pipeline.yaml")
    store = open_store(s3_url)

    # As when a recurring run starts while one still runs.
    first_run, other = (Started(tmp_path, name, steps=6) for name in ("one", "other"))
    first, second = first_run.ended(), other.ended()
    assert first.keys() >= {"preprocess", "train", "evaluate", "register"}
    run_id = first["train"]
    assert second["train"] == run_id
    assert len(list(store.list(layout.attempts(run_id)))) == 1  # the training ran once

    # Written before the training begins: where to watch it.
    links = first_run.artifact("links")
    (mlflow_run,) = MlflowClient(f"sqlite:///{tmp_path}/home/mlflow.db").search_runs(
        ["1"], filter_string=f"tags.`holdfast.run_id` = '{run_id}'"
    )
    assert f"[MLflow]({PAGE}/#/experiments/1/runs/{mlflow_run.info.run_id})" in links
    assert f"holdfast logs {run_id} --rank 0 --follow --store {s3_url}" in links
    assert f"kubectl -n team get pytorchjobs.kubeflow.org,pods -l holdfast/run-id={run_id}" in links
    assert "kubectl -n team get pods -l workflows.argoproj.io/workflow=small-one" in links

    assert run_id in first_run.artifact("curves")
    assert "<polyline" in first_run.artifact("curves")
    assert json.loads(store.get(layout.result(run_id)))["step"] == 6
