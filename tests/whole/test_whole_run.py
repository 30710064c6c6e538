"""One run from raw text to a registered model, checked in every respect; and one that is interrupted and ends the
same."""

import ipaddress
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
from tests.whole.attacks import attack
from tests.whole.listeners import family, listening, open_to_others, shared_files, unix_listeners
from tests.whole.planted_secrets import LOUD, MARK, SECRETS, leaks
from tests.whole.small import ROOT, environment, held, hold, holdfast, objects, only, start, write_corpus, write_spec

PATIENCE = 300.0  # seconds
BEYOND_A_SAVE = 3  # steps after which training waits
# An undisturbed run and all its waits take less.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
HEAVY = ("torch", "kfp", "mlflow", "tokenizers", "pyarrow", "transformers")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """Where the run sends its trace."""
    with collecting() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder in which the small spec ran to its end, and the result of the command."""
    folder = tmp_path_factory.mktemp("whole")
    write_corpus(folder)
    training, checkpoint = {"steps": 40, "micro_batch": 2}, {"every_steps": 5, "grace_seconds": 300}
    (folder / "loud.py").write_text(LOUD)
    telemetry = {"observers": ["loud.py:show"]}
    write_spec(folder, training=training, checkpoint=checkpoint, parallel={"processes": 2}, telemetry=telemetry)
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_TIMEOUT": "120"}
    return folder, holdfast(folder, "spec.yaml", **variables, **SECRETS)


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


def test_every_path_in_the_summary_exists(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, first = done
    for label in ("model", "report", "log"):
        (line,) = [line for line in first.stdout.splitlines() if line.startswith(f"  {label} ")]
        assert Path(line.split(maxsplit=1)[1]).exists(), line


def test_the_run_log_has_the_output_of_the_steps(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = done
    (log,) = (folder / "home/logs").glob("*/run-*.log")
    assert "step 40/40" in log.read_text()


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


def test_kfp_itself_gives_the_compiled_pipeline_the_same_outcomes_and_bits(
    tmp_path: Path, done: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    folder, _ = done
    overrides = [f"data.sources=[{{uri: '{folder}/corpus/*.txt'}}]", "telemetry.observers=[]"]
    spec = with_absolute_paths(load_spec(folder / "spec.yaml", overrides))
    compile_pipeline(spec, tmp_path / "pipeline.yaml")
    (tmp_path / "arguments.json").write_text(json.dumps(RunRequest(spec).escaped_parameters()))
    empty_mlflow.place(tmp_path / "home")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.whole.kfp_local", str(tmp_path)],
        env=environment(tmp_path / "home", PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (record,) = [path for path in (folder / "home/logs").glob("*/run-*.steps.json") if "train" in path.read_text()][:1]
    local_outcomes = json.loads(record.read_text())
    kfp_outcomes = [json.loads(path.read_text()) for path in (tmp_path / "outcomes").glob("*.json")]
    assert {
        (outcome["step"], outcome["exit_code"], outcome["result"])
        for outcome in kfp_outcomes
        if outcome["step"] != "notify"
    } == {
        (outcome["step"], outcome["exit_code"], outcome["result"])
        for outcome in local_outcomes
        if outcome["step"] != "notify"
    }
    assert {outcome["step"] for outcome in kfp_outcomes} == {outcome["step"] for outcome in local_outcomes}
    for key in ("state_digest", "dataset_id", "run_id"):
        (result,) = objects(tmp_path, "runs/*/result.json")
        assert json.loads(result.read_text())[key] == only(folder, "runs/*/result.json")[key]
    for key in ("headline", "status", "verdict", "metrics"):
        assert only(tmp_path, "runs/*/summary.json")[key] == only(folder, "runs/*/summary.json")[key]


def test_the_exit_handler_left_a_summary(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = done
    summary = only(folder, "runs/*/summary.json")
    assert (summary["status"], summary["verdict"]) == ("succeeded", "blessed")
    assert Path(summary["log"]).exists()


def test_a_second_call_returns_immediately_and_imports_nothing_heavy(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, first = done
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "holdfast.pipelines.cli", "run", "spec.yaml"],
        cwd=folder, env=environment(folder / "home"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0
    assert result.stdout.split("\n\n", 1)[1] in first.stdout  # the same summary
    imported = {
        line.rsplit("|", 1)[1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert not imported & set(HEAVY)
    assert len(objects(folder, "runs/*/attempts/??????.json")) == 1


def test_runs_show_and_generate_know_the_run(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = done
    run_id = only(folder, "runs/*/result.json")["run_id"]
    table = holdfast(folder, command="runs").stdout
    assert run_id in table
    assert "40/40" in table
    (row,) = [
        line for line in holdfast(folder, "list", command="models").stdout.splitlines() if line.startswith("small")
    ]
    assert row.split()[:4] == ["small", "1", "champion", run_id]
    page = holdfast(folder, run_id[:6], command="show").stdout
    assert run_id in page
    assert "steps: 40" in page
    texts = [
        holdfast(folder, "generate", name, "the ship", command="models").stdout
        for name in (run_id[:6], "small@champion")
    ]
    assert texts[0].startswith("the ship")
    assert texts[0] == texts[1]


def test_400_kb_of_flipped_bits_are_named_by_every_command(
    done: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = done
    run_id = only(folder, "runs/*/result.json")["run_id"]
    (weights,) = objects(folder, "runs/*/export/*/model.safetensors")
    whole = weights.read_bytes()
    damaged = bytearray(whole)
    for index in range(len(whole) // 2, min(len(whole) // 2 + 400_000, len(whole)), 4):
        damaged[index] ^= 0x40
    weights.write_bytes(damaged)
    message = "model.safetensors: bytes 0 to"
    try:
        for command in (["run", "spec.yaml"], ["models", "generate", "small@champion", "x"]):
            command_result = holdfast(folder, *command[1:], command=command[0])
            assert command_result.returncode == 11, command_result.stdout + command_result.stderr
            assert message in command_result.stderr
        other_name = holdfast(folder, "spec.yaml", "--set", "registration.model=other")
        assert other_name.returncode == 11
        assert message in other_name.stdout + other_name.stderr
        verified = holdfast(folder, "verify", run_id, command="checkpoints")
        assert verified.returncode == 13
        assert message.removeprefix("model.safetensors: ") in verified.stdout
        weights.unlink()
        result = holdfast(folder, "spec.yaml")
        assert result.returncode == 0, result.stdout + result.stderr
        assert weights.read_bytes() == whole, "train wrote it anew, and what was judged and registered stands"
        assert holdfast(folder, "verify", run_id, command="checkpoints").returncode == 0
    finally:
        weights.write_bytes(whole)


def test_after_the_home_was_moved_the_same_command_ends_as_before_and_a_worse_model_is_no_champion(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = done
    earlier = objects(folder, "runs/*")
    (folder / "home").rename(folder / "moved")
    variables = {"HOLDFAST_HOME": str(folder / "moved")}
    try:
        assert holdfast(folder, "spec.yaml", **variables).returncode == 0
        result = holdfast(folder, "generate", "small@champion", "the ship", command="models", **variables)
        assert result.stdout.startswith("the ship"), result.stderr
        worse = holdfast(folder, "spec.yaml", "--set", "training.steps=1", "--set", "training.seed=11", **variables)
        assert worse.returncode == 3, worse.stdout + worse.stderr
        assert "bits per byte against" in worse.stdout
    finally:
        shutil.rmtree(folder / "home", ignore_errors=True)
        (folder / "moved").rename(folder / "home")
        for worse_run in set(objects(folder, "runs/*")) - set(earlier):
            shutil.rmtree(worse_run)  # later tests compare every run in the store


@dataclass(frozen=True)
class Disturbed:
    """Another run of the spec, in the same store: attackers connect to it, a user stops it, and it is resumed."""

    run: Path  # its folder in the store
    addresses: set[tuple[str, int]]  # ports that its processes opened
    sockets: set[str]
    files: set[Path]
    commands: set[str]
    mark: Path  # exists once an attack has executed code
    code: int
    output: str
    again: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def disturbed(
    tmp_path_factory: pytest.TempPathFactory, done: tuple[Path, subprocess.CompletedProcess[str]]
) -> Disturbed:
    (folder, _), site = done, tmp_path_factory.mktemp("site")
    earlier = {path.parent for path in objects(folder, "runs/*/run.json")}

    def runs() -> set[Path]:
        return {path.parent for path in objects(folder, "runs/*/run.json")} - earlier

    def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
        hold(site, step + BEYOND_A_SAVE)
        deadline = time.monotonic() + PATIENCE
        while not any((run / f"checkpoints/step-{step:09d}.json").exists() for run in runs()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    with start(folder, "spec.yaml", "--fresh", **held(site, 0), **SECRETS) as process:
        wait_for_step(process, 5)
        members = family(psutil.Process(process.pid))
        addresses, sockets, files = listening(members), unix_listeners(members), shared_files(members)
        files = {path for path in files if not path.is_relative_to(folder)}  # home and store follow the umask
        commands = {" ".join(member.cmdline()) for member in members if member.is_running()}
        connections = attack(addresses, site / "executed")
        wait_for_step(process, 15)
        for connection in connections:
            connection.close()
        process.send_signal(signal.SIGINT)
        output = "".join(process.communicate(timeout=PATIENCE))
        assert psutil.wait_procs(members, timeout=PATIENCE)[1] == []
    (run,) = runs()
    assert json.loads((run / "summary.json").read_text())["status"] == "cancelled"
    result = holdfast(folder, "spec.yaml", "--salt", json.loads((run / "run.json").read_text())["salt"], **SECRETS)
    mark, code = site / "executed", process.returncode
    return Disturbed(run, addresses, sockets, files, commands, mark, code, output, result)


def test_a_gang_on_one_machine_listens_on_loopback_alone(disturbed: Disturbed) -> None:
    assert disturbed.addresses, "two ranks that meet over gloo listen somewhere"
    assert {address for address, _ in disturbed.addresses if not ipaddress.ip_address(address).is_loopback} == set()


def test_sockets_and_temporary_files_of_a_run_are_reached_by_its_user_alone(disturbed: Disturbed) -> None:
    assert {name for name in disturbed.sockets if not name.startswith("/") or open_to_others(Path(name))} == set()
    assert {path for path in disturbed.files if open_to_others(path)} == set()


def test_a_signal_saves_a_checkpoint_and_prints_how_to_resume(disturbed: Disturbed) -> None:
    assert disturbed.code == 204, disturbed.output
    assert "a checkpoint is saved" in disturbed.output
    salt = json.loads((disturbed.run / "run.json").read_text())["salt"]
    assert f"holdfast run spec.yaml --salt {salt}" in disturbed.output


def test_strangers_at_every_port_execute_nothing_and_the_run_ends_with_the_bits_of_an_undisturbed_one(
    disturbed: Disturbed, done: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    assert not disturbed.mark.exists()
    assert disturbed.again.returncode == 0, disturbed.again.stdout + disturbed.again.stderr
    assert len(list(disturbed.run.glob("attempts/??????.json"))) == 2, "only the signal ended an attempt"
    first, second = (json.loads(path.read_text()) for path in objects(done[0], "runs/*/result.json"))
    assert first["run_id"] != second["run_id"]
    for key in ("dataset_id", "state_digest"):
        assert first[key] == second[key]


def test_no_file_output_or_command_line_has_a_secret_that_user_code_prints_and_raises(
    done: tuple[Path, subprocess.CompletedProcess[str]], disturbed: Disturbed
) -> None:
    folder, first = done
    failed = holdfast(folder, "spec.yaml", "--set", "evaluation.metrics=['loud.py:fails']", **SECRETS)
    assert failed.returncode == 22, failed.stdout + failed.stderr
    logs = [*objects(folder, "runs/*/logs/rank-*/*/*"), *(folder / "home/logs").glob("*/run-*.log")]
    loud = [path for path in logs if b"GH_PAT" in path.read_bytes()]
    assert len({path.relative_to(folder).parts[1] for path in loud}) == 2, "ranks and steps printed their variables"
    assert leaks(folder) == set()
    shown = [first, failed, disturbed.again]
    outputs = [
        disturbed.output,
        *disturbed.commands,
        *(text for result in shown for text in (result.stdout, result.stderr)),
    ]
    assert [text for text in outputs if MARK in text] == []
