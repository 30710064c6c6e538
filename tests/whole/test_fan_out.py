"""A corpus that several tasks tokenize, through the DAG on Argo and on KFP: to the byte, the dataset of one process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.components.preprocess import run as preprocess
from holdfast.pipelines.backends.argo import argo_objects
from holdfast.pipelines.backends.kubeflow.compile import compile_pipeline
from holdfast.pipelines.paths import with_absolute_paths
from holdfast.spec import Spec, load_spec
from holdfast.store import open_store
from tests import empty_mlflow
from tests.corpus.conftest import tree
from tests.pipelines.backends.argo.emulator import LOST, Argo
from tests.whole.small import environment, write_corpus, write_spec

FAN_OUT = "data.fan_out=3"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus in four sources, for as many units; the last one repeats a text of each source."""
    write_corpus(tmp_path)
    for number in range(3):
        text = (tmp_path / f"corpus/0{number}0.txt").read_text()
        (tmp_path / f"corpus/03{number}-again.txt").write_text(text)
    write_spec(tmp_path, data={"sources": [{"uri": f"corpus/0{tens}*.txt"} for tens in range(4)]})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec(folder: Path, *overrides: str) -> Spec:
    return with_absolute_paths(load_spec(folder / "spec.yaml", overrides))


def of_one_process(folder: Path) -> dict[str, bytes]:
    """The dataset of one process, in a separate store."""
    store = open_store(f"file://{folder}/alone")
    dataset = preprocess(spec(folder), store)
    assert dataset.dropped["duplicate"] == 3
    return tree(store, f"datasets/{dataset.dataset_id}/")


def of_the_dag(folder: Path, expected: dict[str, bytes]) -> dict[str, bytes]:
    (dataset_id,) = {key.split("/")[1] for key in expected}
    return tree(open_store(f"file://{folder}/home/store"), f"datasets/{dataset_id}/")


@pytest.mark.drill
def test_pods_of_argo_that_are_lost_are_made_again_and_the_dataset_is_that_of_one(folder: Path) -> None:
    empty_mlflow.place(folder / "home")
    variables = environment(
        folder / "home", HOLDFAST_LAUNCHER="local", HOLDFAST_LOG="json", PYTHONPATH=str(Path(__file__).parents[2])
    )
    argo = Argo(argo_objects(spec(folder, FAN_OUT)), folder / "pods", variables)
    argo.instead["tokenise"] = [LOST, 137]  # first its node was lost, then its memory was not enough
    workflow = argo.submit({"workflowTemplateRef": {"name": "holdfast-small"}, "entrypoint": "train-and-register"})
    assert workflow.phase == "Succeeded", workflow.log
    shares = [node for name, node in workflow.nodes.items() if name.startswith("tokenise(")]
    assert [(node.name, node.codes) for node in shares] == [
        ("tokenise(0:0/3)", [LOST, 137, 0]), ("tokenise(1:1/3)", [0]), ("tokenise(2:2/3)", [0]),
    ]  # fmt: skip
    expected = of_one_process(folder)
    assert of_the_dag(folder, expected) == expected


class Compiled:
    """The compiled pipeline, and its tasks as KFP's driver and launcher run them. `kfp.local` cannot run it, since
    it supports no loop below an exit handler."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        compile_pipeline(spec(folder, *overrides), folder / "pipeline.yaml")
        self.ir = next(yaml.safe_load_all((folder / "pipeline.yaml").read_text()))
        self.folder = folder
        self.ran: list[str] = []

    def component_of(self, task: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self.ir["components"][task["componentRef"]["name"]])

    def run(self, tasks: Mapping[str, Any], given: Mapping[str, Any], until: str) -> None:
        """Run the tasks of a DAG with its inputs, each after its dependencies, up to the task `until`."""
        outputs_of: dict[str, dict[str, Any]] = {}
        while waiting := [name for name in tasks if name not in outputs_of]:
            name = next(
                candidate
                for candidate in waiting
                if set(tasks[candidate].get("dependentTasks", ())) <= outputs_of.keys()
            )
            if name == until:
                return
            task = tasks[name]
            inputs = {key: _value(source, given, outputs_of) for key, source in task["inputs"]["parameters"].items()}
            component = self.component_of(task)
            if "dag" not in component:
                outputs_of[name] = self.execute(name, component, inputs)
                continue
            loop = task["parameterIterator"]
            for item in inputs[loop["items"]["inputParameter"]]:
                self.run(component["dag"]["tasks"], {**inputs, loop["itemInput"]: item}, until)
            outputs_of[name] = {}

    def execute(self, name: str, component: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run a task's container with KFP's executor input. Returns its outputs."""
        container = self.ir["deploymentSpec"]["executors"][component["executorLabel"]]["container"]
        self.ran.append(name)
        place = self.folder / f"task-{len(self.ran)}"
        place.mkdir()
        outputs = component["outputDefinitions"]
        executor_input = {
            "inputs": {"parameterValues": dict(inputs)},
            "outputs": {
                "parameters": {
                    parameter: {"outputFile": str(place / parameter)} for parameter in outputs["parameters"]
                },
                "artifacts": {
                    output_name: {
                        "artifacts": [
                            {
                                "name": output_name,
                                "type": kind["artifactType"],
                                "uri": str(place / f"{output_name}.art"),
                            }
                        ]
                    }
                    for output_name, kind in outputs.get("artifacts", {}).items()
                },
                "outputFile": str(place / "outputs.json"),
            },
        }
        command = [
            json.dumps(executor_input) if argument == "{{$}}" else argument
            for argument in container["command"] + container["args"]
        ]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = environment(self.folder / "home", PYTHONPATH=str(Path(__file__).parents[2]), PATH=path)
        result = subprocess.run(command, env=variables, cwd=place, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        values: dict[str, Any] = json.loads((place / "outputs.json").read_text())["parameterValues"]
        assert values.keys() == outputs["parameters"].keys()
        return values


def _value(how: Mapping[str, Any], given: Mapping[str, Any], made: Mapping[str, Mapping[str, Any]]) -> Any:
    if "runtimeValue" in how:
        constant = json.dumps(how["runtimeValue"]["constant"])
        return json.loads(constant.replace("{{$.pipeline_job_uuid}}", "a-pipeline-job"))
    if "componentInputParameter" in how:
        return given[how["componentInputParameter"]]
    source = how["taskOutputParameter"]
    return made[source["producerTask"]][source["outputParameterKey"]]


@pytest.mark.slow
def test_the_tasks_that_kfp_runs_over_a_list_make_the_dataset_of_one(folder: Path) -> None:
    empty_mlflow.place(folder / "home")
    compiled = Compiled(folder, FAN_OUT)
    parameters = compiled.ir["root"]["inputDefinitions"]["parameters"]
    arguments = {f"pipelinechannel--{name}": definition["defaultValue"] for name, definition in parameters.items()}
    handler = compiled.ir["root"]["dag"]["tasks"]["exit-handler-1"]
    compiled.run(compiled.component_of(handler)["dag"]["tasks"], arguments, until="train")
    assert compiled.ran == ["divide", "tokenise", "tokenise", "tokenise", "preprocess"]
    expected = of_one_process(folder)
    assert of_the_dag(folder, expected) == expected
