"""The run id: it covers every field that defines the model, and no other field."""

import re
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from holdfast.scoring import settings_key
from holdfast.spec import ExitCode, HoldfastError, Spec, digest, errors, run_id
from holdfast.spec.errors import SpecError
from holdfast.spec.fields import Leaf, is_list, is_mapping, leaves
from holdfast.spec.functions import Function
from holdfast.spec.parallel import Parallel
from holdfast.spec.rules.cluster import STEP_PODS
from holdfast.spec.schema import identity_of

ONE_VALUE = ("version",)  # leaves with only one possible value


def other_value(info: FieldInfo, value: object, avoid: tuple[object, ...] = ()) -> object:
    """Another value that the field accepts on its own."""
    kinds = [kind for kind in (get_args(info.annotation) or (info.annotation,)) if kind is not type(None)]
    kind = info.annotation if get_origin(info.annotation) in (Literal, tuple, dict) else kinds[0]
    if is_mapping(kind):
        more = {"a/b": "1"} if "huge pages" in (info.description or "") else {"more": "x"}
        return {**value, **more}  # type: ignore[dict-item]
    if is_list(kind) and get_origin(get_args(kind)[0]) is Literal:
        return (get_args(get_args(kind)[0])[-1],) if value is None else value[1:]  # type: ignore[index]
    if is_list(kind) and isinstance(item := get_args(kind)[0], type) and issubclass(item, Function):
        return (item(use="m.py:g", digest="1" * 64),)
    if is_list(kind) and "float" in str(get_args(kind)[0]):
        return (1.5,)
    if is_list(kind):
        return (1, 3) if value is None else (*value, "more")  # type: ignore[misc]
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != value and choice not in avoid)
    if kind is bool:
        return not value
    if kind is int:
        return 8 if value is None else value + 1  # type: ignore[operator]
    if kind is float:
        return 0.5 if value is None else (value / 2 or 0.25)  # type: ignore[operator]
    if value == "{}":
        return '{"a":1}'
    pattern = next((regex for constraint in info.metadata if (regex := getattr(constraint, "pattern", None))), "")
    texts = (f"{value or ''}x", f"1{value}", "1" * 64, f"blake3:{'1' * 64}")
    return next(text for text in texts if re.search(pattern, text))


def tree() -> dict[str, Any]:
    """A spec with every field written out."""
    return Spec.model_validate(
        {
            "name": "a",
            "data": {
                "sources": [
                    {"uri": "x", "weight": 1, "reader": "m.py:f", "fields": "alpaca"},
                    {"uri": "y", "weight": 2},
                ],
                "cleaning": {"filters": ["m.py:f"], "near_duplicates": {}, "decontaminate": {"tasks": ["x"]}},
            },
            "training": {
                "objective": {"use": "m.py:f", "digest": "0" * 64},
                "optimizer": {"groups": [{}], "build": {"use": "m.py:f", "digest": "0" * 64}},
                "schedule": {"factor": {"use": "m.py:f", "digest": "0" * 64}},
                "grpo": {
                    "rewards": [{"use": "m.py:f", "digest": "0" * 64}],
                    "environment": {"use": "m.py:f", "digest": "0" * 64},
                    "server": {"software": "a", "url": "http://a/v1", "weights": "w"},
                },
            },
            "evaluation": {"tasks": [{"uri": "x"}], "metrics": ["m.py:f"], "load": {"use": "m.py:f"}},
            "telemetry": {"observers": ["m.py:f"]},
            "registration": {"serve": {"use": "m.py:f", "digest": "0" * 64}},
            "serving": {
                "kserve": {"tolerations": [{"key": "a"}], "vllm": {"image": "x"}},
                "deployment": {"tolerations": [{"key": "a"}], "vllm": {"image": "x"}},
                "model_registry": {"url": "http://x"},
            },
            "cluster": {
                "tolerations": [{"key": "a"}],
                "volumes": [{"claim": "a", "path": "/a"}],
                "capabilities": ["IPC_LOCK"],
                "steps": {name: {"tolerations": [{"key": "a"}]} for name in STEP_PODS}
                | {"tolerations": [{"key": "a"}]},
            },
        }
    ).model_dump()


def changed(leaf: Leaf) -> Spec:
    whole = tree()
    *parents, last = leaf.path.replace("[]", ".0").split(".")
    node: Any = whole
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    before = node[last]
    node[last] = 3.0 if leaf.path == "evaluation.max_perplexity" else other_value(leaf.info, before)
    assert node[last] != before
    return Spec.model_validate(whole)


# A script replaces the fields that make the run id; see the test of scripts.
OF_LOOP = [leaf for leaf in leaves() if leaf.path not in (*ONE_VALUE, "code") and not leaf.path.startswith("train.")]


@pytest.mark.parametrize("leaf", OF_LOOP, ids=lambda leaf: leaf.path)
def test_the_run_id_follows_exactly_the_identity_fields(leaf: Leaf) -> None:
    same_id = run_id(changed(leaf), "dataset") == run_id(Spec.model_validate(tree()), "dataset")
    if leaf.path.startswith("data."):
        in_the_id = leaf.path.startswith(("data.document_masks", "data.sources[].weight", "data.shuffle."))
    else:
        in_the_id = leaf.role == "identity"
    assert same_id is not in_the_id
    outside = {"identity": "through the dataset id", "plan": "plan", "neither": "no"}[leaf.role]
    assert identity_of(leaf) == ("yes" if in_the_id else outside)


def test_the_run_id_of_a_script_follows_its_code_and_its_arguments() -> None:
    def script_id(code: str = "0", **fields: Any) -> str:
        train = {"script": "train.py", **fields}
        spec = Spec.model_validate({"name": "a", "code": f"blake3:{code * 64}", "train": train})
        return run_id(spec, "")

    same = [script_id(), script_id(restart_on="any"), script_id(log_every=1)]
    other = [script_id("1"), script_id(arguments=["1"]), script_id(determinism="exact"), script_id(script="other.py")]
    assert len(set(same)) == 1
    assert len({*same, *other}) == 5
    with pytest.raises(SpecError, match="is a script that was not read"):
        run_id(Spec.model_validate({"name": "a", "train": {"script": "train.py"}}), "")


def test_the_plan_is_these_fields_and_no_others() -> None:
    """A field that moves to the plan by mistake gives two models one name. A field that leaves it gives one run two
    names.
    """
    assert [leaf.path for leaf in leaves() if leaf.role == "plan"] == [
        "training.micro_batch", "training.activation_checkpointing", "training.compile",
        "training.loss_chunk",
        *(f"parallel.{name}" for name in Parallel.model_fields if name not in ("auto", "deal")),
        "cluster.accelerator", "cluster.network", "cluster.nodes.max", "cluster.image", "cluster.environment",
    ]  # fmt: skip


def test_the_micro_batch_is_the_grain_of_elastic_sums_and_part_of_the_run_id_there() -> None:
    def ids(determinism: str) -> set[str]:
        trees = [{**tree(), "training": {"determinism": determinism, "micro_batch": size}} for size in (4, 8)]
        return {run_id(Spec.model_validate(tree), "d") for tree in trees}

    assert [len(ids(level)) for level in ("off", "exact", "elastic")] == [1, 1, 2]


def test_the_part_of_gradients_that_is_sent_is_part_of_the_run_id_where_a_part_is_sent() -> None:
    def ids(kind: str) -> set[str]:
        trees = [{**tree(), "training": {"gradient_compression": kind, "topk_fraction": part}} for part in (0.1, 0.2)]
        return {run_id(Spec.model_validate(tree), "d") for tree in trees}

    assert [len(ids(kind)) for kind in ("none", "powersgd", "topk")] == [1, 1, 2]


def test_runtime_fields_are_these_and_no_others() -> None:
    """A field that becomes a runtime field by mistake gives two trainings one name. Therefore the list is explicit."""
    runtime_fields = [leaf.path for leaf in leaves() if leaf.role == "neither"]
    sections = ("checkpoint", "evaluation", "registration", "schedule", "serving", "telemetry")
    assert [path for path in runtime_fields if path.split(".")[0] not in sections] == [
        "name", "code", "store", "data.sources[].reader.use", "data.cleaning.filters[].use",
        "data.workers", "data.fan_out", "train.inputs[].uri",
        "train.restart_on", "train.log_every", "train.verify_steps", "train.preload",
        "training.pause_at", "training.auto_micro_batch",
        "training.objective.use", "training.optimizer.build.use", "training.schedule.factor.use",
        "training.grpo.rewards[].use",
        "training.grpo.environment.use", "training.grpo.server.url", "training.grpo.server.weights",
        "training.grpo.server.timeout_seconds", "training.grpo.keep_steps",
        "training.topk_fraction", "training.anomalies.max_consecutive",
        "training.log_every",
        "parallel.auto", "parallel.deal",
        *(leaf.path for leaf in leaves() if leaf.path.startswith("cluster.")
          and leaf.role != "plan"),
    ]  # fmt: skip
    deciding = ("evaluation.keep_best", "evaluation.stop_after")  # which state the run ends with
    others = [leaf for leaf in leaves() if leaf.path.split(".")[0] in sections and leaf.path not in deciding]
    assert all(leaf.role == "neither" for leaf in others)


def test_the_dataset_and_the_salt_are_in_the_run_id(spec: Spec) -> None:
    ids = {run_id(spec, dataset, salt) for dataset in ("a", "b") for salt in ("", "fresh", "fresher")}
    assert len(ids) == 6


def test_the_run_id_does_not_depend_on_how_a_value_is_written(spec: Spec) -> None:
    from holdfast.spec import parse_spec
    from tests.spec.conftest import text_with

    as_text = {"training.clip_norm": 1, "training.steps": "300", "data.sources.0.weight": 2}
    as_number = {"training.clip_norm": 1.0, "training.steps": 300, "data.sources.0.weight": 2.0}
    assert run_id(parse_spec(text_with(**as_text)), "d") == run_id(parse_spec(text_with(**as_number)), "d")


def test_a_default_of_a_family_that_is_written_out_is_the_same_run() -> None:
    def gemma_id(**fields: Any) -> str:
        model = {"family": "gemma3_text", "sliding_window": 64, "head_dim": 32, **fields}
        return run_id(Spec.model_validate({"name": "a", "data": {"sources": [{"uri": "x"}]}, "model": model}), "d")

    assert gemma_id(query_scalar=32, rope_local_theta=10_000) == gemma_id()
    assert len({gemma_id(), gemma_id(query_scalar=64), gemma_id(rope_local_theta=500)}) == 3


@pytest.mark.parametrize("kind", ["text", "chat", "preferences", "unpaired", "prompts"])
def test_masks_of_documents_are_the_default_of_all_kinds_but_text(kind: str) -> None:
    def of(**fields: Any) -> Spec:
        return Spec.model_validate({"name": "a", "data": {"kind": kind, "sources": [{"uri": "x"}], **fields}})

    default = kind != "text"
    assert of().data.document_masks is default
    assert of() == of(document_masks=default)
    assert run_id(of(), "d") == run_id(of(document_masks=default), "d") != run_id(of(document_masks=not default), "d")


def test_a_digest_does_not_depend_on_the_order_of_keys_and_knows_every_value() -> None:
    assert digest({"a": 1, "b": [2, {"c": 3, "d": 4}]}) == digest({"b": [2, {"d": 4, "c": 3}], "a": 1})
    values: list[object] = [0, 1, 1.5, "1", "", None, True, [], {}, [1], {"a": 1}, {"a": "1"}, "é"]
    assert len({digest(value) for value in values}) == len(values)
    with pytest.raises(ValueError, match="JSON"):
        digest(float("nan"))


def test_an_id_stays_what_it_is_from_version_to_version() -> None:
    """A change of this number orphans every earlier run. Raise DATA_PLANE_VERSION only when the bits change."""
    assert digest({"a": [1, 2.5, "x", None]}) == "2278c8e5bcdf6734"


def test_a_new_field_keeps_the_ids_of_earlier_runs(monkeypatch: pytest.MonkeyPatch, spec: Spec) -> None:
    digested: list[Any] = []

    def record(value: Any) -> str:
        digested.append(value)
        return "0"

    monkeypatch.setattr("holdfast.spec.identity.digest", record)
    run_id(spec, "d")
    assert "kind" not in digested[0]["spec"]["training"]["optimizer"]


def test_the_version_of_the_generator_is_in_the_id_of_runs_that_learn_from_its_answers_only(
    monkeypatch: pytest.MonkeyPatch, spec: Spec
) -> None:
    server = {"software": "vllm-0.32", "url": "http://10.0.0.5:8000/v1", "weights": "/shared/weights"}
    values = [
        {"name": "a", "data": {"kind": "prompts", "document_masks": True, "sources": [{"uri": "x"}]},
         "model": {"init_from": "y"}, "training": {"objective": objective, "grpo": {"rewards": ["exact"], **extra}}}
        for objective, extra in (("auto", {}), ("grpo", {}), ("auto", {"server": server}))
    ]  # fmt: skip
    specs = [spec, *(Spec.model_validate(value) for value in values)]
    before = [run_id(each, "d") for each in specs]
    verdicts = [settings_key(each) for each in specs]
    monkeypatch.setattr("holdfast.spec.identity.GENERATOR_VERSION", 99)
    monkeypatch.setattr("holdfast.scoring.verdict.GENERATOR_VERSION", 99)
    assert [settings_key(each) == old for each, old in zip(specs, verdicts, strict=True)] == [True, False, False, False]
    assert [run_id(each, "d") == old for each, old in zip(specs, before, strict=True)] == [True, False, False, True]


def test_every_exit_code_has_one_number_that_shows_if_it_is_retryable() -> None:
    numbers = [code.value for code in ExitCode]
    assert len(ExitCode.__members__) == len(set(numbers))  # no alias
    assert all(0 <= number <= 255 for number in numbers)
    assert {code.name for code in ExitCode if code.retryable} == {
        "INTERRUPTED", "KILLED", "TERMINATED", "HUNG", "LOST_PEER", "STORE_UNREACHABLE", "PREEMPTED", "NO_SPACE",
        "UNSCHEDULABLE", "CLUSTER_UNREACHABLE", "WRONG_ARITHMETIC", "RENDEZVOUS_TIMEOUT", "UNHEALTHY_NODE",
        "SCRIPT_FAILED",
    }  # fmt: skip
    assert all(code.retryable == (code.value >= 128) for code in ExitCode)


def test_every_error_has_a_distinct_exit_code() -> None:
    error_types = [
        error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, HoldfastError)
    ]
    # Subclasses share their parent's code.
    codes = [error.exit_code for error in error_types if error.__base__ is HoldfastError]
    assert len(codes) == len(set(codes)) > 10
    assert ExitCode.UNEXPECTED not in codes
