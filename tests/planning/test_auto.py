"""`parallel: auto`: what it expands to, what it refuses, and that it is in no identity."""

from pathlib import Path

import pytest

from holdfast.planning import ACCELERATORS, Candidate, Layout, calibration
from holdfast.planning.auto import (
    Proposal,
    accelerator_of,
    best,
    declared_task,
    layout_fields,
    layout_of,
    next_plan,
    with_fields,
)
from holdfast.spec import Spec, SpecError, dump_spec, parse_spec, rules, run_id
from holdfast.spec.rules.parallel import CHOSEN
from tests.planning.test_calibration import measured

MODEL = "model: {layers: 32, hidden: 4096, heads: 32, kv_heads: 8, context: 4096, tie_embeddings: false}"
H100 = "cluster: {accelerator: nvidia, product: H100, resources: {cpu: 96, memory: 900Gi}}"


def spec(parallel: str = "{auto: true, processes: 8}", cluster: str = H100, *overrides: str) -> Spec:
    text = f"""
name: a
store: s3://bucket/prefix
data: {{sources: [{{uri: x}}], tokenizer: {{vocabulary: 32000}}}}
{MODEL}
training: {{global_batch: 64, precision: bf16}}
parallel: {parallel}
{cluster}
"""
    return parse_spec(text, overrides)


def test_a_word_in_the_place_of_the_section_is_the_field() -> None:
    parsed = spec("auto", H100, "parallel.processes=8")
    assert parsed == spec()
    assert parse_spec(dump_spec(parsed)) == parsed
    assert spec("{processes: 8}", H100, "parallel=auto").parallel.auto


def test_fields_chosen_by_auto_may_not_be_set() -> None:
    with pytest.raises(SpecError, match=r"(?s)parallel.strategy.*chosen by parallel: auto.*--apply.*micro_batch"):
        spec("{auto: true, processes: 8, strategy: fsdp}", H100, "training.micro_batch=2")
    fields = layout_fields(declared_task(spec(), ACCELERATORS["H100"], 32000), Layout())
    chosen_fields = {name.removeprefix("parallel.") for name in fields if name.startswith("parallel.")} - {"auto"}
    assert chosen_fields == set(CHOSEN)


def test_auto_is_the_fastest_valid_layout_with_the_given_ranks() -> None:
    auto_spec = spec()
    candidate = best(auto_spec, None, here=False)
    assert candidate == best(auto_spec, None, here=False)
    resolved = with_fields(auto_spec, layout_fields(candidate.task, candidate.layout))
    assert rules.problems(resolved) == []
    assert (resolved.world_size, resolved.parallel.engine, resolved.parallel.auto) == (8, "torch", False)
    assert candidate.memory.total < 80e9


def test_ranks_that_do_not_fill_their_nodes_are_planned_as_they_are_declared() -> None:
    auto_spec = spec("{auto: true, processes: 2}", H100, "cluster.nodes.min=8", "cluster.nodes.max=8")
    candidate = best(auto_spec, None, here=False)
    assert (candidate.task.gpus, candidate.task.accelerator.node) == (16, 2)
    assert candidate.layout.tensor <= 2


def test_the_layout_is_in_no_identity() -> None:
    auto_spec = spec()
    candidate = best(auto_spec, None, here=False)
    explicit = with_fields(auto_spec, layout_fields(candidate.task, candidate.layout))
    assert run_id(auto_spec, "dataset") == run_id(explicit, "dataset") == run_id(spec("{processes: 8}"), "dataset")


def test_under_elastic_determinism_the_grain_is_kept() -> None:
    auto_spec = spec("{auto: true, processes: 8}", H100, "training.determinism=elastic", "training.micro_batch=2")
    assert best(auto_spec, None, here=False).layout.micro_batch == 2


def test_an_accelerator_is_named_or_measured_and_never_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    unnamed = spec(cluster="")
    with pytest.raises(SpecError, match=r"(?s)cluster.product.*guesses.*holdfast calibrate"):
        best(unnamed, None, here=True)
    calibration.write(measured(), calibration.default_path())
    assert accelerator_of(unnamed, here=True).name == "a CPU"
    with pytest.raises(SpecError, match=r"cluster\.product"):
        accelerator_of(unnamed, here=False)  # a pod has no such file
    with pytest.raises(SpecError, match="not guessed"):
        accelerator_of(spec("auto", "cluster: {product: X9000}"), here=True)
    with pytest.raises(SpecError, match=r"kind nvidia, and cluster.accelerator says cpu"):
        best(spec("auto", "cluster: {product: H100}"), None, here=True)
    labelled = spec("auto", "cluster: {accelerator: nvidia, node_selector: {gpu: NVIDIA-B200}}")
    assert accelerator_of(labelled, here=True).name == "B200"


@pytest.mark.parametrize(
    ("label", "name"),
    [("NVIDIA-A100-SXM4-40GB", "A100-40GB"), ("nvidia-tesla-a100", "A100-40GB"), ("NVIDIA-A100-SXM4-80GB", "A100"),
     ("NVIDIA-GB200", "GB200"), ("NVIDIA-H100-80GB-HBM3", "H100"), ("h200", "H200")],
)  # fmt: skip
def test_a_label_names_one_board_and_not_another_whose_name_it_contains(label: str, name: str) -> None:
    labelled = spec("auto", f"cluster: {{accelerator: nvidia, node_selector: {{gpu: {label}}}}}")
    assert accelerator_of(labelled, here=False).name == name


def test_ranks_that_fill_no_node_of_eight_get_advice_as_well() -> None:
    wide_spec = spec(
        "{processes: 12, strategy: ddp}", "cluster: {accelerator: nvidia}", "training.micro_batch=4",
        "training.global_batch=96",
    )  # fmt: skip
    assert next_plan(wide_spec, 32000, here=False) is not None


def test_a_plan_for_a_range_of_nodes_satisfies_the_rules_for_all_counts() -> None:
    ranged = ("training.determinism=off", "training.global_batch=48", "cluster.nodes={min: 2, max: 3}")
    auto_spec = spec("{auto: true, processes: 8}", H100, *ranged)
    candidate = best(auto_spec, None, here=False)
    assert rules.problems(with_fields(auto_spec, layout_fields(candidate.task, candidate.layout))) == []


def test_a_model_that_fits_nowhere_is_refused_with_its_memory_need() -> None:
    with pytest.raises(SpecError, match=r"(?s)fits into 80 GB of H100: the least takes .* GB.*more ranks"):
        best(spec("auto", H100, "model.layers=160"), None, here=False)


def typed(proposal: Proposal) -> list[str]:
    """The proposal's changes, as a user types them."""
    return proposal.options.removeprefix("--set ").split(" --set ")


def need_of(spec: Spec) -> float:
    """Bytes of a rank."""
    return Candidate(declared_task(spec, ACCELERATORS["H100"], 32000), layout_of(spec)).memory.total


def test_the_plan_after_an_out_of_memory_failure_needs_clearly_less() -> None:
    failed = spec("{processes: 8, strategy: ddp}", H100, "training.micro_batch=4")
    proposal = next_plan(failed, 32000, here=False)
    assert proposal is not None
    smaller = spec("{processes: 8, strategy: ddp}", H100, "training.micro_batch=4", *typed(proposal))
    assert need_of(smaller) < 0.9 * 80e9 < need_of(failed)
    assert smaller.world_size == failed.world_size


def test_the_next_plan_needs_less_memory_without_a_named_accelerator_or_does_not_exist() -> None:
    failed = spec("{processes: 2}", "", "model.layers=2")
    proposal = next_plan(failed, 32000, here=False)
    assert proposal is not None
    assert need_of(spec("{processes: 2}", "", "model.layers=2", *typed(proposal))) < 0.9 * need_of(failed)
    least = spec("{processes: 1}", "", "model.layers=2", "training.micro_batch=1",
                 "training.activation_checkpointing=full")  # fmt: skip
    assert next_plan(least, 32000, here=False) is None
