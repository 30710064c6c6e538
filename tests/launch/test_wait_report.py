"""A launcher records what it waits for when that changes, however often it sees it."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes.client import Configuration

from holdfast.launch.kubernetes.client import Api
from holdfast.launch.kubernetes.follow import Follower
from holdfast.launch.kubernetes.kinds import KINDS
from holdfast.launch.reporting import WaitReport
from holdfast.telemetry.channel import add_listener
from holdfast.telemetry.events import LaunchPending


@pytest.fixture
def waits() -> Iterator[list[LaunchPending]]:
    """The emitted events."""
    events: list[LaunchPending] = []
    remove = add_listener(lambda event, _: events.append(event) if isinstance(event, LaunchPending) else None)
    yield events
    remove()


def pending(rank: int, message: str) -> dict[str, Any]:
    """A pod that the scheduler has no node for."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {
        "metadata": {"name": f"job-worker-{rank}", "uid": f"uid-{rank}"}, "spec": {},
        "status": {"phase": "Pending", "conditions": [condition]},
    }  # fmt: skip


def test_two_pods_that_cannot_be_scheduled_are_one_event_until_something_changes(waits: list[LaunchPending]) -> None:
    api = Api(lambda: Configuration(host="http://127.0.0.1:9"), "default")
    follower = Follower(api, KINDS["pytorchjob"], "job", "3f2a", 1, threading.Condition())
    follower._nodes = 2
    for memory in ("memory", "memory", "cpu"):
        follower._pods.objects = {f"uid-{n}": pending(n, f"0/1 nodes: insufficient {memory}") for n in range(2)}
        for _ in range(4 * 60):  # checks in two minutes
            assert follower._obstacle(600.0) is None
    first, second = (event.reason for event in waits)
    assert first.startswith("2 pods cannot be scheduled: 0/1 nodes: insufficient memory")
    assert "insufficient cpu" in second
    follower._pods.objects.popitem()
    follower._obstacle(600.0)
    assert waits[2].reason.startswith("node rank 0 (pod job-worker-0): cannot be scheduled")


def test_a_reason_that_stays_for_an_hour_is_one_event(waits: list[LaunchPending]) -> None:
    now = 0.0
    report = WaitReport(lambda: now)
    for _ in range(3600):
        report.record("a")
        now += 1.0
    assert [(event.reason, event.count) for event in waits] == [("a", 1)]


def test_reasons_that_alternate_are_recorded_once_a_minute_with_a_count(waits: list[LaunchPending]) -> None:
    now = 0.0
    report = WaitReport(lambda: now)
    for _ in range(120):
        report.record("a")
        report.record("b")
        now += 0.5
    report.record("a")
    assert [(event.reason, event.count) for event in waits] == [("a", 1), ("b", 1), ("a", 120)]
    report.end()
    report.record("a")  # its pods started, and are gone again
    assert (waits[-1].reason, waits[-1].count) == ("a", 1)
    assert len(waits) == 4
