"""Every rule between fields refuses its case, and names the field, the value and the remedy."""

import pytest

from holdfast.spec import parse_spec
from holdfast.spec.errors import Problem, SpecError
from tests.spec.conftest import Refused, text_with
from tests.spec.rule_cases import BY_RULE


@pytest.mark.parametrize(
    ("changes", "field", "value", "remedy"), [case[1:] for case in BY_RULE], ids=[c[0] for c in BY_RULE]
)
def test_a_combination_that_cannot_work_is_refused_with_the_remedy(
    refused: Refused, changes: dict[str, object], field: str, value: object, remedy: str
) -> None:
    problems = [problem for problem in refused(**changes) if problem.field == field and remedy in problem.remedy]
    assert [problem.value for problem in problems] == [value]
    assert "hunter2" not in "".join(map(str, refused(**changes)))


@pytest.mark.parametrize(
    ("changes"),
    [
        case[1]
        for case in BY_RULE
        if case[0] in ("batch", "batch of ranks", "width", "nearest width", "odd heads", "kv heads", "warm-up")
    ],
)
def test_the_number_that_a_remedy_names_is_accepted(refused: Refused, changes: dict[str, object]) -> None:
    (problem,) = refused(**changes)
    number = int("".join(c if c.isdigit() else " " for c in problem.remedy).split()[0])
    parse_spec(text_with(**{**changes, problem.field: number}))


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster.nodes": {"min": 2, "max": 2}},
        {"cluster.nodes": {"min": 1, "max": 2}, "training.determinism": "off"},
        {"cluster.scheduler": "kueue", "cluster.queue": "team-a", "cluster.topology.placement": "require"},
        {"cluster.scheduler": "volcano", "cluster.job": "volcano", "cluster.topology.placement": "require"},
        {"cluster.tolerations": [{"key": "a", "operator": "Equal", "value": "b"}, {"key": "example.com/c"}]},
        {"cluster.accelerator": "nvidia", "cluster.slice": "1g.10gb"},
        {"cluster.volumes": [{"claim": "c", "path": "/a"}, {"claim": "c", "path": "/a/b"}]},
        {"cluster.environment": {"NCCL_DEBUG": "WARN", "TOKENIZERS_PARALLELISM": "false"}},
        {"cluster.resources": {"cpu": 4, "memory": "64G", "shared_memory": "32Gi"}},
    ],
    ids=str,
)
def test_valid_cluster_settings_are_accepted(changes: dict[str, object]) -> None:
    parse_spec(text_with(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.processes": 4, "parallel.tensor": 2, "parallel.expert": 4, "parallel.strategy": "fsdp",
         "model.family": "mixtral", "model.experts": 4, "cluster.nodes": {"min": 1, "max": 2},
         "training.determinism": "off"},
        {"parallel.processes": 8, "parallel.tensor": 8, "model.heads": 8, "model.family": "mixtral", "model.experts": 4,
         "model.ffn": 68},
        {"parallel.processes": 8, "parallel.tensor": 8, "model.heads": 8, "model.family": "qwen2_moe",
         "model.experts": 4, "model.routing.shared": 2, "model.ffn": 68},
    ],
    ids=["experts over tensor ranks at any number of nodes", "experts are not cut", "shared experts are one layer"],
)  # fmt: skip
def test_valid_expert_settings_are_accepted(changes: dict[str, object]) -> None:
    parse_spec(text_with(**changes))


def test_a_field_that_is_left_to_the_planner_has_one_remedy(refused: Refused) -> None:
    (problem,) = refused(**{"parallel.auto": True, "parallel.offload_path": "/nvme"})
    assert problem.field == "parallel.offload_path"


@pytest.mark.parametrize("url", ["ssh://git@host/repo", "git@host:repo", "https://host/repo", "../repo"])
def test_a_user_of_ssh_is_no_secret(url: str) -> None:
    parse_spec(text_with(**{"data.sources.0": {"uri": "dvc:x", "repo": url}}))


@pytest.mark.parametrize("uri", ["s3://bucket/part-?.jsonl", "corpus/[ab]?.txt", "s3://[", "python:stdlib"])
def test_globs_are_no_secret(uri: str) -> None:
    parse_spec(text_with(**{"data.sources.0.uri": uri}))


def test_all_problems_are_reported_together_in_the_order_of_the_rules(refused: Refused) -> None:
    problems = refused(
        **{
            "schedule.timezone": "x",
            "model.heads": 7,
            "training.global_batch": 3,
            "training.precision": "fp16",
            "parallel.strategy": "zero1",
        }
    )
    assert [problem.field for problem in problems] == [
        "training.precision",
        "training.global_batch",
        "model.hidden",
        "schedule.timezone",
    ]


def test_the_first_line_of_a_refusal_names_the_fields() -> None:
    """Reports of a step show only this line."""
    problems = [
        Problem(field, 1, "is wrong", "use 2") for field in ("model.hidden", "model.hidden", "b", "c", "d", "e")
    ]
    lines = [str(SpecError(problems[:count])).splitlines()[0] for count in (1, 2, 6)]
    assert lines == [
        "spec: 1 problem in model.hidden",
        "spec: 2 problems in model.hidden",
        "spec: 6 problems in model.hidden, b, c and 2 more",
    ]
