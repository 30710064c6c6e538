"""The watch on a cloud's metadata service: a notice becomes the signal that a drained node gets, and an event."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.launch.exits import node_exit_of
from holdfast.launch.launches import avoided_nodes, leaving_nodes, was_reclaimed
from holdfast.launch.node.output import NodeEvents, Place
from holdfast.launch.node.spot_metadata import Aws
from holdfast.launch.node.spot_notice import CLOUD, RECENT, SERVICE_URL, SpotNoticeWatch, reclaims
from holdfast.runtime.node import NODE_NAME
from holdfast.spec import ExitCode
from holdfast.spec.cluster import Cluster, Nodes
from holdfast.store import Store, open_store
from holdfast.telemetry import emit, read_events, recording
from holdfast.telemetry.events import NodeReclaimed, StragglerDetected, WarningIssued
from tests.launch.metadata import Metadata

SECONDS = 180.0
TIME = "2026-11-22T08:22:00Z"  # in the past


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    """The metadata service, in AWS's format, that the watches of this process query."""
    with Metadata() as service:
        monkeypatch.setenv(CLOUD, "aws")
        monkeypatch.setenv(SERVICE_URL, service.url)
        monkeypatch.setenv(NODE_NAME, "node-7")
        monkeypatch.setattr(Aws, "pause", 0.01)
        yield service


@pytest.fixture
def noticed() -> Iterator[threading.Event]:
    """Set by SIGTERM."""
    came = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    yield came
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store in a folder."""
    return open_store(f"file://{tmp_path}")


def wait(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_notice_is_a_sigterm_and_an_event_of_the_launch(
    metadata: Metadata, noticed: threading.Event, store: Store
) -> None:
    metadata.rebalance = True
    with NodeEvents(Place(store.url, "run", 3)) as node_events, SpotNoticeWatch(node_events) as watch:
        wait(lambda: len(metadata.requests) > 5)
        assert not noticed.is_set(), "what is only likely ends nothing"
        metadata.action = {"action": "stop", "time": TIME}
        wait(noticed.is_set)
    events = read_events(store, "run")
    message = "node node-7 reclaimed by the cloud, 0 s notice: AWS will stop it"
    assert [event.text for event in events if isinstance(event, NodeReclaimed)] == [message]
    assert len([event for event in events if isinstance(event, WarningIssued)]) == 1
    assert [was_reclaimed(store, "run", launch) for launch in (2, 3)] == [False, True]
    ending = node_exit_of((), [ExitCode.TERMINATED], reclaimed=watch.words)
    assert (ending.reclaimed, ending.detail) == (True, message)


def test_an_unavailable_metadata_service_is_logged_once_and_polled_again(
    metadata: Metadata, noticed: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.launch.node.spot_notice.AFTER_FAILURE", 0.01)
    metadata.broken, metadata.action = 5, {"action": "stop", "time": TIME}
    with NodeEvents() as events, SpotNoticeWatch(events):
        wait(noticed.is_set)
    assert len([line for line in caplog.messages if "does not say whether" in line]) == 1


def test_no_metadata_service_is_polled_unless_the_spec_names_a_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLOUD, raising=False)
    before = set(threading.enumerate())  # some of them may end meanwhile
    with NodeEvents() as events, SpotNoticeWatch(events):
        assert set(threading.enumerate()) <= before


def test_others_are_preferred_to_reclaimed_nodes_for_a_while_and_slow_ones_are_avoided(store: Store) -> None:
    with recording(store, "run", "node", launch=1):
        emit(StragglerDetected(rank=3, host="slow", phase="data", ratio=1.3, seconds=0.1, step=20))
        emit(NodeReclaimed(host="gone", reason="GCP preempts it"))
    nodes = Nodes(min=2, max=4)
    assert leaving_nodes(store, "run", Cluster(nodes=nodes, spot="gcp")) == {"gone"}
    assert leaving_nodes(store, "run", Cluster(nodes=nodes)) == frozenset()
    assert avoided_nodes(store, "run", Cluster(nodes=nodes, spot="gcp", stragglers="exclude")) == {"slow"}
    old = [event.model_copy(update={"time": time.time() - RECENT - 1}) for event in read_events(store, "run")]
    assert reclaims(old) == []
