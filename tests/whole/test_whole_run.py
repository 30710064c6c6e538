"""One run from raw text to a registered model, looked at from all sides."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.components.telemetry.spans import trace_id
from tests.telemetry.collector import Collector, collecting
from tests.whole.small import environment, holdfast, objects, only, write_corpus, write_spec

HEAVY = ("torch", "kfp", "mlflow", "tokenizers", "pyarrow", "transformers")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """Where the run sends its trace."""
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder in which the small spec ran to its end, and what the command said."""
    folder = tmp_path_factory.mktemp("whole")
    write_corpus(folder)
    write_spec(folder)
    sent = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_TIMEOUT": "120"}
    return folder, holdfast(folder, "spec.yaml", **sent)


def test_the_run_ends_blessed_and_registered(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, first = done
    assert first.returncode == 0, first.stdout + first.stderr
    assert only(folder, "runs/*/evaluations/*.json")["word"] == "blessed"
    assert only(folder, "runs/*/registrations/*.json")["model"] == "small"


def test_the_terminal_has_a_line_for_each_step_and_no_noise(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, first = done
    lines = first.stdout.splitlines()
    for step in ("preprocess", "train", "evaluate", "register"):
        assert sum(line.startswith(f"✓ {step}") for line in lines) == 1, first.stdout
    assert len(lines) < 40
    assert "KFP" not in first.stdout
    assert first.stderr == ""


def test_every_path_that_the_summary_names_is_there(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, first = done
    for label in ("model", "report", "log"):
        (line,) = [line for line in first.stdout.splitlines() if line.startswith(f"  {label} ")]
        assert Path(line.split(maxsplit=1)[1]).exists(), line


def test_the_log_has_what_the_steps_said(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = done
    (log,) = (folder / "home/logs").glob("*/run-*.log")
    assert "step 10/10" in log.read_text()


def test_a_collector_of_traces_has_one_trace_of_the_run_and_all_its_steps(
    done: tuple[Path, subprocess.CompletedProcess[str]], collector: Collector
) -> None:
    by_name = {span.name: span for span in collector.spans}
    assert {"run", "preprocess", "train", "launch 1", "attempt 1", "save", "evaluate", "register"} <= set(by_name)
    (run_id,) = {path.parent.name for path in objects(done[0], "runs/*/summary.json")}
    assert {span.trace_id for span in collector.spans} == {trace_id(run_id).to_bytes(16)}
    parents = {span.span_id: span.name for span in collector.spans}
    for name, within in (("evaluate", "run"), ("train", "run"), ("launch 1", "train"), ("attempt 1", "launch 1")):
        assert parents[by_name[name].parent_span_id] == within


def test_the_exit_handler_left_a_summary(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = done
    summary = only(folder, "runs/*/summary.json")
    assert (summary["status"], summary["verdict"]) == ("succeeded", "blessed")
    assert Path(summary["log"]).exists()


def test_a_second_call_answers_at_once_and_imports_nothing_heavy(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, first = done
    again = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "holdfast.pipelines.cli", "run", "spec.yaml"],
        cwd=folder, env=environment(folder / "home"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert again.returncode == 0
    assert again.stdout.split("\n\n", 1)[1] in first.stdout  # the same summary
    imported = {line.rsplit("|", 1)[1].strip() for line in again.stderr.splitlines() if line.startswith("import time:")}
    assert not imported & set(HEAVY)
    assert len(objects(folder, "runs/*/attempts/??????.json")) == 1


def test_another_bound_evaluates_again_without_training(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = done
    strict = holdfast(folder, "spec.yaml", "--set", "evaluation.max_perplexity=1.0001")
    assert strict.returncode == 3, strict.stdout + strict.stderr
    assert "not blessed" in strict.stdout
    assert "perplexity" in strict.stdout
    assert only(folder, "runs/*/summary.json")["verdict"] == "not_blessed"
    assert len(objects(folder, "runs/*/attempts/??????.json")) == 1
    assert len(objects(folder, "runs/*/registrations/*.json")) == 1


def test_runs_show_and_generate_know_the_run(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = done
    run_id = only(folder, "runs/*/result.json")["run_id"]
    table = holdfast(folder, command="runs").stdout
    assert run_id in table
    assert "10/10" in table
    (row,) = [line for line in holdfast(folder, command="models").stdout.splitlines() if line.startswith("small")]
    assert row.split()[:4] == ["small", "1", "champion", run_id]
    page = holdfast(folder, run_id[:6], command="show").stdout
    assert run_id in page
    assert "steps: 10" in page
    said = [holdfast(folder, name, "the ship", command="generate").stdout for name in (run_id[:6], "small@champion")]
    assert said[0].startswith("the ship")
    assert said[0] == said[1]
