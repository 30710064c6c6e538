"""Retries within a step: which failures, how many, with which waits, and when it gives up immediately."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tenacity

from holdfast.components.train.step import GangError
from holdfast.runtime import retry
from holdfast.runtime.environment import OUTCOMES
from holdfast.runtime.exits import on_shutdown_request, request_shutdown, shutdown_requested
from holdfast.spec.cluster import Retries
from holdfast.spec.errors import (
    AccessDeniedError,
    ClusterUnreachableError,
    DataError,
    HoldfastError,
    NoSpaceError,
    PreemptedError,
    StoreUnreachableError,
    TerminatedError,
)
from holdfast.steps.jobs import outcomes_of
from holdfast.store import open_store
from tests import warm


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between tries, without real sleeps."""
    seconds_waited: list[float] = []
    caller, sleep = threading.current_thread(), time.sleep

    def wait(seconds: float) -> None:  # threads of other tests really sleep
        seconds_waited.append(seconds) if threading.current_thread() is caller else sleep(seconds)

    monkeypatch.setattr(tenacity.nap.time, "sleep", wait)
    return seconds_waited


class Failing:
    """An action that raises each of `errors` in order, and then succeeds."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_a_temporary_failure_is_retried_in_the_step_with_bounded_backoff(waits: list[float]) -> None:
    action = Failing(*[StoreUnreachableError("s3: away")] * 3, ClusterUnreachableError("api: away"), NoSpaceError("x"))
    assert retry.with_retries("train", action, Retries(budget=5, backoff_seconds=10, max_backoff_seconds=50)) == "done"
    assert action.calls == 6
    bounds = [10, 20, 40, 50, 50]
    assert [bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True)] == [True] * 5


@pytest.mark.parametrize(
    "error",
    [
        DataError("broken"), AccessDeniedError("no"), HoldfastError("bug"), RuntimeError("bug"), KeyboardInterrupt(),
        TerminatedError("left"), PreemptedError("saved and left"), GangError("its own budget is used up", 203),
    ],
    ids=repr,
)  # fmt: skip
def test_a_permanent_requested_or_already_retried_failure_is_not_retried(
    error: BaseException, waits: list[float]
) -> None:
    action = Failing(error)
    with pytest.raises(type(error)):
        retry.with_retries("train", action, Retries())
    assert (action.calls, waits) == (1, [])


def test_retries_follow_the_budget_of_the_spec_and_raise_the_last_failure(waits: list[float]) -> None:
    action = Failing(*(StoreUnreachableError(f"try {number}") for number in range(9)))
    with pytest.raises(StoreUnreachableError, match="try 2"):
        retry.with_retries("evaluate", action, Retries(budget=2))
    assert action.calls == 3
    with pytest.raises(StoreUnreachableError, match="try 3"):
        retry.with_retries("evaluate", action, Retries(budget=0))


def test_a_failure_on_the_way_out_is_not_tried_again(waits: list[float]) -> None:
    def leaves() -> None:
        request_shutdown()
        raise StoreUnreachableError("while it left")

    with on_shutdown_request(lambda: None):
        with pytest.raises(StoreUnreachableError):
            retry.with_retries("train", leaves, Retries())
        assert shutdown_requested()
    with on_shutdown_request(lambda: None):  # the next step of this process
        assert not shutdown_requested()
    assert waits == []


STEP = """
import os, sys
from holdfast.spec.errors import ExitCode, StoreUnreachableError
from holdfast.steps import StepResult
from holdfast.steps.adapters import component, main

def body(spec, url, *, run_id):
    with open(sys.argv[3], "a") as tries:
        print("try", file=tries, flush=True)
    if os.path.getsize(sys.argv[3]) <= 4 * int(sys.argv[4]):
        raise StoreUnreachableError("s3://bucket: away")
    return StepResult({"word": "blessed"})

if sys.argv[1] == "kfp":
    given = {"spec": open(sys.argv[2]).read(), "overrides": [], "store": sys.argv[5], "job": "job-7", "run_id": "r"}
    component("evaluate", body, given | {"compiled": {}} | dict.fromkeys(["metrics", "report"]))
else:
    sys.exit(main("evaluate", body, ["--spec", sys.argv[2], "--store", sys.argv[5], "--job", "job-7", "--run-id", "r"]))
"""
SPEC = "name: a\ndata: {sources: [{uri: x}]}\ncluster: {retries: {budget: 2, backoff_seconds: %s}}\n"


def started(face: str, folder: Path, fails: int, wait: float, **environment: str) -> subprocess.Popen[str]:
    (folder / "spec.yaml").write_text(SPEC % wait)
    arguments = [face, str(folder / "spec.yaml"), str(folder / "tries"), str(fails), f"file://{folder}/store"]
    inherited = {name: value for name, value in os.environ.items() if name != OUTCOMES}
    command = [sys.executable, "-c", STEP, *arguments]
    return warm.popen(command, {**inherited, **environment}, text=True, stderr=subprocess.PIPE)


@pytest.mark.parametrize("face", ["kfp", "argo"])
@pytest.mark.parametrize(("fails", "code", "calls"), [(2, 0, 3), (3, 203, 3)])
def test_both_faces_of_a_step_try_again_within_the_budget(
    tmp_path: Path, face: str, fails: int, code: int, calls: int
) -> None:
    step = started(face, tmp_path, fails, 0.01)
    stderr = step.communicate(timeout=240)[1]
    assert "evaluate: s3://bucket: away; tries again by itself (2 of 2)" in stderr
    assert (tmp_path / "tries").read_text().count("try") == calls
    if code:
        assert step.returncode == code
        assert (
            outcomes_of("job-7", (tmp_path / "spec.yaml").read_text(), (), f"file://{tmp_path}/store")[0].exit_code
            == code
        )


def test_on_one_machine_the_same_command_is_the_retry(tmp_path: Path) -> None:
    (tmp_path / "outcomes").mkdir()
    step = started("argo", tmp_path, 9, 60, **{OUTCOMES: str(tmp_path / "outcomes")})
    step.communicate(timeout=240)
    assert (step.returncode, (tmp_path / "tries").read_text()) == (203, "try\n")


def test_sigterm_between_two_tries_ends_the_step_immediately(tmp_path: Path) -> None:
    step = started("argo", tmp_path, 9, 3600)
    assert step.stderr is not None
    assert any("tries again by itself" in line for line in step.stderr)
    step.send_signal(signal.SIGTERM)
    step.communicate(timeout=240)
    assert (step.returncode, (tmp_path / "tries").read_text()) == (143, "try\n")


DURING_A_WAIT = """
import signal, sys, threading, time
from holdfast.steps.runner import run_step

def body(begun):
    begun("file:///nowhere")
    # A signal that another thread receives interrupts no wait of the main thread, as one just before the wait.
    threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
    time.sleep(3600)

sys.exit(run_step("train", body)[1])
"""


def test_sigterm_ends_a_step_whose_wait_it_does_not_interrupt() -> None:
    assert warm.run([sys.executable, "-c", DURING_A_WAIT], os.environ).returncode == 143


LATE = """
import os, signal, sys
from types import SimpleNamespace
from holdfast.steps.runner import run_step

def body(begun):
    begun("file:///nowhere")
    return SimpleNamespace(summary="blessed")

def record(url, outcome):
    if outcome.ended is not None:
        os.kill(os.getpid(), signal.SIGTERM)

sys.exit(run_step("evaluate", body, record)[1])
"""


def test_an_ended_step_keeps_its_exit_code_after_a_late_sigterm() -> None:
    assert warm.run([sys.executable, "-c", LATE], os.environ).returncode == 0


SLOW = """
import sys, time
from holdfast.steps.runner import run_step
from holdfast.steps.jobs import recorder

def body(begun):
    begun(sys.argv[1])
    says = "begun"
    while True:
        try:
            print(says, flush=True)
            time.sleep(3600)
        except BaseException:
            says = "cleaning up"

run_step("train", body, recorder("job-8"))
"""


def test_a_step_records_sigterm_before_it_is_killed_during_shutdown(tmp_path: Path) -> None:
    """As under KFP's launcher, which does not wait for the step."""
    url = f"file://{tmp_path}/store"
    command = [sys.executable, "-c", SLOW, url]
    step = warm.popen(command, os.environ, stdout=subprocess.PIPE, text=True)
    assert step.stdout is not None
    assert step.stdout.readline() == "begun\n"
    step.send_signal(signal.SIGTERM)
    assert step.stdout.readline() == "cleaning up\n"
    deadline = time.monotonic() + 240
    while not (outcomes := outcomes_of("job-8", "", (), url)) or outcomes[0].ended is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    step.kill()
    step.wait()
    (outcome,) = outcomes_of("job-8", "", (), url)
    assert (outcome.exit_code, outcome.reason) == (143, "stop requested (SIGTERM)")
    assert open_store(url).stat("jobs/job-8/train.json") is not None
