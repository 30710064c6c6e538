"""Reports and timeout while Ray has no room for a placement group; tests/ray runs a real Ray."""

import logging

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'holdfast[ray]'")

from holdfast.launch.ray import placement_group as module
from holdfast.launch.ray.placement_group import GangReservation, fits, format_resources, options_of, shortfall

GIB = 2.0**30
SMALL = {"CPU": 2.0, "memory": 4 * GIB, "node:10.0.0.1": 1.0, "object_store_memory": GIB}
LARGE = {"CPU": 64.0, "memory": 256 * GIB, "GPU": 8.0, "accelerator_type:H100": 1.0}
GANG = {"CPU": 16.0, "memory": 64 * GIB, "GPU": 8.0}


def test_a_shortfall_names_the_request_and_the_nodes() -> None:
    assert shortfall("train", GANG, 2, [SMALL, LARGE, SMALL]) == (
        "train wants 2 nodes with 16 CPU, 64 GiB memory, 8 GPU each, and 1 of Ray's 3 nodes is large enough; there are "
        "2 with 2 CPU, 4 GiB memory; 1 with 64 CPU, 256 GiB memory, 8 GPU"
    )
    assert shortfall("train", GANG, 1, [LARGE]).startswith(
        "train wants a node with 16 CPU, 64 GiB memory, 8 GPU, and others use what is large enough; there are 1 with"
    )
    assert shortfall("train", {"TPU": 4.0}, 1, []) == (
        "train wants a node with 4 TPU, and none of Ray's 0 nodes is large enough"
    )


def test_a_node_fits_by_its_total_resources() -> None:
    assert fits(GANG, LARGE)
    assert not fits({**GANG, "memory": 257 * GIB}, LARGE)
    assert not fits({"NPU": 1.0}, LARGE)


def test_amounts_become_what_a_task_takes() -> None:
    resources = {"CPU": 2.0, "memory": GIB, "TPU": 4.0}
    assert options_of(resources) == {"num_cpus": 2.0, "memory": GIB, "num_gpus": 0, "resources": {"TPU": 4.0}}
    assert format_resources({"memory": GIB / 2, "GPU": 1.0, "CPU": 0.5}) == "0.5 CPU, 0.5 GiB memory, 1 GPU"


class FakeRay:
    """The state of a placement group, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.now = "PENDING", 0.0
        monkeypatch.setattr(module, "placement_group", lambda bundles, **_: bundles)
        monkeypatch.setattr(module, "placement_group_table", lambda _: {"state": self.state})
        monkeypatch.setattr(module, "nodes_of", lambda *_: [SMALL])

    def room(self, patience: float) -> GangReservation:
        """Room for a gang."""
        return GangReservation("train", GANG, 2, patience=patience, clock=lambda: self.now)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A Ray that gives no room until a test allows it."""
    return FakeRay(monkeypatch)


def test_a_shortfall_is_logged_within_seconds_and_expires_after_the_timeout(
    fake: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    room = fake.room(patience=60.0)
    for fake.now in (0.0, 1.0, 2.9):
        assert not room.is_ready()
    assert not caplog.records
    for fake.now in range(3, 60):
        assert not room.is_ready()
        assert not room.is_expired
    (message,) = caplog.messages
    assert message.startswith("waiting: train wants 2 nodes with 16 CPU")
    assert message.endswith("cluster.pending_timeout_minutes: 1")
    fake.now = 60.0
    assert room.is_expired


def test_room_that_is_lost_is_waited_for_as_long_again(fake: FakeRay) -> None:
    room, fake.state = fake.room(patience=60.0), "CREATED"
    assert room.is_ready()
    fake.state, fake.now = "RESCHEDULING", 1000.0
    assert not room.is_ready()
    assert not room.is_expired
    fake.now = 1060.0
    assert room.is_expired
    fake.state = "CREATED"
    assert room.is_ready()
    assert not room.is_expired


def test_a_queued_request_does_not_expire(fake: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    room = fake.room(patience=60.0)
    for fake.now in range(0, 1000, 10):
        assert not room.is_ready(queued=True)
        assert not room.is_expired
    assert not caplog.records


def test_a_changed_shortfall_is_logged_immediately(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    room = fake.room(patience=600.0)
    for fake.now in range(10):
        room.is_ready()
    monkeypatch.setattr(module, "nodes_of", lambda *_: [SMALL, LARGE])
    for fake.now in range(10, 20):
        room.is_ready()
    assert ["none of Ray's 1 nodes" in message for message in caplog.messages] == [True, False]
