"""Runs of this machine behind the common protocol: a process that is distinguished from a later one with its number,
and its log."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from holdfast.pipelines.backends.local.backend import Local
from holdfast.pipelines.backends.local.run import keep_outcomes
from holdfast.pipelines.backends.record import Record, find_record, keep, process_start, record_of
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.view.catalog import all_runs
from holdfast.spec import parse_spec
from holdfast.spec.errors import ExitCode, MissingError
from holdfast.steps.outcomes import KILLED, Outcome
from holdfast.store import layout, open_store

RUN_ID = "3f2a4b5c6d7e8f90"
ORDER = RunRequest(parse_spec("{name: small, data: {sources: [{uri: x}]}}"), run_id=RUN_ID)
WAITS = """import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
sys.exit(143)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A process that exits with 143 on SIGTERM."""
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield started
        started.kill()


@pytest.fixture
def record(tmp_path: Path, process: subprocess.Popen[str]) -> Record:
    """The record of a run whose process is `process`."""
    log = tmp_path / "logs" / "run-1.log"
    log.parent.mkdir()
    log.write_text("first\nsecond\n")
    began = process_start(process.pid)
    assert began is not None
    new_record = replace(
        record_of(ORDER, "local", RUN_ID), host=socket.gethostname(), pid=process.pid,
        began=began, log=str(log),
    )  # fmt: skip
    new_record.write(open_store(f"file://{tmp_path}/store"))
    return new_record


@pytest.fixture
def local(tmp_path: Path) -> Local:
    return Local(f"file://{tmp_path}/store")


def test_a_run_is_running_as_long_as_its_process_and_cancelling_ends_that(
    record: Record, local: Local, process: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert local.status("3f2a").state == "RUNNING"
    assert [run.state for run in all_runs(open_store(f"file://{tmp_path}/store"))] == ["running"]
    assert [run.id for run in local.list()] == [RUN_ID]
    assert local.cancel("small")[1] is True
    assert process.wait(300) == 143
    run_status, running = local.cancel("small")
    assert (run_status.state, running) == ("UNFINISHED", False)


def test_a_second_command_that_has_ended_does_not_hide_the_first_which_still_runs(
    record: Record, local: Local, process: subprocess.Popen[str], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store"
    alive = replace(record, outcomes=str(tmp_path))
    alive.write(open_store(url))
    ended = replace(alive, pid=2**22 + 1)  # no process has this number
    for later, spec in enumerate((record.spec, f"{record.spec}# another", record.spec), 1):
        assert keep(replace(ended, spec=spec, submitted=record.submitted + later), url) == ""
        assert local.status(RUN_ID).state == "RUNNING"
        assert [run.state for run in local.list()] == ["RUNNING"]
    assert local.cancel(RUN_ID)[1] is True
    assert process.wait(300) == 143
    assert local.status(RUN_ID).state == "UNFINISHED"


def test_the_last_accepted_submission_stays_when_two_others_are_refused(record: Record, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    store = open_store(url)
    waiting = replace(record, outcomes=str(tmp_path), spec="another")  # for the first one, in live processes
    replace(waiting, spec=record.spec).write(store)
    for later in (1, 2):
        assert keep(replace(waiting, submitted=record.submitted + later), url) == ""
    summary = {"ended": record.submitted + 3, "exit_code": ExitCode.PLAN_CHANGED}
    store.put(layout.run(RUN_ID, "summary.json"), json.dumps(summary).encode())
    newest = find_record(store, RUN_ID)
    assert newest is not None
    assert newest.spec == "another"
    assert newest.accepted(store).spec == record.spec


def test_a_record_of_another_version_is_no_obstacle(record: Record, local: Local, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    store.put(layout.run("ffff", "backend.json"), b'{"backend": "local", "of_tomorrow": 1}')
    assert {run.run_id for run in all_runs(store)} == {RUN_ID, "ffff"}
    assert len({run.state for run in all_runs(store)}) == 2
    assert [run.id for run in local.list()] == [RUN_ID]


def test_another_process_with_the_same_pid_is_never_signalled(
    record: Record, local: Local, process: subprocess.Popen[str], tmp_path: Path
) -> None:
    store = open_store(f"file://{tmp_path}/store")
    for other in (replace(record, began=record.began - 1), replace(record, host="elsewhere")):
        other.write(store)
        assert local.status(RUN_ID).state == "UNFINISHED"
        assert local.cancel(RUN_ID)[1] is False
    assert process.poll() is None


@pytest.mark.parametrize("step", [-7200.0, 1.0, 3600.0])
def test_a_run_stays_alive_when_the_clock_is_set(
    step: float, record: Record, local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot_time = psutil._pslinux.boot_time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + step)
    assert record.alive
    assert local.status(RUN_ID).state == "RUNNING"


def test_the_log_is_followed_until_the_process_has_ended(
    record: Record, local: Local, process: subprocess.Popen[str]
) -> None:
    lines = local.logs(RUN_ID, follow=True)
    assert [next(lines), next(lines)] == [("run", "first"), ("run", "second")]
    with Path(record.log).open("a") as log:
        log.write("third\nwithout its end")
    assert next(lines) == ("run", "third")
    process.terminate()
    process.wait(300)
    assert list(lines) == [("run", "without its end")]


def test_the_log_of_train_is_the_output_of_the_ranks(record: Record, local: Local) -> None:
    with pytest.raises(MissingError, match="has not begun"):
        list(local.logs(RUN_ID, "train"))
    for number in (2, 1):
        Path(record.log).with_name(f"launch-00000{number}.log").write_text(f"launch {number}\n")
    assert list(local.logs(RUN_ID, "train")) == [("train", "launch 1"), ("train", "launch 2")]


LOG = """[preprocess] tokenised
[evaluate] judged
[evaluate] [a list]
2026-11-26T03:51:45Z INFO    holdfast.runner: register is skipped: evaluate says not_blessed
"""


def test_the_output_of_one_step_is_read_from_the_run_log(record: Record, local: Local) -> None:
    Path(record.log).write_text(LOG)
    assert list(local.logs(RUN_ID, "evaluate")) == [("evaluate", "judged"), ("evaluate", "[a list]")]
    assert [name for name, _ in local.logs(RUN_ID)] == ["preprocess", "evaluate", "evaluate", "run"]
    with pytest.raises(MissingError, match="the step register has not begun"):
        list(local.logs(RUN_ID, "register"))


def test_logs_of_a_sweep_step_cover_all_trials_or_one(record: Record, local: Local, tmp_path: Path) -> None:
    replace(record, run_id="abcd", trials=(("training.seed=1",),)).write(open_store(f"file://{tmp_path}/store"))
    Path(record.log).write_text("[train-1] one\n[train-2] two\n")
    assert {name for name, _ in local.logs("abcd", "train")} == {"train-1", "train-2"}
    assert {name for name, _ in local.logs("abcd", "train-2")} == {"train-2"}
    assert {name for name, _ in local.logs("abcd", "train-1")} == {"train-1"}


def test_the_steps_of_an_ended_run_are_kept(record: Record, local: Local, process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(300)
    assert local.status(RUN_ID).steps == ()  # killed before it could report
    outcomes = [
        Outcome("preprocess", 1, 10.0, 12.0, 0),
        Outcome("train", 2, 12.0, 15.0, 12, "NaN"),
        Outcome("notify", 3, 15.0),
    ]
    keep_outcomes(Path(record.log), outcomes)
    assert [(row.name, row.state, row.seconds, row.error, row.exit_code) for row in local.status(RUN_ID).steps] == [
        ("preprocess", "SUCCEEDED", 2.0, "", 0), ("train", "FAILED", 3.0, "NaN", 12),
        ("notify", "FAILED", None, KILLED, 137),
    ]  # fmt: skip


def test_the_status_of_a_failed_run_has_the_reason(
    record: Record, local: Local, process: subprocess.Popen[str], tmp_path: Path
) -> None:
    process.terminate()
    process.wait(300)
    store = open_store(f"file://{tmp_path}/store")
    assert local.status(RUN_ID).exit_code is None
    summary = {"status": "failed", "reason": "a.txt: is broken", "exit_code": 11, "ended": record.submitted + 1}
    store.put(layout.run(RUN_ID, "summary.json"), json.dumps(summary).encode())
    status = local.status(RUN_ID)
    assert (status.state, status.message, status.exit_code) == ("FAILED", "a.txt: is broken", 11)
    store.put(layout.run(RUN_ID, "summary.json"), json.dumps({**summary, "ended": record.submitted - 1}).encode())
    status = local.status(RUN_ID)  # of the previous submission
    assert (status.state, status.message, status.exit_code) == ("UNFINISHED", "", None)


@pytest.mark.parametrize(
    ("word", "version", "state", "code"),
    [("blessed", 1, "SUCCEEDED", 0), ("not_blessed", None, "SUCCEEDED", 3), ("blessed", None, "FAILED", 7)],
    ids=["registered", "not blessed", "overtaken"],
)
def test_a_blessed_model_is_a_success_once_it_is_registered(
    record: Record, local: Local, process: subprocess.Popen[str], tmp_path: Path, word: str, version: int | None,
    state: str, code: int,
) -> None:  # fmt: skip
    process.terminate()
    process.wait(300)
    store = open_store(f"file://{tmp_path}/store")
    store.put(layout.verdict(RUN_ID, "key"), json.dumps({"word": word}).encode())
    summary = {"status": "failed", "reason": "another champion", "exit_code": 7, "ended": record.submitted + 1}
    store.put(layout.run(RUN_ID, "summary.json"), json.dumps(summary).encode())
    if version is not None:
        store.put(layout.registration(RUN_ID, "key"), json.dumps({"model": "m", "version": version}).encode())
    status = local.status(RUN_ID)
    assert (status.state, status.exit_code) == (state, code)


def test_a_run_record_restores_the_request_and_has_no_password(tmp_path: Path) -> None:
    request = replace(ORDER, salt="s", image="i:1", replan=True, store="s3://b", service_account="a")
    store = open_store(f"file://{tmp_path}")
    record_of(request, "kubeflow", "id-1", "https://me:hunter2@kfp").write(store)
    record = find_record(store, "id-1")
    assert record is not None
    assert record.request == request
    assert b"hunter2" not in store.get(layout.run(RUN_ID, "backend.json"))
