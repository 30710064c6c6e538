"""Every output of a process is redacted; each exception is on this list, with its reason."""

import ast
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECRET = "postgresql://ann:S3CR3Tvalue@db/x"

# Modules that print, write streams, format tracebacks, create log handlers or post, and why no secret leaves there.
KNOWN = {
    "holdfast/checkpoint/agent/worker.py": "the text of a HoldfastError, which redacts itself",
    "holdfast/health/program.py": "a record of numbers",
    "holdfast/launch/node/output.py": "redacts lines itself",
    "holdfast/store/durable.py": "objects of the store",
    "holdfast/telemetry/channel.py": "events, whose texts are redacted when they are made",
    "holdfast/launch/processes.py": "standard error of a process whose output a launcher reads and redacts",
    "holdfast/components/notify/summary.py": "redacts the record itself",
    "holdfast/steps/command_line.py": "the result of a step: an id or a word; standard output is redacted",
    "holdfast/rewards/worker.py": "replies to the process that started it, which redacts errors",
    "holdfast/rewards/process.py": "requests to the process of a reward: records and answers",
    "holdfast/runtime/rank_shell.py": "errors about the command and the process that a person named",
    "holdfast/runtime/signals.py": "a byte to its own thread",
    "holdfast/runtime/logs.py": "the formatters of all log records: they redact",
    "holdfast/simulation/learn.py": "numbers",
    "holdfast/spec/schema.py": "the schema",
    "holdfast/pipelines/backends/ray/node_probe.py": "a record of the machine",
    "holdfast/pipelines/backends/ray/task.py": "lines that runtime.output has redacted",
    "holdfast/pipelines/cli/entry.py": "redacts the crash report itself",
    "holdfast/pipelines/cli/inference.py": "the tokens of an answer, as the model writes them",
    "holdfast/pipelines/cli/options.py": "redacts errors; results are specs and records without secrets",
    "holdfast/pipelines/step_process.py": "lines that runtime.output has redacted",
    "holdfast/pipelines/view/ui.py": "redacts the address itself",
}
WAYS = {
    "print", "sys.stdout.write", "sys.stderr.write", "os.write", "traceback.print_exc", "traceback.format_exc",
    "traceback.format_exception", "logging.StreamHandler", "logging.FileHandler", "logging.Formatter",
    "urllib.request.urlopen", "urllib.request.build_opener",
}  # fmt: skip


def exits(path: Path) -> list[str]:
    call_nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [f"{name}:{call.lineno}" for call in call_nodes if (name := ast.unparse(call.func)) in WAYS]


def test_output_of_a_process_is_redacted_or_on_the_list() -> None:
    by_file: dict[str, list[str]] = {}
    for path in sorted((ROOT / "holdfast").rglob("*.py")):
        if exits_of_file := exits(path):
            by_file[str(path.relative_to(ROOT))] = exits_of_file
    assert {name: exits_of_file for name, exits_of_file in by_file.items() if name not in KNOWN} == {}
    assert sorted(set(KNOWN) - set(by_file)) == []


def test_rich_consoles_are_made_in_one_place() -> None:
    """The console whose texts the terminal never interprets."""
    places = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "holdfast" / "pipelines").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Console"
    ]
    assert places == []


def test_launch_logs_hold_no_secret(tmp_path: Path) -> None:
    import io

    from holdfast.launch.local import _keep

    tail: deque[str] = deque(maxlen=9)
    _keep(io.StringIO(f"rank 0: {SECRET}\nloss 3.2\n"), tmp_path / "log", tail)
    assert (tmp_path / "log").read_text() == "rank 0: postgresql://db/x\nloss 3.2\n"
    assert list(tail) == ["rank 0: postgresql://db/x", "loss 3.2"]


def test_output_passed_on_by_ray_has_no_secrets() -> None:
    pytest.importorskip("ray")
    from holdfast.runtime.output import printed_by

    process = subprocess.Popen([sys.executable, "-c", f"print('it: {SECRET}')"], stdout=subprocess.PIPE)
    assert list(printed_by(process)) == ["it: postgresql://db/x\n"]
    process.wait()


def test_the_log_of_a_local_run_holds_no_secret(tmp_path: Path) -> None:
    from holdfast.pipelines.backends.local.worker import unfailing

    with (tmp_path / "log").open("wb") as file:
        stream = unfailing(file.fileno())
        print("it:", SECRET, file=stream)
        print("password:", "S3CR3Tvalue", file=stream)
    assert (tmp_path / "log").read_text() == "it: postgresql://db/x\npassword: (hidden)\n"


def test_ranks_inherit_the_credentials_of_the_store_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.launch import Job, LocalLauncher
    from holdfast.spec.cluster import Cluster

    for name in (
        "HOLDFAST_WEBHOOK",
        "MLFLOW_TRACKING_TOKEN",
        "KFP_COOKIE",
        "MODEL_REGISTRY_TOKEN",
        "AWS_SESSION_TOKEN",
    ):
        monkeypatch.setenv(name, "S3CR3Tvalue")
    job = Job("job", "run", 1, ["-m", "x"], 1, 1, 1.0, Cluster())
    environment = LocalLauncher(tmp_path)._environment(job)
    assert [name for name, value in environment.items() if value == "S3CR3Tvalue"] == ["AWS_SESSION_TOKEN"]
