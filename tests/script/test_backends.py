"""Scripts and functions of a user on backends: what is on the command line of their jobs, and whom `resume` trusts."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.submission import publish_request_code, request, resume
from holdfast.code.resolve import require_submitted
from holdfast.launch.emitters import objects_for, training_job
from holdfast.pipelines.backends.argo import argo_objects
from holdfast.pipelines.backends.argo.emit import sweep_objects
from holdfast.pipelines.backends.kubeflow.compile import pipeline_ir, sweep_ir
from holdfast.pipelines.backends.record import find_record, keep, record_of
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.backends.slurm.emit import jobs_of
from holdfast.pipelines.paths import load_spec
from holdfast.pipelines.trials import grid, plan_trials
from holdfast.search.method import Search
from holdfast.spec import Spec
from holdfast.spec.errors import MissingError, SpecError
from holdfast.spec.script import ScriptInput
from holdfast.store import open_store

LOOP = Path(__file__).parents[2] / "examples/scripts/loop/spec.yaml"
ARGUMENTS = ["$(HOME) {{x}}", "--store", "ü\n"]


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spec:
    """The bare loop with arguments that engines could change."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOLDFAST_STORE", (tmp_path / "store").as_uri())
    return load_spec(LOOP, [f"train.arguments={json.dumps(ARGUMENTS)}"])


def test_jobs_of_every_scheduler_have_the_digest_and_the_arguments_on_their_command_line(spec: Spec) -> None:
    job = training_job(spec, "0123456789abcdef", 3, "s3://bucket/prefix")
    assert job.command[-8:] == ["--code", spec.code, "--entry", "train.py", "--", *ARGUMENTS]
    assert job.environment["PYTHONHASHSEED"] == "0"
    manifest = json.dumps(objects_for(job)[-1])
    assert str(spec.code) in manifest
    assert json.dumps("$$(HOME) {{x}}") in manifest  # the kubelet would replace the other
    steps = jobs_of(request(spec, backend="slurm"))
    assert [step["job"] for step in steps] == ["train", "notify"]
    assert f"--set=code={spec.code}" in steps[0]["script"]
    assert f"--set=train.arguments={json.dumps(ARGUMENTS)}" in steps[0]["script"]


def test_inputs_are_on_the_command_lines(spec: Spec) -> None:
    given = {"name": "words", "uri": "s3://bucket/words", "digest": "0" * 64}
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"inputs": (ScriptInput(**given),)})})
    job = training_job(spec, "0123456789abcdef", 3, "s3://bucket/prefix")
    place = {"digest": "0" * 64, "uri": "s3://bucket/words"}
    assert job.command[-6:-3] == ["--inputs", json.dumps({"words": place}, separators=(",", ":")), "--"]
    steps = jobs_of(request(spec, backend="slurm"))
    assert f"--set=train.inputs={json.dumps([given])}" in steps[0]["script"]


def test_pipelines_of_a_script_begin_with_its_training(spec: Spec) -> None:
    spec = spec.with_overrides({"train.arguments": ["40"]})
    (template,) = argo_objects(spec)
    dags = {one["name"]: one["dag"] for one in template["spec"]["templates"] if "dag" in one}
    assert [task["name"] for task in dags["train-and-register"]["tasks"]] == ["train"]
    pipeline, _ = pipeline_ir(spec)
    parts = [pipeline["root"], *pipeline["components"].values()]
    tasks = {name for dag in parts for name in dag.get("dag", {}).get("tasks", {})}
    assert {"notify", "train"} <= tasks
    assert not {"preprocess", "trigger"} & tasks
    given = pipeline["root"]["inputDefinitions"]["parameters"]["spec"]["defaultValue"]
    assert str(spec.code) in json.dumps(given)


OVER = ["""train.arguments=["20"],["40", "a,b"]"""]
EVALUATED = {"evaluation.command": ["python", "train.py"], "evaluation.metrics": [{"name": "score"}]}


def test_trials_of_a_script_change_its_arguments_and_begin_with_training(spec: Spec) -> None:
    evaluated = spec.with_overrides(EVALUATED)
    assert grid(evaluated, OVER) == (("""train.arguments=["20"]""",), ("""train.arguments=["40", "a,b"]""",))
    drawn = plan_trials(evaluated, Search("random", tuple(OVER), 2))[0]
    assert set(drawn) == set(grid(evaluated, OVER))
    wanted = request(evaluated, over=OVER, backend="slurm")
    (template,) = sweep_objects(evaluated, wanted.trials)
    (dag,) = (one["dag"] for one in template["spec"]["templates"] if one["name"] == "sweep")
    names = ["train-1", "evaluate-1", "train-2", "evaluate-2", "compare", "register"]
    assert [task["name"] for task in dag["tasks"]] == names
    assert "dependencies" not in dag["tasks"][0]
    assert "depends" not in dag["tasks"][0]
    assert "preprocess" not in [one["name"] for one in template["spec"]["templates"]]
    pipeline, _ = sweep_ir(evaluated, wanted.trials)
    parts = [pipeline["root"], *pipeline["components"].values()]
    tasks = {name for dag in parts for name in dag.get("dag", {}).get("tasks", {})}
    assert {"train", "train-2", "evaluate", "evaluate-2", "compare", "register", "notify"} <= tasks
    assert not {"preprocess", "trigger"} & tasks
    jobs = {job["job"]: job["sbatch"] for job in jobs_of(wanted)}
    assert list(jobs) == ["train", "evaluate", "compare", "register", "notify"]
    assert not any("preprocess" in job["script"] for job in jobs_of(wanted))


def test_a_sweep_over_a_script_needs_a_metric_that_ranks_its_trials(spec: Spec) -> None:
    with pytest.raises(SpecError, match=r"evaluation\.metrics: is needed by a sweep over a script"):
        request(spec, over=OVER)
    with pytest.raises(SpecError, match="a script has none"):
        request(spec.with_overrides(EVALUATED), over=Search("tpe", tuple(OVER), 4))


@pytest.mark.parametrize(
    "change",
    [{"train.arguments": ["7"]}, {"train.script": "mine.py"}, {"cluster.environment": {"PYTHONPATH": "/else"}}, None],
)
def test_resume_refuses_a_spec_in_the_store_that_was_not_submitted_from_here(
    spec: Spec, tmp_path: Path, change: dict[str, Any] | None
) -> None:
    url = (tmp_path / "store").as_uri()
    wanted = request(spec, backend="slurm")
    publish_request_code(wanted, "slurm")
    keep(record_of(wanted, "slurm", "x"), url)
    kept = find_record(open_store(url), wanted.run_id)
    assert kept is not None
    require_submitted(kept.request.executed, "as it was submitted")
    changed = wanted if change is None else RunRequest(spec.with_overrides(change), run_id=wanted.run_id)
    other_image = "" if change else "evil"
    assert keep(record_of(RunRequest(changed.spec, image=other_image, run_id=wanted.run_id), "slurm", "x"), url) == ""
    with pytest.raises(MissingError, match="none that was submitted from this machine"):
        resume(wanted.run_id)
