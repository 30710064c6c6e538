"""One run from raw text to a registered model, looked at from all sides; and one that is interrupted and ends alike."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.pipelines.backends.kubeflow.compile import compile_pipeline
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.paths import with_absolute_paths
from holdfast.spec import load_spec
from holdfast.telemetry.traces import trace_id
from tests import empty_mlflow
from tests.telemetry.collector import Collector, collecting
from tests.whole.small import ROOT, environment, held, hold, holdfast, objects, only, start, write_corpus, write_spec

PATIENCE = 300.0  # seconds
BEYOND_A_SAVE = 3  # steps, at which training waits
pytestmark = pytest.mark.timeout(1200)  # more than an undisturbed run and all that is waited for may take
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
    write_spec(folder, training={"steps": 80}, checkpoint={"every_steps": 5, "grace_seconds": 300})
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
    assert "step 80/80" in log.read_text()


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


@pytest.mark.slow
def test_kfp_itself_gives_the_compiled_pipeline_the_same_outcomes_and_bits(
    tmp_path: Path, done: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    folder, _ = done
    spec = with_absolute_paths(load_spec(folder / "spec.yaml", [f"data.sources=[{{uri: '{folder}/corpus/*.txt'}}]"]))
    compile_pipeline(spec, tmp_path / "pipeline.yaml")
    (tmp_path / "arguments.json").write_text(json.dumps(RunRequest(spec).escaped_parameters()))
    empty_mlflow.place(tmp_path / "home")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.whole.kfp_local", str(tmp_path)],
        env=environment(tmp_path / "home", PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (kept,) = [path for path in (folder / "home/logs").glob("*/run-*.steps.json") if "train" in path.read_text()][:1]
    ours = json.loads(kept.read_text())
    theirs = [json.loads(path.read_text()) for path in (tmp_path / "outcomes").glob("*.json")]
    assert {(one["step"], one["exit_code"], one["result"]) for one in theirs if one["step"] != "notify"} == {
        (one["step"], one["exit_code"], one["result"]) for one in ours if one["step"] != "notify"
    }
    assert {one["step"] for one in theirs} == {one["step"] for one in ours}
    for what in ("state_digest", "dataset_id", "run_id"):
        (result,) = objects(tmp_path, "runs/*/result.json")
        assert json.loads(result.read_text())[what] == only(folder, "runs/*/result.json")[what]
    for what in ("headline", "status", "verdict", "metrics"):
        assert only(tmp_path, "runs/*/summary.json")[what] == only(folder, "runs/*/summary.json")[what]


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
    assert "80/80" in table
    (row,) = [
        line for line in holdfast(folder, "list", command="models").stdout.splitlines() if line.startswith("small")
    ]
    assert row.split()[:4] == ["small", "1", "champion", run_id]
    page = holdfast(folder, run_id[:6], command="show").stdout
    assert run_id in page
    assert "steps: 80" in page
    said = [
        holdfast(folder, "generate", name, "the ship", command="models").stdout
        for name in (run_id[:6], "small@champion")
    ]
    assert said[0].startswith("the ship")
    assert said[0] == said[1]


def test_400_kb_of_flipped_bits_are_named_by_every_command(
    done: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = done
    run_id = only(folder, "runs/*/result.json")["run_id"]
    (weights,) = objects(folder, "runs/*/export/*/model.safetensors")
    whole = weights.read_bytes()
    damaged = bytearray(whole)
    for at in range(len(whole) // 2, min(len(whole) // 2 + 400_000, len(whole)), 4):
        damaged[at] ^= 0x40
    weights.write_bytes(damaged)
    words = "model.safetensors: bytes 0 to"
    try:
        for asked in (
            ["run", "spec.yaml"],
            *(["models", "generate", name, "x"] for name in (run_id, "small@champion")),
        ):
            said = holdfast(folder, *asked[1:], command=asked[0])
            assert said.returncode == 11, said.stdout + said.stderr
            assert words in said.stderr
        other_name = holdfast(folder, "spec.yaml", "--set", "registration.model=other")
        assert other_name.returncode == 11
        assert words in other_name.stdout + other_name.stderr
        verified = holdfast(folder, "verify", run_id, command="checkpoints")
        assert verified.returncode == 13
        assert words.removeprefix("model.safetensors: ") in verified.stdout
        weights.unlink()
        again = holdfast(folder, "spec.yaml")
        assert again.returncode == 0, again.stdout + again.stderr
        assert weights.read_bytes() == whole, "train wrote it anew, and what was judged and registered stands"
        assert holdfast(folder, "verify", run_id, command="checkpoints").returncode == 0
    finally:
        weights.write_bytes(whole)


def test_after_the_home_was_moved_the_same_command_ends_as_before_and_a_worse_model_is_no_champion(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = done
    known = objects(folder, "runs/*")
    (folder / "home").rename(folder / "moved")
    moved = {"HOLDFAST_HOME": str(folder / "moved")}
    try:
        assert holdfast(folder, "spec.yaml", **moved).returncode == 0
        said = holdfast(folder, "generate", "small@champion", "the ship", command="models", **moved)
        assert said.stdout.startswith("the ship"), said.stderr
        worse = holdfast(folder, "spec.yaml", "--set", "training.steps=1", "--set", "training.seed=11", **moved)
        assert worse.returncode == 3, worse.stdout + worse.stderr
        assert "bits per byte against" in worse.stdout
    finally:
        shutil.rmtree(folder / "home", ignore_errors=True)
        (folder / "moved").rename(folder / "home")
        for worse_run in set(objects(folder, "runs/*")) - set(known):
            shutil.rmtree(worse_run)  # tests below compare every run that is there


WORKER = "holdfast.pipelines.backends.local.worker"


class Disturbed:
    """Another run of the small spec, in the same store, whose training waits for what is done to it."""

    def __init__(self, folder: Path, site: Path) -> None:
        self.folder, self._site = folder, site
        self._known = {path.parent for path in objects(folder, "runs/*/run.json")}
        self._held = held(site, 0)

    @property
    def run(self) -> Path | None:
        """Its folder in the store, once there is one."""
        found = {path.parent for path in objects(self.folder, "runs/*/run.json")} - self._known
        return found.pop() if found else None

    def disturb(
        self, saved: int, strike: Callable[[subprocess.Popen[str]], object], *arguments: str
    ) -> tuple[int, str]:
        """The command, struck once that step is saved; its code, and what it printed. All that it started ends."""
        before = self._saved()  # one that is told to leave may have gone on beyond the step it waited at
        hold(self._site, saved + BEYOND_A_SAVE)
        with start(self.folder, "spec.yaml", *arguments, **self._held) as process:
            deadline = time.monotonic() + PATIENCE
            while self._saved() < saved or self._saved() <= before:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            family = psutil.Process(process.pid).children(recursive=True)
            strike(process)
            stdout, stderr = process.communicate(timeout=PATIENCE)
            assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []  # whatever was left alone saves and leaves
        assert self.run is not None and not (self.run / "result.json").exists()
        return process.returncode, stdout + stderr

    def _saved(self) -> int:
        """The newest checkpoint's step."""
        run = self.run
        steps = [] if run is None else [int(path.stem.rpartition("-")[2]) for path in run.glob("checkpoints/*.json")]
        return max(steps, default=0)

    def require_same_bits(self, *arguments: str) -> None:
        """The command given again, undisturbed, ends with the bits of the other run."""
        done = holdfast(self.folder, "spec.yaml", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        assert self.run is not None
        runs = [json.loads((each / "result.json").read_text()) for each in (self.run, *self._known)]
        assert len({result["run_id"] for result in runs}) == len(runs)
        for what in ("dataset_id", "state_digest"):
            assert len({result[what] for result in runs}) == 1


def kill_worker(process: subprocess.Popen[str]) -> None:
    """Kill the process of a command that runs the pipeline."""
    family = psutil.Process(process.pid).children(recursive=True)
    next(one for one in family if WORKER in one.cmdline() and "python" in one.name()).kill()


def test_a_signal_saves_and_says_how_to_go_on_and_what_is_killed_then_costs_no_bit(
    tmp_path: Path, done: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    run = Disturbed(done[0], tmp_path)
    code, printed = run.disturb(5, lambda process: process.send_signal(signal.SIGINT), "--fresh")
    assert code == 204, printed
    assert "a checkpoint is saved" in printed
    assert run.run is not None
    assert json.loads((run.run / "summary.json").read_text())["status"] == "cancelled"
    salt = json.loads((run.run / "run.json").read_text())["salt"]
    assert f"holdfast run spec.yaml --salt {salt}" in printed
    # The other processes of a command: pipelines/chaos/test_chaos.py and faults/test_mixtures.py.
    code, printed = run.disturb(15, kill_worker, "--salt", salt)
    assert (code, "the process that runs the pipeline was killed" in printed) == (204, True), printed
    run.require_same_bits("--salt", salt)
