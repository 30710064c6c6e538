"""The component files in a pipeline that is not ours: between other components, compiled and run by `kfp.local`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler, components, dsl, local

from holdfast.api.specs import compile_spec
from holdfast.components.train.result import read_result, read_script_result
from holdfast.dataset.manifest import load_manifest
from holdfast.pipelines.backends.kubeflow.component_files import FOLDER
from holdfast.pipelines.paths import load_spec
from holdfast.spec import Spec
from holdfast.store import layout, open_store

SPEC = {
    "name": "theirs",
    "data": {"tokenizer": {"vocabulary": 300}, "validation_fraction": 0.2, "workers": 1},
    "model": {"layers": 1, "hidden": 16, "heads": 2, "context": 16},
    "training": {"steps": 2, "global_batch": 2, "micro_batch": 2, "optimizer": {"learning_rate": 0.01}},
    "evaluation": {"max_tokens": 200, "versus_champion": "ignore"},
    "cluster": {"accelerator": "cpu"},
}
# kfp.local 2.x fails on optional integers that are left out; a server does not.
INTEGERS = {"steps": 2, "layers": 1, "hidden": 16, "heads": 2}


@dsl.component(base_image="python:3.11")
def write_text(folder: str, spec: dict) -> dict:  # type: ignore[type-arg]
    """Their first component: text, and the spec that names it."""
    from pathlib import Path

    text = "\n".join(f'{{"text": "Number {number} is followed by number {number + 1}."}}' for number in range(200))
    (Path(folder) / "text.jsonl").write_text(text)
    spec["data"]["sources"] = [{"uri": f"{folder}/text.jsonl"}]
    return spec


@dsl.component(base_image="python:3.11")
def collect(folder: str, run_id: str, verdict: str, place: str, model: dsl.Input[dsl.Model]) -> str:
    """Their last component: what it gets from ours."""
    import json
    from pathlib import Path

    found = {"run_id": run_id, "verdict": verdict, "place": place, "metadata": model.metadata, "uri": model.uri}
    (Path(folder) / "found.json").write_text(json.dumps(found))
    return run_id


def theirs() -> Any:
    """Their pipeline."""
    step = {
        name: components.load_component_from_file(str(FOLDER / name / "component.yaml"))
        for name in ("preprocess", "train", "evaluate")
    }

    @dsl.pipeline(name="theirs")
    def pipeline(folder: str, store: str, spec: dict) -> str:  # type: ignore[type-arg]
        made = write_text(folder=folder, spec=spec)
        given = {"spec": made.output, "store": store, **INTEGERS}
        dataset = step["preprocess"](**given)
        model = step["train"](**given, dataset_id=dataset.outputs["Output"])
        verdict = step["evaluate"](**given, run_id=model.outputs["Output"])
        return collect(
            folder=folder,
            run_id=model.outputs["Output"],
            verdict=verdict.outputs["Output"],
            place=model.outputs["uri"],
            model=model.outputs["model"],
        ).output

    return pipeline


def test_it_compiles_with_their_components_around_ours(tmp_path: Path) -> None:
    compiler.Compiler().compile(theirs(), str(tmp_path / "theirs.yaml"))
    tasks = yaml.safe_load((tmp_path / "theirs.yaml").read_text())["root"]["dag"]["tasks"]
    after = {name: sorted(task.get("dependentTasks", ())) for name, task in tasks.items()}
    assert after == {
        "write-text": [],
        "preprocess": ["write-text"],
        "train": ["preprocess", "write-text"],
        "evaluate": ["train", "write-text"],
        "collect": ["evaluate", "train"],
    }


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_it_runs_and_each_side_gets_what_the_other_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    store = open_store((tmp_path / "store").as_uri())
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "root"))
    ended = theirs()(folder=str(tmp_path), store=store.url, spec=SPEC)
    found = json.loads((tmp_path / "found.json").read_text())
    assert ended.output == found["run_id"]
    result = read_result(store, found["run_id"])
    assert result is not None
    assert result.step == 2
    assert load_manifest(store, result.dataset_id).tokens("train") > 0
    assert found["metadata"]["checkpoint"] == result.checkpoint
    assert found["place"].endswith(result.export.rstrip("/"))
    (verdict,) = [info for info in store.list(layout.run(found["run_id"], "evaluations/")) if info.key.endswith("json")]
    assert json.loads(store.get(verdict.key))["word"] == found["verdict"]


TRAIN = """
import sys, torch, holdfast
session = holdfast.session(seed=1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(session.restore(model=model, optimizer=optimizer, steps=int(sys.argv[1])), int(sys.argv[1])):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    session.step(step + 1, loss=loss)
session.export(model)
"""


def script_spec(folder: Path) -> Spec:
    """A spec of a training script in `folder`, with a store there."""
    (folder / "train.py").write_text(TRAIN)
    train = "{script: train.py, arguments: ['3']}"
    (folder / "spec.yaml").write_text(f"name: mine\ntrain: {train}\nstore: file://{folder}/store\n")
    return load_spec(folder / "spec.yaml")


@dsl.component(base_image="python:3.11")
def use(run_id: str, uri: str, model: dsl.Input[dsl.Model]) -> str:
    """Their last component."""
    return f"{run_id} {uri} {model.metadata['checkpoint']}"


def with_script(component: str) -> Any:
    """Their pipeline around the train step of a script, which is written to the file `component`."""
    train = components.load_component_from_file(component)

    @dsl.pipeline(name="with-script")
    def pipeline(store: str) -> str:
        model = train(store=store)
        return use(run_id=model.outputs["Output"], uri=model.outputs["uri"], model=model.outputs["model"]).output

    return pipeline


def test_the_train_step_of_a_script_is_a_component_with_its_spec_and_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    spec = script_spec(tmp_path)
    file = tmp_path / "train.yaml"
    file.write_text(compile_spec(spec, "component", image="registry/mine:1"))
    assert open_store(str(spec.store)).stat(layout.code(str(spec.code))) is not None, "pods fetch the code from there"
    compiler.Compiler().compile(with_script(str(file)), str(tmp_path / "theirs.yaml"))
    ir = yaml.safe_load((tmp_path / "theirs.yaml").read_text())
    given = ir["components"]["comp-train"]["inputDefinitions"]["parameters"]["spec"]
    assert given["isOptional"]
    assert given["defaultValue"]["train"] == {"script": "train.py", "arguments": ["3"]}
    assert given["defaultValue"]["code"] == spec.code
    assert ir["deploymentSpec"]["executors"]["exec-train"]["container"]["image"] == "registry/mine:1"


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_the_train_step_of_a_script_runs_in_their_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    spec = script_spec(tmp_path)
    (tmp_path / "train.yaml").write_text(compile_spec(spec, "component"))
    (tmp_path / "train.py").unlink()
    monkeypatch.chdir(tmp_path)
    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "root"))
    ended = with_script(str(tmp_path / "train.yaml"))(store=str(spec.store))
    identity, uri, checkpoint = str(ended.output).split()
    result = read_script_result(open_store(str(spec.store)), identity)
    assert result is not None
    assert result.step == 3
    assert uri.endswith(result.export.rstrip("/"))
    assert checkpoint == result.checkpoint
