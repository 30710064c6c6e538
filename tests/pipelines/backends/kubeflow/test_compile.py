"""The compiled pipeline: the same bytes every time, and exactly what the examples promise.

To accept a change: HOLDFAST_UPDATE_GOLDEN=1 pytest tests/pipelines/backends/kubeflow/test_compile.py,
and read the difference in Git.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import components

from holdfast.pipelines.backends.kubeflow.compile import compile_pipeline, pipeline_ir
from holdfast.spec import load_spec
from holdfast.spec.errors import AccessDeniedError
from holdfast.spec.load import written_spec
from tests.golden_files import assert_golden, golden_of

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"), key=lambda path: path.stem != "quickstart")  # the base first
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def ir(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quickstart's pipeline, read back from the file."""
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(load_spec(ROOT / "examples/quickstart.yaml"), path)
    return next(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_compiles_to_its_golden_file(example: Path, tmp_path: Path) -> None:
    compile_pipeline(load_spec(example), tmp_path / "pipeline.yaml")
    assert_golden((tmp_path / "pipeline.yaml").read_text(), *golden_of(GOLDEN, example.stem))


def test_two_processes_compile_the_same_bytes(tmp_path: Path) -> None:
    here, there = tmp_path / "here.yaml", tmp_path / "there.yaml"
    compile_pipeline(load_spec(ROOT / "examples/quickstart.yaml"), here)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # this process has a random one by default
    command = [sys.executable, "-m", "holdfast.pipelines.cli", "compile", str(ROOT / "examples/quickstart.yaml")]
    subprocess.run([*command, "-o", str(there)], env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
    assert here.read_bytes() == there.read_bytes()


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(AccessDeniedError, match="folder: cannot be written: Is a directory"):
        compile_pipeline(load_spec(ROOT / "examples/quickstart.yaml"), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_kfp_reads_the_file(tmp_path: Path) -> None:
    compile_pipeline(load_spec(ROOT / "examples/quickstart.yaml"), tmp_path / "pipeline.yaml")
    loaded = components.load_component_from_file(str(tmp_path / "pipeline.yaml"))
    fields = {"steps", "learning_rate", "layers", "hidden", "heads", "data"}
    assert set(loaded.component_spec.inputs) == {"spec", "overrides", "store", "salt", "replan", *fields}


def test_common_fields_are_typed_parameters_with_defaults_and_descriptions(
    ir: dict[str, Any],
) -> None:
    parameters = ir["root"]["inputDefinitions"]["parameters"]
    spec = load_spec(ROOT / "examples/quickstart.yaml")
    for name, kind, value in (
        ("steps", "NUMBER_INTEGER", spec.training.steps),
        ("learning_rate", "NUMBER_DOUBLE", spec.training.optimizer.learning_rate),
        ("hidden", "NUMBER_INTEGER", spec.model.hidden),
        ("data", "LIST", [{"uri": spec.data.sources[0].uri}]),
    ):
        assert (parameters[name]["parameterType"], parameters[name]["defaultValue"]) == (kind, value)
        assert parameters[name]["description"]


def test_the_spec_is_a_dictionary_with_what_a_person_wrote_in_its_order(ir: dict[str, Any]) -> None:
    shown = ir["root"]["inputDefinitions"]["parameters"]["spec"]
    assert shown["parameterType"] == "STRUCT"
    written = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())
    assert shown["defaultValue"] == written_spec(load_spec(ROOT / "examples/quickstart.yaml"))
    assert set(shown["defaultValue"]) == set(written)
    assert list(shown["defaultValue"])[:2] == ["name", "data"]  # in the order of docs/spec.md, not of the alphabet


def test_the_kfp_executor_prints_no_parameters(ir: dict[str, Any], tmp_path: Path) -> None:
    container = ir["deploymentSpec"]["executors"]["exec-artifacts"]["container"]
    command = [sys.executable, "-m", "kfp.dsl.executor_main", "--function_to_execute", "artifacts"]
    (tmp_path / "component.py").write_text(container["command"][-1])
    inputs = {"dataset": "s3://bucket/dataset", "model": "s3://bucket/model"}
    place = str(tmp_path / "addresses")
    shown = {"artifacts": [{"name": "a", "uri": place, "type": {"schemaTitle": "system.Markdown"}, "metadata": {}}]}
    executor_input = {
        "inputs": {"parameterValues": inputs},
        "outputs": {"artifacts": {"addresses": shown}, "outputFile": str(tmp_path / "out.json")},
    }
    command += [
        "--component_module_path",
        str(tmp_path / "component.py"),
        "--executor_input",
        json.dumps(executor_input),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "s3://bucket/model" in (tmp_path / "addresses").read_text()
    assert "s3://bucket" not in result.stdout + result.stderr
    assert len((result.stdout + result.stderr).splitlines()) < 6


def test_nothing_is_cached_by_kfp_and_every_step_is_retried_longer_than_any_training(ir: dict[str, Any]) -> None:
    tasks = {name: task for name, task in _all_tasks(ir).items() if "retryPolicy" in task}
    assert set(tasks) == {"preprocess", "train", "evaluate", "register", "notify"}
    assert _all_tasks(ir)["artifacts"]["cachingOptions"] == {}
    for task in tasks.values():
        assert task["cachingOptions"] == {}
        assert task["retryPolicy"]["backoffFactor"] == int(task["retryPolicy"]["backoffFactor"])
        assert int(task["retryPolicy"]["backoffMaxDuration"].removesuffix("s")) >= 30 * 24 * 3600


def test_the_branch_looks_at_the_word_of_the_verdict_only(ir: dict[str, Any]) -> None:
    conditions = [
        task["triggerPolicy"]["condition"]
        for task in _all_tasks(ir).values()
        if "condition" in task.get("triggerPolicy", {})
    ]
    assert conditions == [
        "inputs.parameter_values['pipelinechannel--train-scheme'] == 's3'",
        "inputs.parameter_values['pipelinechannel--evaluate-Output'] == 'blessed'",
    ]


def test_the_dataset_and_the_model_are_imported_in_a_group_that_ends_with_a_container(ir: dict[str, Any]) -> None:
    (group,) = [
        component["dag"]
        for component in ir["components"].values()
        if any(name.startswith("importer") for name in component.get("dag", {}).get("tasks", {}))
    ]
    importers = {name: task for name, task in group["tasks"].items() if name.startswith("importer")}
    kinds = {}
    for task in importers.values():
        component = ir["components"][task["componentRef"]["name"]]
        importer = ir["deploymentSpec"]["executors"][component["executorLabel"]]["importer"]
        # KFP's importer has the inputs of its DAG, and no outputs of tasks.
        assert importer["artifactUri"] == {"runtimeParameter": "uri"}
        assert importer.get("reimport", False) is False
        kinds[importer["typeSchema"]["schemaTitle"]] = task["inputs"]["parameters"]["uri"]["componentInputParameter"]
    assert kinds == {
        "system.Dataset": "pipelinechannel--preprocess-uri", "system.Model": "pipelinechannel--train-uri",
    }  # fmt: skip
    # An importer gives its DAG no output: a container after it does.
    (last,) = group["tasks"].keys() - importers.keys()
    assert set(group["tasks"][last]["dependentTasks"]) == importers.keys()


def test_links_for_a_running_training_are_artifacts_of_preprocess(ir: dict[str, Any]) -> None:
    artifact_types = {
        name: {
            artifact: kind["artifactType"]["schemaTitle"]
            for artifact, kind in component["outputDefinitions"]["artifacts"].items()
        }
        for name, component in ir["components"].items()
        if name in ("comp-preprocess", "comp-train")
    }
    assert artifact_types["comp-preprocess"]["links"] == "system.Markdown"
    assert artifact_types["comp-train"]["curves"] == "system.HTML"
    train = _all_tasks(ir)["train"]
    assert "preprocess" in train["dependentTasks"]


def test_notify_runs_after_success_and_failure(ir: dict[str, Any]) -> None:
    notify = ir["root"]["dag"]["tasks"]["notify"]
    assert notify["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert "taskFinalStatus" in notify["inputs"]["parameters"]["status"]


def test_an_image_replaces_that_of_every_step(tmp_path: Path) -> None:
    compile_pipeline(load_spec(ROOT / "examples/quickstart.yaml"), tmp_path / "p.yaml", "elsewhere/holdfast:9")
    executors = next(yaml.safe_load_all((tmp_path / "p.yaml").read_text()))["deploymentSpec"]["executors"]
    images = {executor["container"]["image"] for executor in executors.values() if "container" in executor}
    assert images == {"elsewhere/holdfast:9"}


CLUSTER = [
    "cluster.accelerator=nvidia",
    "cluster.slice=1g.10gb",
    "cluster.secrets=[bucket, webhook]",
    "cluster.steps.tolerations=[{key: team, effect: NoSchedule}]",
    "cluster.node_selector={pool: heavy}",
    "cluster.steps.node_selector={pool: light}",
    "cluster.steps.labels={team: llm}",
    "cluster.steps.annotations={example.com/cost: low}",
    "cluster.steps.register.node_selector={zone: a}",
    "cluster.volumes=[{claim: corpus, path: /corpus}]",
    "cluster.pull_secrets=[registry]",
    "cluster.environment={MLFLOW_TRACKING_URI: 'http://mlflow:5000', HOLDFAST_LOG: text}",
    "cluster.steps.preprocess.memory=1.5Gi",
    "cluster.ttl_minutes=90",
]
STEPS = {"preprocess", "train", "evaluate", "register", "notify", "artifacts"}
Placed = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def placed() -> Placed:
    """By step, the containers and the pods of a pipeline whose spec has many cluster fields."""
    pipeline, platform = pipeline_ir(load_spec(ROOT / "examples/quickstart.yaml", CLUSTER))
    containers = {
        name.removeprefix("exec-"): executor["container"]
        for name, executor in pipeline["deploymentSpec"]["executors"].items()
        if "container" in executor
    }
    kubernetes = platform["platforms"]["kubernetes"]
    assert kubernetes["pipelineConfig"] == {"resourceTtlOnCompletion": 90 * 60}
    pods = {
        name.removeprefix("exec-"): executor for name, executor in kubernetes["deploymentSpec"]["executors"].items()
    }
    assert set(containers) == set(pods) == STEPS
    return containers, pods


def test_every_pod_gets_the_secrets_the_place_and_the_volumes_of_the_spec(placed: Placed) -> None:
    for step, pod in placed[1].items():
        mounted = {secret["secretName"]: secret["mountPath"] for secret in pod["secretAsVolume"]}
        assert mounted == {"bucket": "/etc/holdfast/secrets/bucket", "webhook": "/etc/holdfast/secrets/webhook"}
        assert [mount.get("optional", False) for mount in pod["secretAsVolume"]] == [False, False]
        (settings,) = pod["configMapAsVolume"]
        assert settings["configMapName"] == "holdfast-settings"
        assert settings["mountPath"] == "/etc/holdfast/settings/holdfast-settings"
        assert settings["optional"] is True
        assert pod["tolerations"] == [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"}
            for key in ("team", *(["nvidia.com/gpu"] if step == "evaluate" else []))
        ]
        assert pod["nodeSelector"] == {"labels": {"pool": "light"} | ({"zone": "a"} if step == "register" else {})}
        assert pod["podMetadata"]["labels"]["team"] == "llm"
        assert pod["podMetadata"]["annotations"] == {"example.com/cost": "low"}
        assert [(mount["constant"], mount["mountPath"]) for mount in pod["pvcMount"]] == [("corpus", "/corpus")]
        assert [secret["secretName"] for secret in pod["imagePullSecret"]] == ["registry"]
        assert pod["securityContext"] == {"runAsNonRoot": True}


def test_a_pod_knows_itself_and_the_workflow_that_owns_it(placed: Placed) -> None:
    for pod in placed[1].values():
        assert {field["name"]: field["fieldPath"] for field in pod["fieldPathAsEnv"]} == {
            "HOLDFAST_POD_NAME": "metadata.name",
            "HOLDFAST_POD_UID": "metadata.uid",
            "HOLDFAST_POD_NAMESPACE": "metadata.namespace",
            "HOLDFAST_NODE_NAME": "spec.nodeName",
            "HOLDFAST_WORKFLOW": "metadata.labels['workflows.argoproj.io/workflow']",
        }


def test_the_environment_of_the_spec_is_in_every_step(placed: Placed) -> None:
    containers, _ = placed
    for step in STEPS:
        variables = {entry["name"]: entry["value"] for entry in containers[step]["env"]}
        assert variables.pop("HOLDFAST_CACHE_GIB") == ("12" if step in ("preprocess", "evaluate") else "3")
        assert variables.pop("HOLDFAST_LAUNCHER", None) == ("kubernetes" if step == "train" else None)
        assert variables == {"HOLDFAST_LOG": "text", "MLFLOW_TRACKING_URI": "http://mlflow:5000"}


def test_without_settings_and_secrets_in_the_spec_every_step_takes_those_of_the_place() -> None:
    _, platform = pipeline_ir(load_spec(ROOT / "examples/quickstart.yaml"))
    for pod in platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values():
        ((settings,), (secret,)) = pod["configMapAsVolume"], pod["secretAsVolume"]
        assert (settings["configMapName"], settings["optional"]) == ("holdfast-settings", True)
        assert (secret["secretName"], secret["optional"]) == ("holdfast-secrets", True)


def test_only_evaluate_gets_the_slice_and_the_image_that_can_use_it(placed: Placed) -> None:
    containers, _ = placed
    assert containers["evaluate"]["resources"]["accelerator"]["resourceType"] == "nvidia.com/mig-1g.10gb"
    assert containers["evaluate"]["image"].startswith("holdfast-train-nvidia:")
    for step in STEPS - {"evaluate"}:
        assert "accelerator" not in containers[step]["resources"]
        assert containers[step]["image"].startswith("holdfast:")


def test_the_limits_of_a_step_are_its_requests(placed: Placed) -> None:
    for container in placed[0].values():
        resources = container["resources"]
        assert resources["resourceMemoryLimit"] == resources["resourceMemoryRequest"]
        assert resources["resourceCpuLimit"] == resources["resourceCpuRequest"]
    assert placed[0]["preprocess"]["resources"]["resourceMemoryLimit"] == str(3 * 2**29)  # KFP supports no fractions


def test_no_secret_and_no_value_of_one_is_in_the_file(placed: Placed) -> None:
    assert "secretAsEnv" not in str(placed)


def _all_tasks(ir: dict[str, Any]) -> dict[str, Any]:
    dags = [ir["root"], *ir["components"].values()]
    return {name: task for dag in dags for name, task in dag.get("dag", {}).get("tasks", {}).items()}


def test_a_scheduled_pipeline_runs_its_steps_only_if_the_trigger_is_due(tmp_path: Path) -> None:
    spec = load_spec(EXAMPLES[0])
    plain, scheduled = (pipeline_ir(spec, scheduled=scheduled)[0] for scheduled in (False, True))
    (guarded,) = scheduled["components"]["comp-exit-handler-1"]["dag"]["tasks"].keys() - {"trigger"}
    condition = scheduled["components"]["comp-exit-handler-1"]["dag"]["tasks"][guarded]["triggerPolicy"]["condition"]
    assert condition.endswith("== 'due'")
    inside = scheduled["components"][f"comp-{guarded}"]["dag"]["tasks"]
    assert {"preprocess", "train", "evaluate"} <= inside.keys()
    assert "trigger" not in plain["components"]["comp-exit-handler-1"]["dag"]["tasks"]
