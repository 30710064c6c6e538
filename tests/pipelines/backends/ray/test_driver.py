"""How long the driver of a job waits for its tasks; Ray itself runs in tests/ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'holdfast[ray]'")

from holdfast.components.spec import ExitCode, parse_spec
from holdfast.components.store.jobs import outcomes_of
from holdfast.pipelines.backends.ray import driver
from holdfast.pipelines.backends.ray.driver import Walk

SPEC = "{name: small, data: {sources: [{uri: 's3://bucket/corpus'}]}}"


class FakeTask:
    """A part of a step that has begun. One whose node is not kept waits as long as it only waits for its turn."""

    made: list[FakeTask]

    def __init__(self, step: str, label: str, *_: Any) -> None:
        self.step, self.label, self.reference, self.has_room = step, label, label, True
        self.room = SimpleNamespace(free=lambda: None)
        self.was_queued: list[bool] = []
        FakeTask.made.append(self)

    def go_on(self, *, queued: bool) -> str:
        self.was_queued.append(queued)
        self.has_room = self.label in kept
        return "" if self.has_room or queued else "given up"

    def cancel(self, *, force: bool) -> None:
        pass


kept: set[str] = set()  # parts whose nodes are there


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Walk:
    """A walk whose tasks are such, and end once they were looked at three times."""
    FakeTask.made = []
    kept.clear()

    def wait(references: Sequence[str], timeout: float) -> tuple[list[str], list[str]]:
        done = [task.label for task in FakeTask.made if task.label in kept and len(task.was_queued) >= 3]
        return [one for one in references if one in done], []

    monkeypatch.setattr(driver, "Task", FakeTask)
    monkeypatch.setattr(driver, "ray", SimpleNamespace(wait=wait, get=lambda _: (0, "")))
    return Walk(parse_spec(SPEC), SPEC, tmp_path.as_uri(), "holdfast-job", {})


def test_a_share_that_waits_for_others_waits_and_is_given_up_once_there_is_nobody_to_wait_for(
    walk: Walk, tmp_path: Path
) -> None:
    kept.add("tokenise 0/2")
    code = walk._tasks("tokenise", {"tokenise 0/2": [], "tokenise 1/2": []})
    assert code == ExitCode.UNSCHEDULABLE
    _, waits = FakeTask.made
    *queued, last = waits.was_queued
    assert (set(queued), last) == ({True}, False)
    assert len(queued) >= 3
    (outcome,) = outcomes_of("holdfast-job", "", store=tmp_path.as_uri())
    assert (outcome.step, outcome.exit_code, outcome.reason) == ("tokenise", 206, "given up")


def test_shares_that_have_all_lost_their_nodes_do_not_wait_for_each_other(walk: Walk) -> None:
    assert walk._tasks("tokenise", {"tokenise 0/2": [], "tokenise 1/2": []}) == ExitCode.UNSCHEDULABLE
    assert len(FakeTask.made[0].was_queued) < 5
