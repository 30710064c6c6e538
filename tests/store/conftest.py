"""Fixtures of the tests with a faulty proxy in front of a real S3."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from holdfast.pipelines.chaos.proxy import FaultyProxy
from holdfast.store import Store, open_store, parallel
from holdfast.store.s3 import errors

DEADLINE = 60.0  # an attempt waits a third of it


@pytest.fixture
def proxy(s3_url: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def proxied(proxy: FaultyProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store behind the proxy after its first conditional write. It retries without long pauses."""
    monkeypatch.setattr(errors, "FIRST_PAUSE", 0.002)
    store = open_store(s3_url, deadline=DEADLINE)
    store.put_if_absent("warm", b"up")
    return store


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The content of an object of three parts."""
    monkeypatch.setattr(parallel, "PART_BYTES", 5 * 2**20)
    return os.urandom(2 * 5 * 2**20 + 1000)
