"""Fixtures of the tests with a faulty proxy in front of a real S3."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.pipelines.chaos.proxy import FaultyProxy
from holdfast.store import Store, open_store, parallel
from holdfast.store.s3 import errors
from tests.store.azurite import ACCOUNT, KEY, PROGRAM, azurite, create_container
from tests.store.google import GoogleServer, google_server

DEADLINE = 60.0  # an attempt waits a third of it
NEEDS_AZURITE = [
    pytest.mark.drill,
    pytest.mark.skipif(PROGRAM is None, reason="needs azurite-blob, Azure's server for tests (npm install azurite)"),
]


@pytest.fixture(scope="session")
def azurite_server() -> Iterator[str]:
    """The account of a real server of Azure Blob Storage, one per test process."""
    with azurite() as address:
        yield address


@pytest.fixture
def az_url(azurite_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The root of an empty store in a fresh container."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azurite_server)
    container = f"test-{uuid.uuid4().hex}"
    create_container(azurite_server, container)
    return f"az://{container}/some/prefix"


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
    """An empty server of Google Cloud Storage, in memory. The environment names it."""
    with google_server() as server:
        monkeypatch.setenv("GOOGLE_BASE_URL", server.address)
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", server.credentials)
        yield server


@pytest.fixture
def gs_url(google: GoogleServer) -> str:
    """The root of an empty store on it."""
    assert google.address
    return "gs://bucket/some/prefix"


@pytest.fixture(params=["file", "s3", "gs", pytest.param("az", marks=NEEDS_AZURITE)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The root of an empty store: the contract is checked in a folder, over S3, over a model of Google Cloud
    Storage, and (drill) over Azure Blob Storage."""
    if request.param == "file":
        return f"file://{tmp_path / 'store'}"
    return str(request.getfixturevalue(f"{request.param}_url"))


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
