"""The DAG of a sweep in both renderers: one preprocess, a train and an evaluate for each trial, one comparison.

To accept a change: HOLDFAST_UPDATE_GOLDEN=1 pytest tests/pipelines/backends/test_sweep.py, and read the difference.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.launch.kubernetes.schemas import validate
from holdfast.pipelines.backends.argo.emit import sweep_objects
from holdfast.pipelines.backends.kubeflow.compile import sweep_ir
from holdfast.pipelines.trials import MAX_TRIALS, grid
from holdfast.spec import SpecError, load_spec
from tests.golden_files import assert_golden, golden_of

SPEC = load_spec(Path(__file__).parents[3] / "examples/quickstart.yaml")
TRIALS = grid(SPEC, ["training.optimizer.learning_rate=1e-3,3e-3"])


@pytest.mark.parametrize(("target", "render"), [("kubeflow", sweep_ir), ("argo", sweep_objects)])
def test_a_sweep_becomes_its_golden_file(target: str, render: Any) -> None:
    here = Path(__file__).parent
    base, _ = golden_of(here / target / "golden")
    assert_golden(yaml.safe_dump_all(render(SPEC, TRIALS)), here / f"golden/sweep-{target}.diff", base)


def test_the_sweep_fits_the_official_schema_of_argo() -> None:
    for manifest in sweep_objects(SPEC, TRIALS):
        validate(manifest)


def test_kubeflow_trials_share_the_dataset_run_concurrently_and_end_in_one_comparison() -> None:
    pipeline, _ = sweep_ir(SPEC, TRIALS)
    root = pipeline["root"]["dag"]["tasks"]
    assert root["notify"]["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    (group,) = (name for name in root if name != "notify")
    tasks = pipeline["components"][root[group]["componentRef"]["name"]]["dag"]["tasks"]
    by_name = {task["taskInfo"]["name"]: task for task in tasks.values()}
    assert set(by_name) == {"preprocess", "train-1", "train-2", "evaluate-1", "evaluate-2", "compare", "if-blessed"}
    for number in (1, 2):
        assert by_name[f"train-{number}"]["dependentTasks"] == ["preprocess"]
        constant = by_name[f"train-{number}"]["inputs"]["parameters"]["overrides"]["runtimeValue"]["constant"]
        assert constant == list(TRIALS[number - 1])
    assert {"evaluate", "evaluate-2", "preprocess"} == {*by_name["compare"]["dependentTasks"]}
    assert by_name["if-blessed"]["triggerPolicy"]["condition"].endswith("-Output'] == 'blessed'")


def test_on_argo_the_best_is_registered_with_what_it_changed() -> None:
    (template,) = sweep_objects(SPEC, TRIALS)
    (dag,) = (entry["dag"] for entry in template["spec"]["templates"] if "dag" in entry)
    assert (dag["target"], dag["failFast"]) == ("evaluate-1 evaluate-2 register", False)
    tasks = {task["name"]: task for task in dag["tasks"]}
    assert tasks["train-1"]["depends"] == tasks["train-2"]["depends"] == "preprocess"
    condition = " && ".join(
        f"({step}.Succeeded || {step}.Failed || {step}.Errored || {step}.Omitted)"
        for step in ("evaluate-1", "evaluate-2")
    )
    assert tasks["compare"]["depends"] == f"preprocess && {condition}"
    arguments = {parameter["name"]: parameter["value"] for parameter in tasks["register"]["arguments"]["parameters"]}
    assert arguments == {
        "overrides": "{{tasks.compare.outputs.parameters.changes}}",
        "run-id": "{{tasks.compare.outputs.parameters.winner}}",
    }
    assert tasks["register"]["when"] == "'{{tasks.compare.outputs.parameters.word}}' == 'blessed'"


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (["training.steps"], "is not FIELD=VALUE"),
        (["training.steps=10,"], "is not FIELD=VALUE"),
        (["training.steps=100"], "makes 1 trials"),
        ([f"training.seed={','.join(map(str, range(MAX_TRIALS + 1)))}"], "makes 65 trials"),
        (["data.validation_fraction=0.1,0.2"], "same for all trials"),
        (["training.steps=many,200"], "--over: training.steps: .*a whole number"),
        (["training.optimizer.learning_rate=1e-3,0.001"], "same trial twice"),
        (["checkpoint.every_steps=5,10"], "every_steps=5 and checkpoint.every_steps=10 would be one run"),
        (["training.seed=1,2", "parallel.strategy=ddp,fsdp"], "would be one run: they change no bit of the model"),
        (["training.stepz=1,2"], "stepz"),
    ],
)
def test_an_invalid_sweep_is_refused_with_a_message(over: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        grid(SPEC, over)


def test_a_value_that_argo_would_take_for_a_reference_is_none() -> None:
    (template,) = sweep_objects(SPEC, (("model.init_from={{x}}",), ("model.init_from={{y}}",)))
    assert "{{x}}" not in str(template)
