"""Runs and recurring runs from the forms of KFP's UI, built with KFP's types: which values arrive at the steps.

The values that the forms send follow kubeflow/pipelines 2.17: frontend/src/pages/NewRunV2.tsx (`startRun`) and
frontend/src/lib/NewRunParametersUtils.ts (`convertInput`).
"""

import json
from pathlib import Path
from typing import Any

import kfp_server_api
import pytest
from typer.testing import CliRunner

from holdfast.pipelines.backends.kubeflow.connection import KubeflowRefusedError, Server
from holdfast.pipelines.backends.kubeflow.submit import Uploaded, experiment, upload
from holdfast.pipelines.cli import app
from holdfast.spec import Spec, parse_spec, run_id
from holdfast.spec.engine_text import from_struct, unescape_tree
from holdfast.spec.load import written_spec
from holdfast.steps import parameter_values
from holdfast.steps.parameter_overrides import changed_parameters
from tests.kubeflow_server import KubeflowServer, checked
from tests.pipelines.backends.kubeflow.conftest import spec

DATASET = "0123456789abcdef"
CRON = {"cron_schedule": {"cron": "0 0 3 * * 1"}}
EVERY_HOUR = {"periodic_schedule": {"interval_second": "3600"}}


def definitions(kubeflow: KubeflowServer, version: Uploaded) -> dict[str, Any]:
    """The parameters of an uploaded pipeline."""
    pipeline = kubeflow.versions[version.version_id]["pipeline_spec"]["pipeline_spec"]
    return dict(pipeline["root"]["inputDefinitions"]["parameters"])


def form(known: dict[str, Any], **typed: str) -> dict[str, Any]:
    """The parameters that a form sends: its texts, which are the defaults unless the user typed other ones."""
    texts = {}
    for name, definition in known.items():
        default, kind = definition["defaultValue"], definition["parameterType"]
        if kind == "NUMBER_INTEGER":
            default = int(default)  # JavaScript writes an integer without a fraction
        texts[name] = default if kind == "STRING" else json.dumps(default)
    values = {}
    for name, text in {**texts, **typed}.items():
        if text == "" and known[name]["parameterType"] != "STRING":
            continue  # `undefined`, which JSON omits
        values[name] = text if known[name]["parameterType"] == "STRING" else json.loads(text)
    return values


def recurring(server: Server, version: Uploaded, parameters: dict[str, Any], **more: Any) -> Any:
    """Create the recurring run that a form with these parameters requests."""
    body = {
        "description": "", "display_name": "Weekly, by hand", "experiment_id": experiment(server, "small"),
        "pipeline_version_reference": {
            "pipeline_id": version.pipeline_id, "pipeline_version_id": version.version_id,
        },
        "runtime_config": {"parameters": parameters}, "service_account": "", "max_concurrency": "10",
        "no_catchup": False, "mode": "ENABLE", "trigger": CRON, **more,
    }  # fmt: skip
    assert checked(json.dumps(body).encode(), "V2beta1RecurringRun") == body  # no field that KFP does not know
    recurring_run = kfp_server_api.V2beta1RecurringRun(**body)
    # and no field with another name
    assert server.recurring_runs.api_client.sanitize_for_serialization(recurring_run) == body
    return server.recurring_runs.recurring_run_service_create_recurring_run(recurring_run=recurring_run)


def at_the_steps(kubeflow: KubeflowServer, version: Uploaded, fired: str, compiled: Spec) -> tuple[Spec, str]:
    """The spec and the salt that the steps of a run get. KFP adds the defaults of missing parameters."""
    defaults = {name: definition["defaultValue"] for name, definition in definitions(kubeflow, version).items()}
    parameters = {**defaults, **kubeflow.runs[fired]["runtime_config"]["parameters"]}
    overrides = [*changed_parameters(parameters, parameter_values(compiled)), *parameters["overrides"]]
    return parse_spec(from_struct(unescape_tree(through_struct(parameters["spec"]))), overrides), parameters["salt"]


def through_struct(value: Any) -> Any:
    """A dictionary as the API server, the driver and the launcher hold it: sorted names, every number a double."""
    return json.loads(json.dumps(value, sort_keys=True), parse_int=float)


def test_the_form_shows_what_a_person_wrote_and_editing_it_there_changes_the_run(
    kubeflow: KubeflowServer, server: Server
) -> None:
    text = "name: small\ndata: {sources: [{uri: s3://b/text}]}\ntraining: {steps: 300, seed: 9223372036854775807}\n"
    written = parse_spec(text)
    version = upload(server, written)
    shown = definitions(kubeflow, version)["spec"]
    assert shown["parameterType"] == "STRUCT"
    assert shown["defaultValue"] == {
        "name": "small", "data": {"sources": [{"uri": "s3://b/text"}]},
        "training": {"steps": 300, "seed": "9223372036854775807"},
    }  # fmt: skip
    edited = {**shown["defaultValue"], "training": {**shown["defaultValue"]["training"], "log_every": 7}}
    recurring_run = recurring(server, version, form(definitions(kubeflow, version), spec=json.dumps(edited)))
    step_spec, _ = at_the_steps(kubeflow, version, kubeflow.fire(recurring_run.recurring_run_id), written)
    assert step_spec == parse_spec(text, ["training.log_every=7"])


def test_a_spec_is_printed_as_the_json_that_the_form_takes(
    kubeflow: KubeflowServer, server: Server, tmp_path: Path
) -> None:
    text = "name: small\ndata: {sources: [{uri: s3://b/text}]}\nevaluation: {prompts: ['{{x}} $(y)\nz']}\n"
    (tmp_path / "spec.yaml").write_text(text)
    pasted = CliRunner().invoke(app, ["compile", str(tmp_path / "spec.yaml"), "--target", "form"]).output
    version = upload(server, spec())
    recurring_run = recurring(server, version, form(definitions(kubeflow, version), spec=pasted))
    step_spec, _ = at_the_steps(kubeflow, version, kubeflow.fire(recurring_run.recurring_run_id), spec())
    assert step_spec == parse_spec(text)


@pytest.mark.parametrize("trigger", [CRON, EVERY_HOUR], ids=["cron", "periodic"])
def test_a_recurring_run_of_the_form_as_it_opens_is_the_compiled_spec(
    kubeflow: KubeflowServer, server: Server, trigger: dict[str, Any]
) -> None:
    version = upload(server, spec())
    recurring_run = recurring(server, version, form(definitions(kubeflow, version)), trigger=trigger)
    step_spec, salt = at_the_steps(kubeflow, version, kubeflow.fire(recurring_run.recurring_run_id), spec())
    assert run_id(step_spec, DATASET, salt) == run_id(spec(), DATASET)


@pytest.mark.parametrize(
    ("typed", "changes"),
    [
        ({"steps": "50"}, ["training.steps=50"]),
        ({"learning_rate": "1e-5"}, ["training.optimizer.learning_rate=0.00001"]),
        ({"data": '[{"uri": "s3://bucket/text", "weight": 2}]'}, ["data.sources=[{uri: s3://bucket/text, weight: 2}]"]),
        (
            {"overrides": '["training.steps=7", "training.log_every=3"]', "steps": "50"},
            ["training.steps=7", "training.log_every=3"],
        ),
        ({"steps": "", "data": "", "overrides": "", "replan": ""}, []),  # emptied fields mean the defaults
        ({"spec": json.dumps(written_spec(spec("training.steps=9")))}, ["training.steps=9"]),
        ({"spec": json.dumps(spec("training.steps=9").model_dump(mode="json"))}, ["training.steps=9"]),
    ],
    ids=["a whole number", "a number", "a list", "overrides go last", "emptied", "the spec", "with all defaults"],
)
def test_values_typed_into_the_form_reach_the_steps(
    kubeflow: KubeflowServer, server: Server, typed: dict[str, str], changes: list[str]
) -> None:
    version = upload(server, spec())
    recurring_run = recurring(server, version, form(definitions(kubeflow, version), **typed))
    step_spec, _ = at_the_steps(kubeflow, version, kubeflow.fire(recurring_run.recurring_run_id), spec())
    assert step_spec == spec(*changes)


def test_a_salt_with_the_scheduled_time_gives_each_firing_a_separate_run(
    kubeflow: KubeflowServer, server: Server
) -> None:
    version = upload(server, spec())
    week = "{{$.scheduledTime.strftime('%Y-%m-%d')}}"
    recurring_run = recurring(server, version, form(definitions(kubeflow, version), salt=week))
    salts = []
    for moment in (0.0, 7 * 86400.0, 7 * 86400.0 + 60):
        _, salt = at_the_steps(kubeflow, version, kubeflow.fire(recurring_run.recurring_run_id, moment), spec())
        salts.append(salt)
    assert salts == ["1970-01-01", "1970-01-08", "1970-01-08"]


def test_max_concurrency_of_the_form_limits_runs_to_one(kubeflow: KubeflowServer, server: Server) -> None:
    version = upload(server, spec())
    recurring_run = recurring(
        server, version, form(definitions(kubeflow, version)), max_concurrency="1", no_catchup=True
    )
    first = kubeflow.fire(recurring_run.recurring_run_id)
    assert kubeflow.fire(recurring_run.recurring_run_id) == ""
    kubeflow.progress(first, "SUCCEEDED", {})
    assert kubeflow.fire(recurring_run.recurring_run_id)


def test_parameters_of_the_form_apply_to_a_newer_pipeline_version(kubeflow: KubeflowServer, server: Server) -> None:
    version = upload(server, spec())
    latest = {"pipeline_id": version.pipeline_id}
    parameters = form(definitions(kubeflow, version), steps="12")
    recurring_run = recurring(server, version, parameters, pipeline_version_reference=latest)
    newer = upload(server, spec("training.steps=9", "model.layers=2"))
    assert newer.version_id != version.version_id
    compiled = spec("training.steps=9", "model.layers=2")
    step_spec, _ = at_the_steps(kubeflow, newer, kubeflow.fire(recurring_run.recurring_run_id), compiled)
    assert step_spec == spec("training.steps=12")


@pytest.mark.parametrize(
    ("name", "value"), [("steps", "50"), ("data", "s3://bucket"), ("replan", "true"), ("spec", "name: x")]
)
def test_a_value_of_another_kind_is_refused_before_anything_runs(
    kubeflow: KubeflowServer, server: Server, name: str, value: object
) -> None:
    version = upload(server, spec())
    with pytest.raises(kfp_server_api.ApiException, match=f"parameter {name} requires type"):
        recurring(server, version, {**form(definitions(kubeflow, version)), name: value})
    assert not kubeflow.recurring


def test_a_run_of_the_form_has_no_more_fields_than_kfp_knows(kubeflow: KubeflowServer, server: Server) -> None:
    version = upload(server, spec())
    body = {
        "description": "", "display_name": "Run of v-1 (abcde)", "experiment_id": experiment(server, "small"),
        "pipeline_version_reference": {"pipeline_id": version.pipeline_id, "pipeline_version_id": version.version_id},
        "runtime_config": {"parameters": form(definitions(kubeflow, version), steps="12")},
        "service_account": "training",
    }  # fmt: skip
    assert checked(json.dumps(body).encode(), "V2beta1Run") == body
    api_run = server.runs.run_service_create_run(run=kfp_server_api.V2beta1Run(**body))
    step_spec, _ = at_the_steps(kubeflow, version, api_run.run_id, spec())
    assert step_spec == spec("training.steps=12")
    assert kubeflow.runs[api_run.run_id]["service_account"] == "training"


def test_our_own_requests_pass_the_same_examination(kubeflow: KubeflowServer, server: Server) -> None:
    with pytest.raises(KubeflowRefusedError, match="requires type"):
        server.ask(
            server.runs.run_service_create_run,
            run=kfp_server_api.V2beta1Run(
                display_name="x", experiment_id=experiment(server, "small"),
                pipeline_version_reference=upload(server, spec()).reference,
                runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters={"steps": "50"}),
            ),
        )  # fmt: skip
