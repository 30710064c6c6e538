"""A server that sends slowly: each operation ends by its deadline, though no single read times out."""

import pytest

from holdfast.pipelines.chaos.proxy import FaultyProxy
from holdfast.runtime import deadlines
from holdfast.spec.errors import StoreUnreachableError
from holdfast.store import Store, open_store
from tests.dripping import REPLIES, dripping

OPERATIONS = {
    "get": lambda store: store.get("k"),
    "range": lambda store: store.get("k", 0, 50_000),
    "stat": lambda store: store.stat("k"),
    "list": lambda store: list(store.list("")),
    "put": lambda store: store.put("k", b"1"),
    "delete": lambda store: store.delete("k"),
}


@pytest.mark.parametrize(
    ("reply", "operation"),
    [
        ("status line", "put"),
        ("headers", "stat"),
        ("headers", "delete"),
        ("body", "get"),
        ("body", "list"),
        ("chunks", "list"),
    ],
)
def test_an_operation_on_a_server_that_drips_ends(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, reply: str, operation: str
) -> None:
    monkeypatch.setattr(deadlines, "LEAST_RATE", 2**20)
    with dripping(REPLIES[reply]) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(StoreUnreachableError, match="no whole reply"):
            OPERATIONS[operation](open_store(s3_url, deadline=0.6))


def test_a_request_that_is_in_time_is_left_alone(proxied: Store, proxy: FaultyProxy, large: bytes) -> None:
    proxied.put("big", large)
    assert proxied.get("big") == large
    assert not deadlines._attempts
