"""A user's text reaches the steps unchanged: every text field of the spec, on every engine."""

import argparse
import copy
import json
import shlex
import subprocess
from dataclasses import replace
from functools import cache
from typing import Any, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from holdfast.launch.emitters import objects_for, training_job
from holdfast.pipelines.backends.argo import argo_objects
from holdfast.pipelines.backends.argo.backend import Argo
from holdfast.pipelines.backends.argo.emit import sweep_objects
from holdfast.pipelines.backends.kubeflow.compile import order_text, pipeline_ir
from holdfast.pipelines.backends.ray.emit import SPEC, RayOrder
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.backends.slurm.emit import Chain, options_of, script_of
from holdfast.serving.kserve import inference_service
from holdfast.spec import Spec, SpecError, dump_spec, parse_spec
from holdfast.spec.engine_text import (
    VARIABLE,
    double_dollars,
    escape,
    escape_for_ray,
    escape_tree,
    restore_environment,
    unescape,
    unescape_tree,
)
from holdfast.spec.load import dump_written, written_spec
from holdfast.steps.adapters import parser_of
from holdfast.steps.command_line import overrides_of
from tests.cluster.container import expanded
from tests.pipelines.backends.engines import (
    through_argo,
    through_kfp_launcher,
    through_kfp_server,
    through_ray,
)

TEMPLATES = (
    "image: {{$.Values.image}}",
    "id {{$.pipeline_job_uuid}} {{$.pipeline_job_name}} end",
    "{{$.pipeline_job_name}}",
    "store {{$.inputs.parameters['job']}} end",
    "{{$.json_escape[1]}}",
    "plain {{ name }} {{$}}",
    "{{$.workspace_path}}",
    "{{workflow.name}} and {{workflow.parameters.salt}}",
    "{{inputs.parameters.task}}",
    "{{=1+1}}",
    "{{",
    "{{{x}}}",
    "}}",
    "{{pod.name}} {{a{{workflow.name}}",
    "[[RunUUID]] [[ScheduledTime]] [[CurrentTime.2006]] [[Index]]",
    "[[[[RunUUID]]",
    "{{$.scheduledTime.strftime('%Y')}}",
    "/kfp-workspace/x",
    "{{channel:task=a;name=b;type=String;}}",
    "$(HOLDFAST_POD_NAME)",
    "$$(HOLDFAST_POD_NAME)",
    "$$$",
    "$HOME ${HOME} ${NO_SUCH} $",
    "`id` $(id) ; 'a' \"b\" \\",
    "\\u007b{ \\u005b \\u005cu007b \\U000e0067",
    "%j %% %A",
    "line\nand line\ttab",
    "\x7f\x1b[0m\x85",
    "\U000e0067 é \u2028 \U0001f600",
    "{{ `x` }} {{.Name}}",
)
ALL = " | ".join(TEMPLATES)
texts = st.lists(
    st.sampled_from([*TEMPLATES, "{", "[", "$", "(", "\\", "u007b", "u005c", "workflow.name", "}}", "a"]), max_size=6
).map("".join)
quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def with_texts(section: BaseModel, text: str) -> Any:
    """The section with `text` in each field, list and mapping that accepts any text. Nothing is validated: the rules
    would refuse the text as a path or a URL, and the place of a text does not matter here."""
    changed: dict[str, Any] = {}
    for name, info in type(section).model_fields.items():
        value, kinds = getattr(section, name), (info.annotation, *get_args(info.annotation))
        free = not any(getattr(constraint, "pattern", None) for constraint in info.metadata)
        if isinstance(value, BaseModel):
            changed[name] = with_texts(value, text)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            changed[name] = tuple(with_texts(item, text) for item in value)
        elif free and str in kinds and get_origin(info.annotation) is tuple:
            changed[name] = (text,)
        elif free and get_origin(info.annotation) is dict and get_args(info.annotation)[1] is str:
            changed[name] = {"NAME": text}
        elif free and str in kinds:
            changed[name] = "0 3 * * 1" if name == "cron" else text  # a cron expression is parsed, and is not free text
    return section.model_copy(update=changed)


@cache
def base() -> Spec:
    return parse_spec("{name: a, data: {sources: [{uri: x}, {uri: y}]}, cluster: {volumes: [{claim: c, path: /v}]}}")


def filled(text: str) -> Spec:
    """A spec with the text in all its fields, except where an engine refuses it (see below)."""
    filled_spec: Spec = with_texts(base(), text)
    steps = filled_spec.cluster.steps.model_copy(update={"annotations": {}})
    return filled_spec.model_copy(
        update={"cluster": filled_spec.cluster.model_copy(update={"steps": steps, "image": "i"})}
    )


def request(text: str) -> RunRequest:
    return RunRequest(filled(text), store=f"s3://b/{text}", salt=text, run_id="0123456789abcdef")


def test_every_free_field_has_the_test_text() -> None:
    assert dump_spec(filled("%s-text")).count("%s-text") >= 20


@given(texts)
def test_escaped_text_has_no_engine_placeholders_and_is_restored(text: str) -> None:
    for escaped in (escape(text), escape_for_ray(text)):
        assert unescape(escaped) == text
        assert not any(
            token in escaped for token in ("{{", "[[R", "[[S", "[[C", "[[I", "$(", "$$", "/kfp-workspace", "\x7f")
        )
    assert "$" not in escape_for_ray(text)
    assert unescape_tree(escape_tree({text: [text, 1, None]})) == {text: [text, 1, None]}


@pytest.mark.parametrize("text", ["costs $5, or $x", "{a: [1, {b: 2}]}", "a\\b \\n \\u00e9 ü 😀", "%j", ""])
def test_an_ordinary_text_stays_as_it_is(text: str) -> None:
    assert escape(text) == text
    assert unescape(text) == text


@given(texts)
def test_a_variable_with_doubled_dollars_is_restored_by_the_kubelet(text: str) -> None:
    assert expanded(double_dollars(text), {"HOLDFAST_POD_NAME": "pod", "id": "x"}) == text


@given(texts, st.randoms())
@quick
def test_kfp_passes_the_parameters_of_a_run_to_a_step_as_they_were_written(text: str, order_of: Any) -> None:
    order = request(text)
    names = [*order.parameters(), "compiled"]
    order_of.shuffle(names)
    step_parameters = {**order.escaped_parameters(), "compiled": escape_tree({"data": [{"uri": text}]})}
    inputs = through_kfp_launcher(through_kfp_server(step_parameters), names)
    assert expanded(json.dumps(inputs), {"HOLDFAST_POD_NAME": "pod", "id": "x"}) == json.dumps(inputs)
    assert unescape_tree(inputs) == {**order.parameters(), "compiled": {"data": [{"uri": text}]}}


@given(texts)
@quick
def test_kfp_local_passes_the_parameters_of_a_run_to_a_step_as_they_were_written(text: str) -> None:
    from kfp.local.placeholder_utils import replace_placeholders

    order = request(text)
    command = replace_placeholders(
        ["--executor_input", "{{$}}"],
        {"inputs": {"parameterValues": order.escaped_parameters()}, "outputs": {"outputFile": "o"}},
        "resource", "task", "root", "1",
    )  # fmt: skip
    assert unescape_tree(json.loads(command[1])["inputs"]["parameterValues"]) == order.parameters()


def test_a_compiled_kfp_pipeline_keeps_the_texts_of_every_field() -> None:
    spec = filled(ALL)
    whole, platform = through_argo(pipeline_ir(spec), {})
    defaults = {
        name: definition.get("defaultValue")
        for name, definition in whole["root"]["inputDefinitions"]["parameters"].items()
    }
    assert unescape_tree(defaults["spec"]) == written_spec(spec)
    assert [source["uri"] for source in unescape_tree(defaults["data"])] == [ALL, ALL]
    constants = [
        argument["runtimeValue"]["constant"]
        for component in (whole["root"], *whole["components"].values())
        for task in component.get("dag", {}).get("tasks", {}).values()
        for name, argument in task.get("inputs", {}).get("parameters", {}).items()
        if name == "compiled"
    ]
    assert len(constants) > 3
    assert all([source["uri"] for source in unescape_tree(constant)["data"]] == [ALL, ALL] for constant in constants)
    for executor in whole["deploymentSpec"]["executors"].values():
        if "container" in executor:
            variables = {
                variable["name"]: expanded(variable["value"], {"HOLDFAST_POD_NAME": "pod"})
                for variable in executor["container"]["env"]
            }
            restore_environment(variables)
            assert variables["NAME"] == ALL
            assert VARIABLE not in variables
    assert platform


@given(texts)
@settings(quick, max_examples=8)
def test_argo_passes_every_text_to_a_step_as_it_was_written(text: str) -> None:
    order = request(text)
    template, workflow = Argo(namespace="n").objects(order)
    values = {
        f"workflow.parameters.{parameter['name']}": parameter["value"]
        for parameter in (*template["spec"]["arguments"]["parameters"], *workflow["spec"]["arguments"]["parameters"])
    }
    outputs = {"inputs.parameters.dataset-id": "d", "inputs.parameters.run-id": "r", "workflow.status": "Succeeded"}
    values |= {**outputs, "workflow.failures": "[]"}
    for step in (through_argo(entry, values) for entry in template["spec"]["templates"] if "container" in entry):
        assert unescape(step["inputs"]["artifacts"][0]["raw"]["data"]) == dump_written(order.spec)
        arguments = _arguments(step["name"], step["container"]["args"])
        assert arguments.store == order.store
        assert getattr(arguments, "salt", text) == text
        assert [source["uri"] for source in json.loads(arguments.compiled).get("data", [])] in ([text, text], [])
        assert [source["uri"] for source in json.loads(arguments.data)] == [text, text]
        _same_variable(step["container"]["env"], text)


def _arguments(step: str, words: list[str]) -> argparse.Namespace:
    """The arguments that a step parses from its command line."""
    kubelet = [expanded(argument, {"HOLDFAST_POD_NAME": "pod", "id": "x", "NAME": "y"}) for argument in words]
    namespace = parser_of(step).parse_args(kubelet)
    assert namespace.escaped
    return argparse.Namespace(**unescape_tree(vars(namespace)))


def _same_variable(entries: list[dict[str, Any]], text: str) -> None:
    variables = {
        entry["name"]: expanded(entry["value"], {"HOLDFAST_POD_NAME": "pod"}) for entry in entries if "value" in entry
    }
    restore_environment(variables)
    assert variables["NAME"] == text


@pytest.mark.parametrize("text", TEMPLATES)
def test_a_sweep_on_argo_passes_the_overrides_of_its_trials(text: str) -> None:
    trials = tuple((f"model.init_from={text}{number}",) for number in (1, 2))
    (template,) = sweep_objects(filled("x"), trials)
    assert template["metadata"]["name"] == "holdfast-a-sweep"
    by_name = {entry["name"]: entry for entry in template["spec"]["templates"]}
    tasks = through_argo(by_name["sweep"], {"tasks.preprocess.outputs.parameters.dataset-id": "d"})["dag"]["tasks"]
    arguments_of = {
        task["name"]: {parameter["name"]: parameter["value"] for parameter in task["arguments"]["parameters"]}
        for task in tasks
    }
    inputs = {f"inputs.parameters.{name}": value for name, value in arguments_of["train-2"].items()}
    train = through_argo(by_name["train"], inputs | {"workflow.parameters.replan": "false"})
    assert overrides_of(_arguments("train", train["container"]["args"])) == list(trials[1])
    compare = through_argo(by_name["compare"], {})
    assert json.loads(_arguments("compare", compare["container"]["args"]).trials) == [list(trial) for trial in trials]


@pytest.mark.parametrize("field", ["cluster.steps.annotations", "cluster.image", "cluster.volumes"])
@pytest.mark.parametrize("text", ["a{{x}}", "{{workflow.name}}", "{{", "\x7f"])
def test_a_text_that_no_step_can_restore_is_refused_for_argo_and_kubeflow(field: str, text: str) -> None:
    cluster = base().cluster
    if field == "cluster.image":
        cluster = cluster.model_copy(update={"image": text})
    elif field == "cluster.volumes":
        cluster = cluster.model_copy(update={"volumes": (cluster.volumes[0].model_copy(update={"path": f"/{text}"}),)})
    else:
        steps = cluster.steps.model_copy(update={"annotations": {"note": text}})
        cluster = cluster.model_copy(update={"steps": steps})
    spec = base().model_copy(update={"cluster": cluster})
    for render in (
        argo_objects,
        lambda one: order_text(RunRequest(one)),
        lambda one: sweep_objects(one, (("a=1",), ("a=2",))),
    ):
        with pytest.raises(SpecError) as error:
            render(spec)
        (problem,) = error.value.problems
        assert problem.field.startswith(field)
        assert problem.value in (text, f"/{text}")
        assert "without {{" in problem.remedy


@given(texts)
@quick
def test_the_pods_of_ranks_have_every_variable_and_argument_as_it_was_written(text: str) -> None:
    spec = filled(text)
    draft = training_job(spec, "0123456789abcdef", 1, f"s3://b/{text}")
    for kind in ("pytorchjob", "trainjob", "volcano"):
        job = replace(draft, cluster=draft.cluster.model_copy(update={"job": kind}))
        for container in _containers(objects_for(job)):
            command = [expanded(argument, {"HOLDFAST_POD_NAME": "pod", "id": "x"}) for argument in container["command"]]
            assert f"s3://b/{text}" in command
            _same_variable(container["env"], text)


def _containers(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, dict):
        own = [
            container
            for container in node.get("containers", ())
            if isinstance(container, dict) and "command" in container
        ]
        return own + [container for value in node.values() for container in _containers(value)]
    return [container for value in node for container in _containers(value)] if isinstance(node, list) else []


@given(texts)
@quick
def test_ray_passes_the_spec_and_every_variable_as_they_were_written(text: str) -> None:
    spec = filled(text)
    environment = RayOrder(RunRequest(spec, store="s3://b/p"), spec, "k").runtime_env()["env_vars"]
    variables = {name: through_ray(value, {"HOME": "/h", **environment}) for name, value in environment.items()}
    restore_environment(variables)
    assert (variables["NAME"], variables[SPEC]) == (text, dump_spec(spec))


def test_a_batch_script_gives_every_variable_and_argument_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", f"/tmp/{ALL[:60]} %j home")
    run_request = request(ALL)
    spec = copy.copy(run_request.spec).model_copy(update={"store": "s3://b/p"})
    chain = Chain(replace(run_request, spec=spec), spec, "key", f"s3://b/{ALL}", Chain.of(RunRequest(base())).folder)
    script = script_of(chain, "train", {})
    script_text = script.replace(
        "exec ", "python3 -c 'import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))' "
    )
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    result = subprocess.run(["bash"], input=script_text, text=True, capture_output=True, check=True)
    argv, variables = json.loads(result.stdout)
    assert variables["NAME"] == ALL
    assert f"--store=s3://b/{ALL}" in argv
    assert f"--salt={ALL}" in argv
    assert all(shlex.split(shlex.quote(option)) == [option] for option in options_of(chain, "train", {}))


def test_kserve_and_the_kubelet_leave_the_arguments_of_a_server_as_they_were_written() -> None:
    serving = {"arguments": ["--template={{ .Name }} {{{x}}}", "--name=$(HOME) $$"]}
    spec = parse_spec(yaml.safe_dump({
        "name": "a", "data": {"sources": [{"uri": "x"}]}, "store": "s3://b/p", "serving": {"kserve": serving},
    }))  # fmt: skip
    arguments = [model["args"] for model in _models(inference_service(spec, "s3://b/p/model", {}))]
    assert arguments == [["--template={{`{{`}} .Name }} {{`{{`}}{x}}}", "--name=$$(HOME) $$$"]]


def _models(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, dict):
        return ([node] if "args" in node else []) + [model for value in node.values() for model in _models(value)]
    return []
