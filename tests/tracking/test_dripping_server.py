"""An MLflow whose answer never ends, and never pauses for long, cannot block a call of the client forever."""

import pytest

from holdfast.spec.errors import ExitCode
from holdfast.tracking import connection
from holdfast.tracking.connection import TrackingUnavailable, connect, translated
from tests.dripping import REPLIES, dripping


@pytest.mark.parametrize("reply", ["headers", "body"])
def test_a_call_ends_though_the_server_drips(reply: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "total_seconds", lambda: 1.0)
    with dripping(REPLIES[reply]) as url, pytest.raises(TrackingUnavailable, match="did not end within 1 s") as error:
        client = connect(url)
        with translated(url):
            client.get_run("0" * 32)
    assert error.value.exit_code == ExitCode.STORE_UNREACHABLE


def test_a_call_has_the_time_of_all_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(connection.TIMEOUT, "7")
    monkeypatch.setenv(connection.RETRIES, "1")
    assert connection.total_seconds() == 58
