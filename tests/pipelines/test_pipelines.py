"""The pipelines that users read and compile: short, and equal to the output of every other command."""

import runpy
import sys
from pathlib import Path

import pytest
import yaml

from holdfast.pipelines import retraining, sweep, training
from holdfast.pipelines.backends.kubeflow.compile import pipeline_ir, sweep_ir
from holdfast.pipelines.backends.kubeflow.steps import main
from holdfast.pipelines.trials import grid
from holdfast.spec import load_spec

QUICKSTART = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
OVER = ["training.seed=1,2"]


@pytest.mark.parametrize("module", [training, retraining, sweep], ids=lambda module: module.__name__)
def test_a_pipeline_fits_on_a_screen(module: object) -> None:
    assert len(Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()) <= 60  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["training", "retraining", "sweep"])
def test_the_module_of_a_pipeline_compiles_what_the_commands_compile(name: str, tmp_path: Path) -> None:
    spec, file = load_spec(Path(QUICKSTART)), tmp_path / "pipeline.yaml"
    options = [f"--over={axis}" for axis in OVER] if name == "sweep" else []
    function = {"training": training.training, "retraining": retraining.retraining, "sweep": sweep.sweep}[name]
    main(function, [QUICKSTART, "-o", str(file), *options])
    expected = (
        sweep_ir(spec, grid(spec, OVER)) if name == "sweep" else pipeline_ir(spec, scheduled=name == "retraining")
    )
    assert list(yaml.safe_load_all(file.read_text(encoding="utf-8"))) == expected


@pytest.mark.slow
def test_the_pipeline_compiles_without_a_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "training.yaml"
    monkeypatch.setattr(sys, "argv", ["training", "-o", str(file)])
    runpy.run_module("holdfast.pipelines.training", run_name="__main__")
    assert next(yaml.safe_load_all(file.read_text(encoding="utf-8")))["pipelineInfo"]["name"] == "training"
