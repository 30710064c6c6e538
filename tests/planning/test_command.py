"""`holdfast plan`: its output for users and scripts, and its changes of a spec."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.pipelines.cli import app
from holdfast.planning import Architecture, Candidate, Layout, Task, Updates, accelerator
from holdfast.planning.auto import fields_of, refused
from holdfast.planning.search import layouts, search
from holdfast.spec import SpecError, load_spec

SPEC = """\
# our model
name: llama-7b
store: s3://bucket/prefix
data:
  sources: [{uri: x}]
  tokenizer: {kind: bpe, vocabulary: 32000}
model: {layers: 32, hidden: 4096, heads: 32, ffn: 11008, context: 4096, tie_embeddings: false}
training:
  steps: 1000
  global_batch: 64
  micro_batch: 2  # found by hand
  precision: bf16
  compile: true
parallel:
  processes: 8
  strategy: ddp  # does not fit
cluster:
  accelerator: nvidia
  node_selector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
"""
SMALL = ("--set", "training.global_batch=16", "--set", "model.layers=4")


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


def plan(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*words: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(plan(*words, "--json"))
    return value


def test_plan_shows_layouts_with_limits_and_the_reasons_for_the_first(spec: Path) -> None:
    output = plan(str(spec), "--gpus", "64")
    for text in ("6.7 B parameters on 64 x H100", "tokens/s", "Why the first one:", "whole replicas (ddp): needs",
                 "GPU-hours", "kWh", "checkpoint.every_steps:"):  # fmt: skip
        assert text in output


def test_prices_of_the_command_line_override_the_spec_and_the_spec_the_tables(spec: Path) -> None:
    priced_text = SPEC + "  prices: {accelerator_hour: 4, kilowatt_hour: 0.5, carbon_per_kilowatt_hour: 300}\n"
    spec.write_text(priced_text)
    run = as_json(str(spec), "--gpus", "64")["layouts"][0]["run"]
    assert run["cost"] == pytest.approx(4 * run["gpu_hours"] + 0.5 * run["energy"])
    assert run["carbon"] == pytest.approx(300 * run["energy"])
    assert run["cost_per_million_tokens"] == pytest.approx(run["cost"] / (1000 * 64 * 4096) * 1e6)
    run_with_price = as_json(str(spec), "--gpus", "64", "--price", "5")["layouts"][0]["run"]
    assert run_with_price["cost"] - run["cost"] == pytest.approx(run["gpu_hours"])
    assert "a million tokens" in plan(str(spec), "--gpus", "64")


def test_the_accelerator_comes_from_node_labels_or_is_required(spec: Path) -> None:
    assert as_json(str(spec))["accelerator"] == "H100"
    assert as_json(str(spec), "-a", "mi300x")["accelerator"] == "MI300X"
    spec.write_text(SPEC.replace("NVIDIA-H100-80GB-HBM3", "something"))
    result = CliRunner().invoke(app, ["plan", str(spec)])
    assert result.exit_code == 2
    assert "--accelerator" in result.output
    assert "1 problem" not in result.output, "a command line is no spec"


def test_the_best_layout_of_today_is_written_and_comments_stay(spec: Path) -> None:
    today = as_json(str(spec), "--gpus", "16")["today"]
    plan(str(spec), "--gpus", "16", "--apply")
    text = spec.read_text()
    for comment in ("# our model", "# found by hand", "# does not fit"):
        assert comment in text
    applied = load_spec(spec)
    assert (applied.world_size, applied.parallel.strategy) == (16, today["fields"]["parallel.strategy"])
    assert applied.training.micro_batch == today["fields"]["training.micro_batch"]
    changed = [line for line in text.splitlines() if line not in SPEC.splitlines()]
    assert len(changed) <= 3, changed  # the micro-batch, the strategy, the nodes
    assert set(SPEC.splitlines()) - set(text.splitlines()) <= {
        "  micro_batch: 2  # found by hand",
        "  strategy: ddp  # does not fit",
    }
    plan(str(spec), "--gpus", "16", "--apply")
    assert spec.read_text() == text  # the second time there is nothing to change


def test_a_layout_of_tomorrow_is_written_only_on_request(spec: Path) -> None:
    small = SPEC.replace("global_batch: 64", "global_batch: 8").replace("micro_batch: 2", "micro_batch: 1")
    spec.write_text(small.replace("precision: bf16", "determinism: elastic"))  # which supports data parallelism alone
    output = as_json(str(spec), "--gpus", "16")
    assert output["today"] is None
    assert output["layouts"]
    before = spec.read_text()
    with pytest.raises(SpecError, match="add --any"):
        plan(str(spec), "--gpus", "16", "--apply")
    assert spec.read_text() == before
    plan(str(spec), "--gpus", "16", "--apply", "--any")
    assert f"strategy: {output['layouts'][0]['fields']['parallel.strategy']}" in spec.read_text()


@pytest.mark.slow
def test_a_budget_buys_the_fastest_run_that_it_pays_for(spec: Path) -> None:
    cheap_plan, dear_plan = (as_json(str(spec), "--budget", budget, "--price", "3") for budget in ("40", "1000000"))
    assert cheap_plan["layouts"][0]["run"]["cost"] <= 40
    assert dear_plan["layouts"][0]["run"]["seconds"] <= cheap_plan["layouts"][0]["run"]["seconds"]
    with pytest.raises(SpecError, match="the cheapest run costs"):
        plan(str(spec), "--budget", "0.01", "--price", "3", *SMALL)


def test_a_model_that_fits_nowhere_is_reported_with_its_memory_need(spec: Path) -> None:
    output = plan(str(spec), "--gpus", "1", "--set", "model.layers=160", "--set", "model.context=131072")
    assert "None fits. Least memory:" in output
    assert "optimizer" in output


def test_a_model_that_fits_one_accelerator_with_offload_is_accepted(spec: Path) -> None:
    ten = ("--set", "model.layers=48")  # 10 B: 160 GB of state
    output = as_json(str(spec), "--gpus", "1", *ten)
    assert 9e9 < output["parameters"] < 11e9
    assert output["today"] == output["layouts"][0]
    fields = {name: output["today"]["fields"][f"parallel.{name}"] for name in ("strategy", "replicas", "offload")}
    assert fields == {"strategy": "fsdp", "replicas": 1, "offload": "parameters"}
    plan(str(spec), "--gpus", "1", *ten, "--apply")
    applied = load_spec(spec, ["model.layers=48"])
    assert (applied.world_size, applied.parallel.strategy, applied.parallel.offload) == (1, "fsdp", "parameters")


def test_no_whole_replica_is_planned_with_its_state_elsewhere() -> None:
    mixture = Architecture(32, 4096, 32, 8, 14336, 4096, 32000, experts=8, active=2)
    task = Task(mixture, accelerator("H100"), 8, 100, 64)
    best = search(task, count=50).best
    assert best and all(
        candidate.layout.offload != "none" and candidate.layout.sharding != "none" for candidate in best
    )


def test_every_zero_bubble_layout_that_is_proposed_has_a_schedule_that_the_rules_accept(spec: Path) -> None:
    here, shape = accelerator("H100"), Architecture(8, 1024, 8, 8, 2816, 1024, 32000)
    small = ("model.layers=8", "model.hidden=1024", "model.heads=8", "model.ffn=2816", "model.context=1024")
    variants = set()
    for compiled in (False, True):
        checked_spec = load_spec(spec, [*small, f"training.compile={str(compiled).lower()}"])
        task = Task(shape, here, 8, 1000, 64, updates=Updates(compiled=compiled))
        for layout in layouts(task):
            if layout.schedule == "zero_bubble":
                why = " ".join(refused(checked_spec, task, layout))
                assert "parallel.schedule" not in why and "parallel.reshard" not in why, layout
                variants.add((compiled, layout.sharding))
    assert {sharding for compiled, sharding in variants if not compiled} >= {"none", "full"}
    assert not any(compiled for compiled, _ in variants)


def test_zero_bubble_keeps_gathered_weights_and_counts_their_memory(spec: Path) -> None:
    task = Task(Architecture(8, 1024, 8, 8, 2816, 1024, 32000), accelerator("H100"), 8, 1000, 64)
    once = Layout(data=4, shard=4, pipeline=2, sharding="full", schedule="zero_bubble")
    twice = once.with_(schedule="1f1b")
    assert (fields_of(task, once)["parallel.reshard"], fields_of(task, twice)["parallel.reshard"]) == (
        "never",
        "always",
    )
    retained, freed = Candidate(task, once).memory.terms, Candidate(task, twice).memory.terms
    assert retained["buffers"] > freed["buffers"]
    traffic = [Candidate(task, layout).speed.terms.get("data traffic", 0.0) for layout in (once, twice)]
    assert traffic[0] <= traffic[1]


def test_a_batch_that_grows_is_priced_by_what_it_reads(spec: Path) -> None:
    whole, growing = (
        as_json(str(spec), *SMALL, "--set", "training.micro_batch=1", *more)["layouts"][0]["run"]
        for more in ((), ("--set", "training.batch_ramp={start: 8, increment: 8, steps: 1000}"))
    )
    assert growing["seconds"] == pytest.approx(whole["seconds"] / 2)
    assert growing["cost_per_million_tokens"] == pytest.approx(whole["cost_per_million_tokens"])


def test_a_rank_count_that_fills_no_nodes_is_reported_by_field_or_option(spec: Path) -> None:
    with pytest.raises(SpecError, match=r"--gpus: makes no whole nodes of 8 H100 \(value: 12\)"):
        plan(str(spec), "--gpus", "12")
    with pytest.raises(SpecError, match=r"(?s)parallel.processes: .*value: 12.*at most 8"):
        plan(str(spec), "--set", "parallel.processes=12", "--set", "training.global_batch=96")
