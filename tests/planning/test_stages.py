"""Stages balanced by the time of their parts: the split, its measurement, and its drawn schedule."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from holdfast.pipelines.cli import app
from holdfast.pipelines.measure import STAGES, MeasureError, stage_costs
from holdfast.planning.auto import Proposal
from holdfast.planning.layout import Layout
from holdfast.planning.schedule import StageCosts, split, timeline
from holdfast.spec import SpecError, load_spec
from tests.faults.nodes import PATIENCE
from tests.train.tiny_run import SPEC

# The head of this model costs as much as several layers.
PIPELINE = (
    SPEC.replace("layers: 2", "layers: 8")
    .replace("synthetic}]", "synthetic}], tokenizer: {kind: bpe, vocabulary: 32000}")
    .replace("checkpoint:", "parallel: {processes: 2, pipeline: 2}  # two\ncheckpoint:")
)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(PIPELINE)
    return path


def test_the_slowest_stage_is_as_fast_as_in_the_best_of_all_splits() -> None:
    numbers = random.Random(5)
    for _ in range(60):
        costs = [numbers.random() * 10 ** numbers.randint(-4, 1) for _ in range(numbers.randint(1, 8))]
        stages = numbers.randint(1, len(costs))
        parts = split(costs, stages)
        assert [index for part in parts for index in part] == list(range(len(costs)))
        best = min(
            max(sum(costs[low:high]) for low, high in zip((0, *cuts), (*cuts, len(costs)), strict=True))
            for cuts in combinations(range(1, len(costs)), stages - 1)
        )
        assert max(sum(costs[index] for index in part) for part in parts) == pytest.approx(best)


def test_a_dear_head_and_a_dear_embedding_leave_their_stages_fewer_layers() -> None:
    assert StageCosts(device="x", embedding=0, layer=1, head=2).balanced(8, 2) == [5, 3]
    assert StageCosts(device="x", embedding=2, layer=1, head=0).balanced(8, 2) == [3, 5]
    assert StageCosts(device="x", embedding=1, layer=1, head=2).of_stages([2, 2]) == [3, 4]


def test_a_timeline_with_costs_shows_the_slowest_stage() -> None:
    layout = Layout(pipeline=2)
    uneven, balanced = (timeline(layout, 4, costs=costs).splitlines() for costs in ([1.0, 2.0], [2.0, 2.0]))
    idle = [line.count(".") for line in uneven[:2]]
    assert idle[0] > idle[1]
    assert uneven[-1] != balanced[-1]
    assert balanced[-1] == timeline(layout, 4).splitlines()[-1]  # the formula assumes equal stages


@pytest.mark.slow
def test_measured_stages_are_proposed_drawn_and_written(spec: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(spec), "--measure", "--timeline", "--apply"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    stages = load_spec(spec).parallel.stages
    assert stages is not None and sum(stages) == 8
    assert stages[0] > stages[1]  # the head is in the last stage
    assert f"parallel.stages: {list(stages)}" in result.stdout
    assert "stage   1 |" in result.stdout
    assert "# two" in spec.read_text()


def test_a_spec_without_a_pipeline_is_refused_with_a_remedy(spec: Path) -> None:
    spec.write_text(PIPELINE.replace("pipeline: 2", "pipeline: 1"))
    with pytest.raises(SpecError, match=r"parallel.pipeline=2"):
        CliRunner().invoke(app, ["plan", str(spec), "--measure"], catch_exceptions=False)


@pytest.mark.slow
def test_a_pipeline_set_on_the_command_line_is_written_with_its_stages(spec: Path) -> None:
    spec.write_text(PIPELINE.replace(", pipeline: 2", ""))
    command = ["plan", str(spec), "--measure", "--apply", "--json", "--set", "parallel.pipeline=2"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    parallel = load_spec(spec).parallel
    assert parallel.pipeline == 2 and parallel.stages is not None and sum(parallel.stages) == 8
    output = json.loads(result.stdout)
    assert output["head"] > output["layer"] > 0 and output["embedding"] > 0
    assert len(output["seconds"]) == len(output["stages"]) == 2


def test_options_of_a_search_are_refused_where_nothing_is_searched(spec: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(spec), "--measure", "--gpus", "8", "--any"])
    assert result.exit_code == 2
    assert "--gpus, --any" in result.output


@pytest.mark.slow
def test_fp8_is_not_measured_as_something_else(spec: Path) -> None:
    parsed = load_spec(spec)
    fp8 = parsed.training.model_copy(update={"precision": "fp8"})  # on a CPU, the rules refuse it earlier
    with pytest.raises(MeasureError, match="fp8 needs"):
        stage_costs(parsed.model_copy(update={"training": fp8}), 256)


def test_a_remedy_that_unsays_the_stages_loads(spec: Path) -> None:
    options = Proposal({"parallel.stages": None}, "").options.removeprefix("--set ")
    spec.write_text(PIPELINE.replace("pipeline: 2", "pipeline: 2, stages: [5, 3]"))
    assert load_spec(spec).parallel.stages is not None
    assert load_spec(spec, [options]).parallel.stages is None


@pytest.mark.slow
def test_the_measuring_process_ends_with_the_command(spec: Path) -> None:
    long = ["--set", "model.hidden=1024", "--set", "model.context=2048", "--set", "training.micro_batch=4"]
    command = [sys.executable, "-m", "holdfast.pipelines.cli", "plan", str(spec), "--measure", *long]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    child = _child(psutil.Process(process.pid))
    process.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs([child], timeout=PATIENCE)
    with suppress(psutil.NoSuchProcess):
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def _child(parent: psutil.Process) -> psutil.Process:
    """The measuring process, once it has started and has arranged to end with its parent."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
        for child in parent.children():
            with suppress(psutil.NoSuchProcess):  # one that the command starts briefly
                if STAGES in " ".join(child.cmdline()):
                    return child
        time.sleep(0.05)
    raise AssertionError("the command measured nothing")
