"""Scripts and functions of a user on backends: what is on the command line of their jobs, and whom `resume` trusts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.submission import publish_request_code, request, resume
from holdfast.code.resolve import require_submitted
from holdfast.launch.emitters import objects_for, training_job
from holdfast.pipelines.backends.argo import argo_objects
from holdfast.pipelines.backends.kubeflow.compile import pipeline_ir
from holdfast.pipelines.backends.record import find_record, keep, record_of
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.backends.slurm.emit import jobs_of
from holdfast.pipelines.paths import load_spec
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


def test_a_sweep_over_a_script_is_refused(spec: Spec) -> None:
    with pytest.raises(SpecError, match=r"train\.script: is a training script, and a sweep works only"):
        request(spec, over=["train.log_every=1,2"])


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
