"""Plans of three models on 8, 64 and 1,024 accelerators, word for word. HOLDFAST_UPDATE_GOLDEN=1 writes them again."""

import math
import os
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.planning import Architecture, Task, Updates, accelerator, estimate_run, reasons, search
from holdfast.planning.auto import task_of
from holdfast.planning.run_estimate import best_interval, goodput, lasts
from holdfast.planning.search import layouts
from holdfast.spec import load_spec

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("plans.txt")
MODELS = {
    "7 B (Llama 2)": Architecture(32, 4096, 32, 32, 11008, 4096, 32000),
    "70 B (Llama 3)": Architecture(80, 8192, 64, 8, 28672, 8192, 128_256),
    "47 B of 8 experts, 13 B active (Mixtral)": Architecture(32, 4096, 32, 8, 14336, 4096, 32000, experts=8, active=2),
}


def task_of_model(name: str, gpus: int) -> Task:
    shape = MODELS[name]  # the rules compile no mixture of experts
    return Task(shape, accelerator("H100"), gpus, 10_000, 1024, updates=Updates(compiled=shape.experts == 1))


def plan_text(name: str, gpus: int) -> str:
    result = search(task_of_model(name, gpus), count=3)
    lines = [f"== {name} on {gpus} x H100"]
    if not result.best:
        least = result.smallest
        return "\n".join([*lines, f"none fits; {least.layout} would need {least.memory.total / 1e9:.0f} GB"])
    for candidate in result.best:
        lines.append(
            f"{candidate.layout}: {candidate.speed.tokens_per_second:,.0f} tokens/s, MFU {candidate.speed.mfu:.1%}, "
            f"{candidate.memory.total / 1e9:.0f} GB, {candidate.limit}"
        )
    run = estimate_run(result.best[0])
    lines += [f"  {reason}" for reason in reasons(result.best[0])]
    return "\n".join([*lines, f"  {run.gpu_hours:,.0f} GPU-hours, goodput {run.goodput:.2%}"])


def test_plans_are_those_that_were_looked_at() -> None:
    text = "\n\n".join(plan_text(name, gpus) for name in MODELS for gpus in (8, 64, 1024)) + "\n"
    if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_the_commands_of_the_page_are_those_of_these_plans() -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    (common,) = re.findall(r'^PLAN="holdfast plan (.*)"$', page, re.MULTILINE)
    commands = dict(re.findall(r"^\$PLAN --gpus \$N (.*?) +# (.*)$", page, re.MULTILINE))
    assert list(commands.values()) == list(MODELS)
    for options, name in commands.items():
        example, *arguments = shlex.split(f"{common} {options}")
        given = [(option, value) for option, value in pairwise(arguments) if option.startswith("-")]
        spec = load_spec(ROOT / example, [value for option, value in given if option == "--set"])
        vocabulary, here = int(dict(given)["--vocabulary"]), accelerator(dict(given)["-a"])
        for gpus in (8, 64, 1024):
            task = task_of_model(name, gpus)
            samples = task.steps * task.global_batch
            assert task_of(spec, here, gpus, vocabulary) == replace(task, samples=samples)


def test_the_interval_of_saves_loses_least() -> None:
    cost, between_failures, restart = 2.0, 3600.0, 300.0
    best = goodput(cost, best_interval(cost, between_failures), between_failures, restart)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert goodput(cost, best_interval(cost, between_failures) * factor, between_failures, restart) < best


def test_a_run_that_fails_as_soon_as_it_has_started_is_never_done() -> None:
    assert goodput(2.0, 120.0, 720.0, 300.0) == pytest.approx(0.5 / (1 + 1 / 60))
    assert [goodput(2.0, 120.0, between_failures, 300.0) for between_failures in (360.0, 100.0)] == [0.0, 0.0]
    assert math.isinf(lasts(1.0, 0.0))


@pytest.mark.parametrize(("shared", "degrees"), [(0, {1, 2, 4, 8}), (1, {1, 2}), (4, {1, 2, 4, 8})])
def test_tensor_parallelism_divides_only_the_shared_experts_of_a_mixture(shared: int, degrees: set[int]) -> None:
    shape = Architecture(2, 512, 8, 8, 66, 1024, 512, experts=4, active=2, shared=shared)
    assert {layout.tensor for layout in layouts(Task(shape, accelerator("H100"), 8, 1, 64))} == degrees


@pytest.mark.parametrize("gpus", [8, 64])
def test_no_layout_needs_ranks_that_are_not_there_or_cuts_the_batch_unevenly(gpus: int) -> None:
    task = Task(MODELS["70 B (Llama 3)"], accelerator("H200"), gpus, 100, 64)
    for candidate in search(task, count=20).best:
        layout = candidate.layout
        assert layout.ranks == gpus
        assert layout.micro_batches(64) * layout.micro_batch * layout.data == 64
        assert candidate.memory.total < task.accelerator.memory
