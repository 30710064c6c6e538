"""The emitted templates run from raw text to a registered model, and only when something changed."""

import json
import os
from pathlib import Path

import pytest

from holdfast.pipelines.backends.argo import argo_objects
from holdfast.pipelines.backends.argo.emit import sweep_objects
from holdfast.pipelines.paths import with_absolute_paths
from holdfast.spec import Spec, load_spec
from tests import empty_mlflow
from tests.pipelines.backends.argo.emulator import LOST, Argo, Workflow
from tests.whole.small import environment, objects, only, write_corpus, write_spec

pytestmark = pytest.mark.slow  # the fixture trains and registers a model
NAME = "holdfast-small"
STEPS = ("preprocess", "train", "evaluate", "register")


def small(folder: Path, *overrides: str) -> Spec:
    """The small spec with absolute paths, on a schedule."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return with_absolute_paths(
            load_spec(folder / "spec.yaml", ["schedule.every_minutes=30", "cluster.argo_artifacts=true", *overrides])
        )
    finally:
        os.chdir(before)


def argo(folder: Path, *overrides: str) -> Argo:
    """A namespace with the objects of the small spec."""
    empty_mlflow.place(folder / "home")
    variables = environment(
        folder / "home", HOLDFAST_LAUNCHER="local", HOLDFAST_LOG="json", PYTHONPATH=str(Path(__file__).parents[4])
    )
    return Argo(argo_objects(small(folder, *overrides)), folder / "pods", variables)


def submit(namespace: Argo, entrypoint: str = "train-and-register", **parameters: str) -> Workflow:
    """`argo submit --from workflowtemplate/holdfast-small`."""
    spec = {"workflowTemplateRef": {"name": NAME}, "entrypoint": entrypoint}
    return namespace.submit(spec, **parameters)


def phases(workflow: Workflow) -> dict[str, str]:
    return {name: node.phase for name, node in workflow.nodes.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and a spec."""
    path = tmp_path_factory.mktemp("argo")
    write_corpus(path)
    write_spec(path)
    return path


@pytest.fixture(scope="module")
def first(folder: Path) -> Workflow:
    """Result of the first run of the schedule."""
    return argo(folder).fire(NAME)


def test_the_first_time_the_schedule_fires_a_model_is_trained_and_registered(first: Workflow, folder: Path) -> None:
    assert first.phase == "Succeeded", first.log
    assert phases(first) == dict.fromkeys(["trigger", *STEPS, "run", "onExit"], "Succeeded")
    assert first.nodes["trigger"].outputs["word"] == "due"
    assert "no champion yet" in first.nodes["trigger"].outputs["reason"]
    result = only(folder, "runs/*/result.json")
    assert first.nodes["preprocess"].outputs["dataset-id"] == result["dataset_id"]
    assert first.nodes["train"].outputs["run-id"] == result["run_id"]
    assert only(folder, "runs/*/registrations/*.json")["version"] == int(first.nodes["register"].outputs["version"])


def test_the_artifacts_are_the_report_and_the_summary(first: Workflow, folder: Path) -> None:
    (report,) = objects(folder, "runs/*/evaluations/*.html")
    assert first.nodes["evaluate"].artifacts["report"].read_bytes() == report.read_bytes()
    summary = first.nodes["onExit"].artifacts["summary"].read_text()
    assert ": registered as models:/small/1" in summary
    assert first.nodes["train"].outputs["run-id"] in summary


def test_training_reports_its_progress(first: Workflow) -> None:
    assert first.nodes["train"].progress == "10/10"


def test_when_nothing_changed_nothing_but_the_trigger_runs(first: Workflow, folder: Path) -> None:
    workflow = argo(folder).fire(NAME)
    assert workflow.phase == "Succeeded", workflow.log
    assert phases(workflow) == {"trigger": "Succeeded", "run": "Skipped", "onExit": "Succeeded"}
    assert "Nothing changed" in workflow.nodes["trigger"].outputs["reason"]
    assert "Nothing changed" in workflow.nodes["onExit"].artifacts["summary"].read_text()
    assert len(objects(folder, "runs/*/attempts/??????.json")) == 1


def test_a_model_that_is_not_blessed_is_not_registered_and_nothing_is_trained_twice(
    first: Workflow, folder: Path
) -> None:
    workflow = submit(argo(folder), overrides='["evaluation.max_perplexity=1.0001"]')
    assert workflow.phase == "Succeeded", workflow.log
    assert workflow.nodes["evaluate"].outputs["word"] == "not_blessed"
    assert workflow.nodes["register"].phase == "Skipped"
    assert "not blessed" in workflow.nodes["onExit"].artifacts["summary"].read_text()
    assert len(objects(folder, "runs/*/registrations/*.json")) == 1
    assert len(objects(folder, "runs/*/attempts/??????.json")) == 1  # the same run is evaluated again


def test_a_bad_spec_is_not_retried_and_the_exit_handler_reports_it(first: Workflow, folder: Path) -> None:
    workflow = submit(argo(folder), overrides='["training.steps=0"]')
    assert workflow.phase == "Failed"
    assert workflow.nodes["preprocess"].codes == [10]
    assert [workflow.nodes[name].phase for name in STEPS[1:]] == ["Omitted"] * 3
    summary = workflow.nodes["onExit"].artifacts["summary"].read_text()
    assert "failed step: preprocess" in summary
    assert "training.steps" in summary


def test_the_message_of_a_failed_step_reaches_the_exit_handler(first: Workflow, folder: Path) -> None:
    failed = submit(argo(folder), overrides=json.dumps([f"data.sources.0.uri={folder}/nothing/*.txt"]))
    assert failed.nodes["preprocess"].codes == [15]
    summary = failed.nodes["onExit"].artifacts["summary"].read_text()
    assert "failed step: preprocess" in summary
    assert "matches no file" in summary


def test_infrastructure_errors_are_tried_again_with_growing_bounded_waits(first: Workflow, folder: Path) -> None:
    namespace = argo(folder)
    namespace.instead = {"trigger": [203, LOST, 137, 143, 204, 201, 202, 205]}
    workflow = namespace.fire(NAME)
    assert workflow.phase == "Succeeded", workflow.log
    assert workflow.nodes["trigger"].codes == [203, LOST, 137, 143, 204, 201, 202, 205, 0]
    assert workflow.nodes["trigger"].waits == [15, 30, 60, 120, 240, 480, 600, 600]


@pytest.mark.parametrize("code", [1, 2, 7, 10, 11, 12, 13, 14, 15, 16, 17])
def test_permanent_errors_are_not_retried(folder: Path, code: int) -> None:
    namespace = argo(folder)
    namespace.instead = {"preprocess": [code], "notify": [0]}
    workflow = submit(namespace)
    assert (workflow.phase, workflow.nodes["preprocess"].codes) == ("Failed", [code])


def test_retries_are_bounded(folder: Path) -> None:
    namespace = argo(folder)
    namespace.instead = {"preprocess": [203] * 100, "notify": [0]}
    workflow = submit(namespace)
    assert (workflow.phase, len(workflow.nodes["preprocess"].codes)) == ("Failed", 21)


def test_a_failed_trigger_reaches_the_exit_handler_too(folder: Path) -> None:
    namespace = argo(folder)
    namespace.instead = {"trigger": [16]}
    workflow = namespace.fire(NAME)
    assert phases(workflow) == {"trigger": "Failed", "run": "Omitted", "onExit": "Succeeded"}
    assert "failed step: trigger" in workflow.nodes["onExit"].artifacts["summary"].read_text()


def test_a_file_that_is_added_retrains_the_next_time(first: Workflow, folder: Path) -> None:
    (folder / "corpus/new.txt").write_text("a story that is new, about the sea and a ship\n" * 40)
    namespace = argo(folder)
    namespace.instead = {"preprocess": [16], "notify": [0]}  # the rest is tested above
    second = namespace.fire(NAME)
    assert "The sources give dataset" in second.nodes["trigger"].outputs["reason"]
    assert (second.nodes["trigger"].outputs["word"], second.nodes["preprocess"].codes) == ("due", [16])


@pytest.mark.drill
def test_a_failed_trial_is_listed_and_the_rest_is_compared_and_registered(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_spec(tmp_path)
    base = argo(tmp_path)
    trials = (("training.seed=1",), ("model.context=4096",))  # more than the held-out text has
    argo_sweep = Argo(sweep_objects(small(tmp_path), trials), tmp_path / "pods", base.environment)
    workflow = argo_sweep.submit({"workflowTemplateRef": {"name": f"{NAME}-sweep"}})
    assert workflow.phase == "Failed", workflow.log
    phase = phases(workflow)
    assert [phase[name] for name in ("train-1", "train-2", "evaluate-1", "evaluate-2", "compare", "register")] == [
        "Succeeded", "Failed", "Succeeded", "Omitted", "Succeeded", "Succeeded",
    ], workflow.log  # fmt: skip
    comparison = only(tmp_path, "sweeps/*/comparison.json")
    assert [row["changes"] for row in comparison["rows"]] == [["training.seed=1"]]
    (failed,) = comparison["failed"]
    assert (failed["changes"], failed["step"], failed["exit_code"]) == (["model.context=4096"], "train", 11)
    assert failed["reason"] in json.loads(objects(tmp_path, "jobs/*/train-2.json")[0].read_text())["reason"]
    assert only(tmp_path, "runs/*/registrations/*.json")["run_id"] == comparison["rows"][0]["run_id"]
    assert "1 of 2 trials compared" in workflow.nodes["onExit"].artifacts["summary"].read_text()
