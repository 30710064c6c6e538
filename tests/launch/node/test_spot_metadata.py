"""Notices of three clouds about reclaimed machines, as their metadata services send them."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from holdfast.launch.node import spot_metadata
from holdfast.launch.node.spot_metadata import MAX_ANSWER, Aws, Azure, Gcp
from tests.faults.nodes import PATIENCE
from tests.launch.metadata import MACHINE, Metadata
from tests.ports import free_port


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    """A metadata service without requests so far. It answers, if late, on a busy machine."""
    monkeypatch.setattr(spot_metadata, "TIMEOUT", PATIENCE)
    with Metadata() as service:
        yield service


def in_two_minutes() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=120)


def test_aws_is_polled_with_a_token_and_returns_action_and_time(metadata: Metadata) -> None:
    cloud = Aws(metadata.url)
    assert cloud.ask() is None
    metadata.action = {"action": "terminate", "time": in_two_minutes().strftime("%Y-%m-%dT%H:%M:%SZ")}
    notice = cloud.ask()
    assert notice is not None
    assert (notice.words, notice.certain) == ("AWS will terminate it", True)
    assert notice.seconds is not None
    assert 0 < notice.seconds <= 120
    assert [path for path in metadata.requests if "token" in path] == ["PUT /latest/api/token"]


def test_a_token_of_aws_that_has_run_out_is_followed_by_another_one(metadata: Metadata) -> None:
    cloud = Aws(metadata.url)
    assert cloud.ask() is None
    metadata.token = "token-2"
    assert cloud.ask() is None
    assert len([path for path in metadata.requests if "token" in path]) == 2


def test_a_rebalance_recommendation_of_aws_is_not_certain(metadata: Metadata) -> None:
    metadata.rebalance = True
    notice = Aws(metadata.url).ask()
    assert notice is not None
    assert not notice.certain


def test_gcp_is_polled_with_the_etag_of_its_last_reply(metadata: Metadata) -> None:
    cloud = Gcp(metadata.url)
    assert cloud.ask() is None
    metadata.preempt()  # between two requests: the second one must not wait for another change
    notice = cloud.ask()
    assert notice is not None
    assert notice.seconds == 30
    assert metadata.requests[0].endswith("/preempted")
    assert "last_etag=tag%2B0%2F%3D" in metadata.requests[1]


def test_a_machine_of_azure_looks_for_itself_among_those_that_an_event_names(metadata: Metadata) -> None:
    cloud = Azure(metadata.url)
    event = {"EventType": "Preempt", "NotBefore": format_datetime(in_two_minutes(), usegmt=True)}
    metadata.events = [{**event, "Resources": ["machine-1"]}, {**event, "EventType": "Freeze", "Resources": [MACHINE]}]
    assert cloud.ask() is None
    metadata.events.append({**event, "Resources": ["machine-1", MACHINE]})
    notice = cloud.ask()
    assert notice is not None
    assert "Preempt" in notice.words
    assert notice.seconds is not None
    assert 0 < notice.seconds <= 120
    metadata.events = [{**event, "NotBefore": "", "EventStatus": "Started", "Resources": [MACHINE]}]
    begun = cloud.ask()
    assert begun is not None
    assert begun.seconds == 0


@pytest.mark.parametrize("cloud", [Aws, Gcp, Azure])
def test_metadata_requests_use_no_proxy(
    metadata: Metadata, cloud: type[Aws | Gcp | Azure], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    assert cloud(metadata.url).ask() is None


@pytest.mark.parametrize("cloud", [Aws, Gcp, Azure])
def test_a_busy_metadata_service_raises_an_os_error(metadata: Metadata, cloud: type[Aws | Gcp | Azure]) -> None:
    metadata.broken = 1
    with pytest.raises(OSError, match="status 503"):
        cloud(metadata.url).ask()


def test_an_answer_without_end_is_not_read_to_its_end(metadata: Metadata) -> None:
    metadata.action = {"action": "x" * MAX_ANSWER, "time": "2026-11-22T08:22:00Z"}
    with pytest.raises(OSError, match=f"{MAX_ANSWER + 1} bytes"):
        Aws(metadata.url).ask()


def test_only_plain_http_to_a_host_is_an_address() -> None:
    with pytest.raises(ValueError, match="write http://HOST"):
        Gcp("file:///etc/passwd")
