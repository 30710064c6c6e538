"""Removing many objects from S3 with few requests."""

import pytest

from holdfast.pipelines.chaos.proxy import (
    FaultyProxy,
    Forward,
    Reply,
    Request,
)
from holdfast.spec.errors import (
    AccessDeniedError,
    HoldfastError,
)
from holdfast.store import Store


@pytest.fixture
def store(proxied: Store) -> Store:
    """The store behind the proxy."""
    return proxied


def test_many_objects_are_deleted_with_few_requests(
    store: Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"many/{number}" for number in range(25)]
    for key in keys:
        store.put(key, b"1")
    before = len(proxy.requests)
    store.delete_many([*keys, "never/there"])
    assert len(proxy.requests) - before == 1
    assert list(store.list("many/")) == []


@pytest.mark.parametrize(("code", "error"), [("AccessDenied", AccessDeniedError), ("InternalError", None)])
def test_a_failed_deletion_is_reported_or_retried(
    store: Store, proxy: FaultyProxy, code: str, error: type[HoldfastError] | None
) -> None:
    for key in ("a", "b"):
        store.put(key, b"1")

    def partly(request: Request, forward: Forward) -> Reply:
        body = (
            "<DeleteResult><Error><Key>some/prefix/b</Key>"
            f"<Code>{code}</Code><Message>not now</Message></Error></DeleteResult>"
        ).encode()
        return Reply(200, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))], body)

    proxy.inject(partly, method="POST", path="delete")
    if error is not None:
        with pytest.raises(error, match="not now"):
            store.delete_many(["a", "b"])
        return
    store.delete_many(["a", "b"])
    assert [info.key for info in store.list("")] == ["warm"]
