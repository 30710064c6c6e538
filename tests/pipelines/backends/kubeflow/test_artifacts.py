"""The dataset and the model as KFP artifacts: the compiled importers run and enter them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import components, local

from holdfast.pipelines.backends.kubeflow.compile import pipeline_ir
from holdfast.spec import load_spec
from holdfast.steps import ARTIFACTS

ROOT = Path(__file__).parents[4]
DATASET, MODEL = "s3://bucket/prefix/datasets/0123", "s3://bucket/prefix/runs/4567/export/step-000000300"


@pytest.fixture(scope="module")
def pipeline() -> dict[str, Any]:
    return pipeline_ir(load_spec(ROOT / "examples/quickstart.yaml"))[0]


def group_of(pipeline: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The component that enters the artifacts."""
    ((name, component),) = [
        (name, one) for name, one in pipeline["components"].items() if ARTIFACTS in one.get("dag", {}).get("tasks", {})
    ]
    return name, component


def test_the_importers_enter_the_addresses_that_the_steps_gave(
    pipeline: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, group = group_of(pipeline)
    alone = {**pipeline, "root": {**group, "dag": {**group["dag"]}}}  # as a separate pipeline, when its condition holds
    arguments = {
        "pipelinechannel--preprocess-uri": DATASET, "pipelinechannel--train-uri": MODEL,
        "pipelinechannel--train-scheme": "s3",
    }  # fmt: skip
    assert arguments.keys() == group["inputDefinitions"]["parameters"].keys()
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "artifacts"))
    with pytest.warns(UserWarning, match="remote file"):  # an importer on one machine cannot read it
        components.load_component_from_text(yaml.safe_dump(alone))(**arguments)
    output = " ".join(capfd.readouterr().out.split())
    assert f"artifact: Dataset( name='artifact', uri='{DATASET}'" in output
    assert f"artifact: Model( name='artifact', uri='{MODEL}'" in output
    (document,) = (tmp_path / "artifacts").rglob("addresses")
    assert document.read_text() == f"- dataset: `{DATASET}`\n- model: `{MODEL}`\n"
