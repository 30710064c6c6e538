"""How long the driver of a job waits for its tasks; tests/ray runs a real Ray."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'holdfast[ray]'")

from holdfast.launch.ray import node
from holdfast.pipelines.backends.ray import driver, task
from holdfast.pipelines.backends.ray.driver import RaySteps
from holdfast.pipelines.runner import Execution, Node, Runner
from holdfast.spec import ExitCode, parse_spec
from holdfast.steps import STEPS
from holdfast.steps.jobs import outcomes_of

SPEC = "{name: small, data: {sources: [{uri: 's3://bucket/corpus'}]}}"


class FakeTask:
    """A started part of a step. A part without a node keeps waiting while it is queued; otherwise it is given up."""

    made: list[FakeTask]

    def __init__(self, step: str, label: str, *_: Any) -> None:
        self.step, self.label, self.has_room = step, label, True
        self.reference: str | None = label
        self.room = SimpleNamespace(free=lambda: None)
        self.was_queued: list[bool] = []
        FakeTask.made.append(self)

    def start_if_possible(self, *, queued: bool) -> str:
        self.was_queued.append(queued)
        self.has_room = self.label in kept
        return "" if self.has_room or queued else "given up"

    def cancel(self, *, force: bool) -> None:
        pass


kept: set[str] = set()  # parts whose nodes exist


SHARES = ("0/2", "1/2")


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RaySteps:
    """Steps with fake tasks that end after three checks."""
    FakeTask.made = []
    kept.clear()

    def wait(references: Sequence[str], timeout: float) -> tuple[list[str], list[str]]:
        ready = [task.label for task in FakeTask.made if task.label in kept and len(task.was_queued) >= 3]
        return [reference for reference in references if reference in ready], []

    monkeypatch.setattr(driver, "Task", FakeTask)
    monkeypatch.setattr(driver, "ray", SimpleNamespace(wait=wait, get=lambda _: (0, "")))
    return RaySteps(parse_spec(SPEC), SPEC, tmp_path.as_uri(), "holdfast-job")


def codes_of(steps: RaySteps) -> list[int]:
    """The exit codes of two shares that start together, in the order of their ends."""
    handles, codes = [steps.start(Execution("tokenise", share)) for share in SHARES], []
    while handles:
        steps.wait(handles)
        for handle in list(handles):
            if (code := handle.poll()) is not None:
                handles.remove(handle)
                codes.append(code)
    return codes


def test_a_queued_share_times_out_only_after_its_peers_end(steps: RaySteps, tmp_path: Path) -> None:
    kept.add("tokenise 0/2")
    assert codes_of(steps) == [ExitCode.OK, ExitCode.UNSCHEDULABLE]
    _, waiting_task = FakeTask.made
    *queued, last = waiting_task.was_queued
    assert (set(queued), last) == ({True}, False)
    assert len(queued) >= 3
    (outcome,) = outcomes_of("holdfast-job", "", store=tmp_path.as_uri())
    assert (outcome.step, outcome.exit_code, outcome.reason) == ("tokenise", 206, "given up")


def test_shares_that_have_all_lost_their_nodes_do_not_wait_for_each_other(steps: RaySteps) -> None:
    assert set(codes_of(steps)) == {ExitCode.UNSCHEDULABLE}
    assert len(FakeTask.made[0].was_queued) < 5


def test_a_pending_task_ends_on_a_stop_request(steps: RaySteps) -> None:
    handle = steps.start(Execution("evaluate"))
    FakeTask.made[0].reference = None
    handle.stop(force=False)
    assert (handle.poll(), steps.tasks) == (ExitCode.TERMINATED, [])


# A step that is killed `sys.argv[2]` times by the signal `sys.argv[3]`, and then exits with the code `sys.argv[4]`.
DYING = """
import os, pathlib, sys
file, times, number, code = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5])
begun = len(file.read_bytes()) if file.exists() else 0
file.write_bytes(b"x" * (begun + 1))
if begun < times:
    os.kill(os.getpid(), number)
sys.exit(code)
"""


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Replace the process of every step by one that is killed several times; returns a counter of its starts."""

    def dying(times: int, number: int = signal.SIGKILL, code: int = 0) -> Path:
        command = ["-c", DYING, str(tmp_path / "begun"), str(times), str(int(number)), str(code)]
        for module in (driver, task):
            monkeypatch.setattr(module, "start", lambda _, environment: node.start(command, environment))
        return tmp_path / "begun"

    return dying


@pytest.mark.parametrize(
    ("times", "number", "code", "budget", "expected", "begun"),
    [
        (0, signal.SIGKILL, 0, 2, 0, 1),
        (2, signal.SIGKILL, 0, 2, 0, 3),
        (9, signal.SIGKILL, 0, 2, ExitCode.KILLED, 3),
        (1, signal.SIGKILL, 0, 0, ExitCode.KILLED, 1),
        (0, signal.SIGKILL, ExitCode.KILLED, 1, ExitCode.KILLED, 2),  # as a shell reports it
        (1, signal.SIGTERM, 0, 2, ExitCode.TERMINATED, 1),
        (0, signal.SIGKILL, 5, 2, 5, 1),
    ],
)
def test_the_training_step_begins_again_when_it_was_killed_within_the_budget(
    dying: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    number: int,
    code: int,
    budget: int,
    expected: int,
    begun: int,
) -> None:
    file = dying(times, number, code)
    spec = parse_spec(SPEC, (f"cluster.retries.budget={budget}",))
    steps = RaySteps(spec, SPEC, tmp_path.as_uri(), "holdfast-job")
    node = Node("train")
    monkeypatch.setattr(Runner, "_notify", lambda _: None)
    monkeypatch.setitem(STEPS, "train", replace(STEPS["train"], inputs=(), outputs=()))
    assert Runner([node], steps, {}).run() == expected
    assert len(file.read_bytes()) == begun


def test_the_process_of_a_task_that_was_killed_is_lost_and_any_other_ending_is_its_code(
    dying: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "address", lambda: "here")  # the original one queries the network
    dying(1)
    with pytest.raises(task.LostError, match="was killed"):
        task.run("evaluate", "evaluate", SPEC, [])
    assert task.run("evaluate", "evaluate", SPEC, []) == (0, "")
    dying(9, signal.SIGTERM)
    assert task.run("evaluate", "evaluate", SPEC, []) == (ExitCode.TERMINATED, "")


@pytest.mark.parametrize("budget", [0, 3])
def test_ray_runs_every_task_again_that_was_lost_within_the_budget(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options_by_name: dict[str, dict[str, Any]] = {}

    def options(**options: Any) -> SimpleNamespace:
        options_by_name[options["name"]] = options
        return SimpleNamespace(remote=lambda *_: "reference")

    room = SimpleNamespace(is_ready=lambda **_: True, place=lambda: None)
    monkeypatch.setattr(task, "ray", SimpleNamespace(remote=lambda _: SimpleNamespace(options=options)))
    monkeypatch.setattr(task, "GangReservation", lambda *_, **__: room)
    spec = parse_spec(SPEC, (f"cluster.retries.budget={budget}",))
    for step in STEPS:
        ray_task = task.Task(step, step, spec, SPEC, [])
        assert ray_task.start_if_possible(queued=False) == ""
        assert ray_task.reference == "reference"
    assert options_by_name.keys() == STEPS.keys()
    for settings in options_by_name.values():
        assert settings["max_retries"] == budget
        assert settings["retry_exceptions"] == ([task.LostError] if budget else False)
