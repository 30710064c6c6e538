"""A step of this machine is a process: its output, its code, its result, and its end without its worker."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from holdfast.pipelines.backends.local import worker
from holdfast.pipelines.step_process import StepProcess
from holdfast.spec import dump_spec, parse_spec
from tests import warm

ENDS = """import json, os, pathlib, signal, sys
step, spec, output, code = sys.argv[1], *(word.partition("=")[2] for word in sys.argv[2:4]), sys.argv[4]
print(step, pathlib.Path(spec).read_text())
print("without its end", end="")
sys.stdout.flush()
pathlib.Path(output).write_text(json.dumps({"word": "blessed"}))
os.kill(os.getpid(), int(code[1:])) if code[0] == "-" else sys.exit(int(code))
"""
STARTS = """import os, signal, sys
from pathlib import Path
from holdfast.pipelines.backends.local.worker import LocalSteps, Request
from holdfast.pipelines.runner import Execution
from holdfast.pipelines.backends.local import worker

os.environ["LEFT"] = sys.argv[1] + "/left"
worker.STEP = "tests.pipelines.backends.local.waiting_step"
LocalSteps(Path(sys.argv[1]), Request(spec="", store="")).start(Execution("train"))
signal.pause()
"""


def started(code: str) -> StepProcess:
    def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", ENDS, *words], stdout=subprocess.PIPE)

    return StepProcess("evaluate", "evaluate-2", "name: a", [code], start)


@pytest.mark.parametrize(("given", "code"), [("0", 0), ("12", 12), (f"-{int(signal.SIGKILL)}", 137)])
def test_a_step_prints_behind_its_name_and_ends_with_its_code_and_its_result(
    given: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    process = started(given)
    while process.poll() is None:
        process.wait(60)
    assert process.poll() == code
    assert process.result() == ({"word": "blessed"} if code == 0 else {})
    assert capsys.readouterr().out == "[evaluate-2] evaluate name: a\n[evaluate-2] without its end\n"


@pytest.mark.slow
def test_a_step_whose_worker_is_killed_gets_a_shutdown_request(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        step = psutil.Process(int(starter.stdout.readline().removeprefix("[train] ")))
        starter.kill()
        step.wait(60)
    assert (tmp_path / "left").read_text() == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["before", "by a signal", "by the end of its maker"])
def test_a_stopped_run_runs_only_its_exit_handler(stopped: str, tmp_path: Path) -> None:
    (outcomes := tmp_path / worker.OUTCOMES_FOLDER).mkdir()
    spec = dump_spec(parse_spec("{name: a, data: {sources: [{uri: 'file:///nowhere/*.txt'}]}}"))
    worker.Request(spec, tmp_path.as_uri()).write(tmp_path)
    command = [sys.executable, "-m", worker.__name__, str(tmp_path)]
    environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path)}
    if stopped == "before":
        worker.request_stop(tmp_path)
    with warm.popen(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        if stopped == "by the end of its maker":
            process.stdin.close()
            process.stdin = None
        elif stopped == "by a signal":
            while not psutil.Process(process.pid).children():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 143, output
    assert "**a: cancelled**" in output
    assert (outcomes / "notify.json").exists()
    assert not (outcomes / "train.json").exists()


def test_a_log_states_the_bytes_lost_on_a_full_disk(tmp_path: Path) -> None:
    """Further output is written once there is space again."""
    with (tmp_path / "log").open("w") as log, Path("/dev/full").open("w") as full:
        descriptor = os.dup(log.fileno())
        printed = worker.unfailing(descriptor)
        for line, place in (("one", log), ("two", full), ("three", full), ("four", log), ("five", log)):
            os.dup2(place.fileno(), descriptor)
            print(line, file=printed)
        os.close(descriptor)
    missing = f"[{len('two') + len('three') + 2} bytes are missing here: there was no space left]"
    assert (tmp_path / "log").read_text().split("\n") == ["one", missing, "four", "five", ""]
