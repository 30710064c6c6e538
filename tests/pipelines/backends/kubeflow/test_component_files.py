"""The generated component files of the steps: current, and usable in any pipeline.

If a file is out of date: python -m holdfast.pipelines.backends.kubeflow.component_files
"""

from pathlib import Path
from typing import Any

import yaml
from kfp import compiler, components, dsl

from holdfast.pipelines.backends.kubeflow.component_files import FOLDER, codes_text, files
from holdfast.steps import STEPS


def test_the_files_are_those_of_the_table() -> None:
    for path, text in files().items():
        assert path.read_text(encoding="utf-8") == text, path
    assert (FOLDER.parents[1] / "docs" / "exit-codes.md").read_text(encoding="utf-8") == codes_text()


def test_another_pipeline_loads_the_components_and_passes_specs_and_outputs_only(tmp_path: Path) -> None:
    step = {name: components.load_component_from_file(str(FOLDER / name / "component.yaml")) for name in STEPS}

    @dsl.pipeline(name="theirs")
    def theirs(spec: dict) -> None:  # type: ignore[type-arg]
        with dsl.ExitHandler(step["notify"](spec=spec)):
            dataset = step["preprocess"](spec=spec)
            model = step["train"](spec=spec, dataset_id=dataset.outputs["Output"])
            verdict = step["evaluate"](spec=spec, run_id=model.outputs["Output"])
            with dsl.If(verdict.outputs["Output"] == "blessed"):
                step["register"](spec=spec, run_id=model.outputs["Output"])

    compiler.Compiler().compile(theirs, str(tmp_path / "theirs.yaml"))
    ir: dict[str, Any] = yaml.safe_load((tmp_path / "theirs.yaml").read_text(encoding="utf-8"))
    executors = {name.removeprefix("exec-") for name in ir["deploymentSpec"]["executors"]}
    assert executors == {"preprocess", "train", "evaluate", "register", "notify"}
