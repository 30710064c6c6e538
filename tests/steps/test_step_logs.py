"""The log of a step is in the store while it runs and after any kind of end."""

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.runtime.environment import OUTCOMES
from holdfast.runtime.logs import plain
from holdfast.spec.errors import ExitCode
from holdfast.spec.tree import Spec
from holdfast.steps import step_logs
from holdfast.steps.adapters import main
from holdfast.steps.outcomes import LOG_FILE
from holdfast.steps.step_logs import StepLogReader
from holdfast.steps.table import StepResult
from holdfast.store import layout, open_store

SPEC = "{name: a, data: {sources: [{uri: x}]}}"

log = logging.getLogger("holdfast.test")


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "spec.yaml").write_text(SPEC)
    return [
        f"--spec={tmp_path}/spec.yaml",
        f"--store=file://{tmp_path}/store",
        "--job=job-1",
        "--run-id=abc",
        f"--output={tmp_path}/result.json",
    ]


def kept(tmp_path: Path, job: str = "job-1", *, ended: bool = True) -> list[str]:
    """The lines in the store, in human-readable form and without the time."""
    reader = StepLogReader(open_store(f"file://{tmp_path}/store"), job)
    lines = [plain(line) for _, line in reader.new_lines(lambda _: True, last=True, ended=ended)]
    return [line.partition("Z ")[2] or line for line in lines]


def test_a_log_is_in_the_store_while_the_step_works_and_once_without_secrets_and_ended_afterwards(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_logs, "FLUSH_SECONDS", 0.01)
    lines: list[str] = []

    def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
        log.info("scored %d documents, password=%s", 3, "hunter2-hunter2")
        print("printed without ", end="")
        print("an end, token=hf_0123456789abcdef0123456789abcdef")
        subprocess.run([sys.executable, "-c", "print('said by a child')"], check=True)
        deadline = time.monotonic() + 60
        while not lines and time.monotonic() < deadline:
            lines.extend(kept(tmp_path, ended=False))
        return StepResult({"word": "blessed"})

    assert main("evaluate", body, argv) == ExitCode.OK
    expected = [
        "INFO    holdfast.test: scored 3 documents, password=(hidden)",
        "printed without an end, token=(hidden)",
    ]
    assert lines[:2] == expected[: len(lines)]
    assert lines
    assert kept(tmp_path) == [*expected, '{"word": "blessed"}']
    objects = open_store(f"file://{tmp_path}/store").list(layout.step_log("job-1"))
    assert {info.key.rpartition("/")[2] for info in objects} == {"stream.json", "000000.log"}


def test_a_failure_and_its_traceback_are_in_the_log(argv: list[str], tmp_path: Path) -> None:
    def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
        raise KeyError("a bug")

    assert main("evaluate", body, argv) == ExitCode.UNEXPECTED
    text = "\n".join(kept(tmp_path))
    assert "unexpected failure" in text
    assert text.endswith("KeyError: 'a bug'")


@pytest.mark.parametrize("named_by", ["argument", "environment"])
def test_a_spec_that_is_refused_leaves_why_in_the_store(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    if named_by == "environment":
        monkeypatch.setenv("HOLDFAST_STORE", argv.pop(1).partition("=")[2])
    argv.append("--set=training.learning_rate=-1")
    assert main("evaluate", lambda *_, **__: StepResult({}), argv) == ExitCode.BAD_SPEC
    assert "training.learning_rate" in "\n".join(kept(tmp_path))


def test_the_exit_handler_keeps_its_log_in_the_store_that_an_override_names(argv: list[str], tmp_path: Path) -> None:
    def body(**_: object) -> StepResult:
        log.info("a line")
        return StepResult({"text": "", "status": "succeeded"})

    store = argv.pop(1).partition("=")[2]
    argv = [argument for argument in argv if "--run-id" not in argument]
    assert main("notify", body, [*argv, f"--set=store={store}", "--status=Succeeded"]) == ExitCode.OK
    assert kept(tmp_path)[:1] == ["INFO    holdfast.test: a line"]


def test_a_log_whose_store_cannot_be_found_out_fails_no_step() -> None:
    def fallback() -> str:
        raise KeyError("a bug")

    kept_log = step_logs.step_log("job-1", "train", "", fallback)
    assert kept_log is not None
    kept_log.close(0)


def test_an_unreachable_store_neither_fails_nor_blocks_a_step(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_logs, "CLOSE_SECONDS", 0.1)
    (tmp_path / "store").write_text("no folder")
    worked: list[bool] = []

    def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
        log.info("a line")
        worked.append(True)
        return StepResult({"word": "blessed"})

    assert main("evaluate", body, argv) == ExitCode.OK
    assert worked


def test_a_signal_while_the_log_is_closed_does_not_change_how_the_step_ended(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    close = step_logs.ShippedLog.close

    def interrupted(self: step_logs.ShippedLog, code: int) -> None:
        signal.raise_signal(signal.SIGTERM)
        close(self, code)

    monkeypatch.setattr(step_logs.ShippedLog, "close", interrupted)
    assert main("evaluate", lambda *_, **__: StepResult({"word": "blessed"}), argv) == ExitCode.OK
    assert not signals, "by default, the signal ends the process"
    signal.raise_signal(signal.SIGTERM)
    assert signals == [signal.SIGTERM]


def test_a_step_flushes_its_log_on_sigterm_before_a_kill(argv: list[str], tmp_path: Path) -> None:
    program = f"""
import os, signal, time
from holdfast.steps.adapters import main
import logging
def body(spec, url, *, run_id):
    logging.getLogger("holdfast.test").info("in the middle of it")
    try:
        print("ready", flush=True)
        time.sleep(300)
    finally:
        time.sleep(300)
main("evaluate", body, {argv!r})
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + step_logs.FLUSH_SECONDS / 2  # long before the next flush is due
        while not kept(tmp_path, ended=False) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    lines = kept(tmp_path)
    assert lines[0] == "INFO    holdfast.test: in the middle of it"
    assert lines[-1].startswith("[holdfast: this process ended without a word")


def test_a_run_of_this_machine_is_a_job_by_its_log_file_and_a_step_that_a_person_runs_is_none(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(spec: Spec, url: str, *, run_id: str) -> StepResult:
        log.info("a line")
        return StepResult({"word": "blessed"})

    assert main("evaluate", body, [argument for argument in argv if "--job" not in argument]) == ExitCode.OK
    assert not list((tmp_path / "store" / "logs").glob("*"))
    (tmp_path / "outcomes").mkdir()
    monkeypatch.setenv(OUTCOMES, str(tmp_path / "outcomes"))
    monkeypatch.setenv(LOG_FILE, "/home/me/logs/3f2a/run-20261125T120000Z-7.log")
    assert main("evaluate", body, argv) == ExitCode.OK
    assert kept(tmp_path, "3f2a-run-20261125T120000Z-7")[:1] == ["INFO    holdfast.test: a line"]
