"""A spec that an engine cannot pass on is refused with numbers before anything is sent; no other spec is refused."""

import json

import pytest
import yaml

from holdfast.pipelines.backends.argo import argo_objects
from holdfast.pipelines.backends.argo.backend import Argo
from holdfast.pipelines.backends.argo.emit import sweep_objects
from holdfast.pipelines.backends.kubeflow.compile import order_text, pipeline_text
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.backends.sizes import MAX_ARGUMENT
from holdfast.spec import Spec, SpecError, parse_spec
from holdfast.steps import parameter_values
from holdfast.steps.parameter_overrides import changed_parameters
from tests.pipelines.backends.engines import through_argo

NAME = "s3://corpus/web-crawl/language=en/quality=high/deduplicated=true/part-{0:05d}-of-01000/shard-with-a-name-{0:05d}.gz"


def spec(prompts: int = 0, sources: int = 1, **more: object) -> Spec:
    document = {
        "name": "a",
        "store": "s3://b/p",
        "data": {"sources": [{"uri": NAME.format(number)} for number in range(sources)]},
    }
    document["evaluation"] = {"prompts": [f"{'x' * 4900}{number}" for number in range(prompts)]}
    return parse_spec(yaml.safe_dump({**document, **more}))


def test_a_list_of_many_sources_stands_in_the_spec_alone_and_reaches_every_pod_on_argo() -> None:
    many = spec(sources=1000)
    template, workflow = Argo(namespace="n").objects(RunRequest(many))
    parameters = {
        f"workflow.parameters.{parameter['name']}": parameter["value"]
        for parameter in template["spec"]["arguments"]["parameters"]
    }
    for step_template in template["spec"]["templates"]:
        for argument in through_argo(step_template, parameters).get("container", {}).get("args", ()):
            assert len(argument.encode()) <= MAX_ARGUMENT
    assert parameter_values(many)["data"] == []
    assert (
        changed_parameters({"data": "[]"}, parameter_values(many))
        == changed_parameters({"data": []}, parameter_values(many))
        == []
    )
    assert changed_parameters({"data": '[{"uri": "x"}]'}, parameter_values(many)) == ['data.sources=[{"uri": "x"}]']
    assert len(json.dumps(workflow)) < 400_000


@pytest.mark.parametrize("big", [{"prompts": 45}, {"prompts": 10, "sources": 1000}])
def test_a_spec_that_kubeflow_cannot_pass_in_one_argument_is_refused_with_the_numbers(big: dict[str, int]) -> None:
    for render in (pipeline_text, lambda one: order_text(RunRequest(one))):
        with pytest.raises(SpecError) as error:
            render(spec(**big))
        (problem,) = error.value.problems
        assert problem.field == "spec"
        assert "passes 131,071" in problem.message
        assert "one pattern" in problem.remedy


def test_every_engine_accepts_a_spec_of_a_hundred_kilobytes() -> None:
    fits = spec(prompts=20)
    assert argo_objects(fits)
    assert pipeline_text(fits)


@pytest.mark.parametrize(
    "long", [RunRequest(spec(), salt="x" * 140_000), RunRequest(spec(), store="s3://b/" + "x" * 140_000)]
)
def test_any_other_overlong_parameter_is_reported(long: RunRequest) -> None:
    name = "salt" if long.salt else "store"
    with pytest.raises(SpecError) as error:
        Argo(namespace="n").objects(long)
    assert [problem.field for problem in error.value.problems] == [name]
    with pytest.raises(SpecError) as error:
        order_text(long)
    assert [problem.field for problem in error.value.problems] == [name]


@pytest.mark.slow
def test_trials_that_no_argument_holds_are_refused() -> None:
    trials = tuple((f"model.init_from={'x' * 3000}{number}",) for number in range(64))
    with pytest.raises(SpecError, match="trials: takes"):
        sweep_objects(spec(), trials)
    with pytest.raises(SpecError, match="too long for Kubeflow"):
        order_text(RunRequest(spec(), trials=trials))


def test_variables_and_annotations_that_no_engine_takes_are_refused_everywhere() -> None:
    with pytest.raises(SpecError) as error:
        spec(cluster={"environment": {"PROMPT": "x" * 131_070}})
    assert [problem.field for problem in error.value.problems] == ["cluster.environment.PROMPT"]
    spec(cluster={"environment": {"PROMPT": "x" * 131_000}})
    for field in ("annotations", "steps"):
        variables = {"a": "x" * 125_000, "b": "x" * 125_000}
        with pytest.raises(SpecError, match="longer than Kubernetes allows"):
            spec(cluster={field: {"annotations": variables} if field == "steps" else variables})
