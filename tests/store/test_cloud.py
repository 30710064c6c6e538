"""What the stores of other clouds add to their library: lost replies count, half an object never shows, a server that
ignores conditions is refused. The servers are Azurite, Azure's own for tests, and a model of Google's in memory."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.pipelines.chaos.proxy import FaultyProxy, answer, lose_reply, truncate
from holdfast.spec.errors import AccessDeniedError, DataError, SpecError, StoreRefusedError
from holdfast.store import ConflictError, Store, cloud, cloud_requests, in_bucket, open_store, parallel
from holdfast.store.cloud import CloudStore
from tests.script.launched import ask_to_leave, digest_of_run, run_script
from tests.store.conftest import NEEDS_AZURITE
from tests.store.google import GoogleServer


def of_azurite(test: object) -> object:
    """A test that needs Azurite."""
    for mark in NEEDS_AZURITE:
        test = mark(test)
    return test


@pytest.fixture
def proxy(az_url: str, azurite_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy in front of Azurite. The environment names it."""
    origin, _, account = azurite_server.rpartition("/")
    with FaultyProxy(origin) as proxy:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{proxy.url}/{account}")
        monkeypatch.setattr(cloud_requests, "FIRST_PAUSE", 0.01)
        yield proxy


@pytest.fixture
def proxied(proxy: FaultyProxy, az_url: str) -> Store:
    """A store behind the proxy, after its first conditional write."""
    store = open_store(az_url, deadline=30)
    assert store.put_if_absent("warm", b"up")
    return store


@of_azurite
def test_a_claim_and_a_swap_whose_replies_were_lost_are_ours(proxied: Store, proxy: FaultyProxy) -> None:
    faults = [proxy.inject(lose_reply(), method="PUT", path=key) for key in ("claim", "counter")]
    assert proxied.put_if_absent("claim", b"mine")
    version = proxied.compare_and_swap("counter", b"1", None)
    assert [fault.hits for fault in faults] == [1, 1]
    assert proxied.get_versioned("counter") == (b"1", version)
    proxy.inject(lose_reply(), method="PUT", path="counter")
    version = proxied.compare_and_swap("counter", b"2", version)
    assert proxied.get_versioned("counter") == (b"2", version)
    assert not proxied.put_if_absent("claim", b"theirs")
    with pytest.raises(ConflictError, match="another writer was first"):
        proxied.compare_and_swap("counter", b"3", "0x1")


@of_azurite
def test_servers_that_fail_for_a_while_are_waited_out(proxied: Store, proxy: FaultyProxy) -> None:
    proxied.put("k", b"content" * 1000)
    faults = [
        proxy.inject(answer(503), method="PUT", path="k"),
        proxy.inject(truncate(100), method="GET", path="k"),
    ]
    proxied.put("k", b"changed" * 1000)
    assert proxied.get("k") == b"changed" * 1000
    assert all(fault.hits for fault in faults)


@of_azurite
def test_a_large_object_moves_in_parts_and_half_of_one_never_shows(
    az_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parallel, "PART_BYTES", 3 * 2**20)
    store = open_store(az_url)
    content = os.urandom(4 * 3 * 2**20 + 17)
    store.put("put", [content[:7], content[7:]])
    store.put_stream("streamed", len(content), lambda: iter([content[:100], content[100:]]))
    assert store.put_if_absent("claimed", content)
    assert not store.put_if_absent("claimed", content[:-1] + b"?")
    for key in ("put", "streamed", "claimed"):
        assert store.get(key) == content
    store.download("put", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    store.upload(tmp_path / "copy", "uploaded")
    assert store.get("uploaded") == content

    def fails() -> Iterator[bytes]:
        yield content[: 7 * 2**20]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put_stream("half", len(content), fails)
    with pytest.raises(DataError, match="ends after"):
        store.put_stream("half", len(content), lambda: iter([content[:-1]]))
    assert store.stat("half") is None


@of_azurite
def test_a_wrong_key_is_named_and_not_shown(az_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    with pytest.raises(AccessDeniedError, match="put k in az://") as error:
        open_store(az_url, deadline=20).put("k", b"")
    assert "d3Jvbmc" not in str(error.value)


@of_azurite
def test_a_server_that_ignores_conditions_is_refused(az_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put = cloud.obstore.put

    def put_always(*values: Any, mode: object, **more: Any) -> Any:
        assert mode == "create"
        return put(*values, **more)

    monkeypatch.setattr(cloud.obstore, "put", put_always)
    monkeypatch.setattr(cloud, "_checked", set())
    store = open_store(az_url)
    with pytest.raises(StoreRefusedError, match="ignores conditional writes"):
        store.put_if_absent("claim", b"mine")
    assert not list(store.list(""))


@of_azurite
def test_a_run_that_is_stopped_resumes_with_the_bits_of_a_calm_one(az_url: str) -> None:
    def script(stop_in: int = -1) -> None:
        session = holdfast.session(seed=3)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(session.restore(model=model, optimizer=optimizer, steps=6), 6):
            if step == stop_in:
                ask_to_leave()
            loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step(step + 1, loss=loss)

    assert run_script(az_url, "calm", script)
    assert not run_script(az_url, "stopped", script, 3)
    assert run_script(az_url, "stopped", script)
    assert digest_of_run(az_url, "stopped") == digest_of_run(az_url, "calm")


@pytest.mark.parametrize(("url", "problem"), [("gs://", "names no bucket"), ("az:///x", "names no bucket")])
def test_an_address_without_a_bucket_is_refused(url: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        open_store(url)


def test_a_private_key_without_its_lines_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    key = {"private_key": "-----BEGIN PRIVATE KEY-----SECRET", "private_key_id": "1", "client_email": "me"}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
    with pytest.raises(StoreRefusedError, match="check the variables of the credentials") as error:
        open_store("gs://bucket")
    assert "83, 69, 67" not in str(error.value)


def test_addresses_of_three_clouds_are_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    store = open_store("gs://bucket/some/prefix/")
    assert isinstance(store, CloudStore)
    assert store.url == "gs://bucket/some/prefix"
    assert [in_bucket(url) for url in ("s3://b", "gs://b", "az://b", "file:///b", "b")] == [True] * 3 + [False] * 2


def outage(matches: Callable[[str, dict[str, str]], bool], seconds: float, status: int) -> Callable[..., int]:
    """A fault of requests that match: `status` for `seconds` after the first of them."""
    began: list[float] = []

    def fault(method: str, _key: str, query: dict[str, str]) -> int:
        if not matches(method, query):
            return 0
        began[:] = began or [time.monotonic()]
        return status if time.monotonic() - began[0] < seconds else 0

    return fault


def test_a_listing_that_failed_in_between_loses_no_key(gs_url: str, google: GoogleServer) -> None:
    store = open_store(gs_url, deadline=3)
    names = [f"k/{number}" for number in range(10)]
    for name in names:
        store.put(name, b"")
    google.faults.append(outage(lambda _, query: "continuation-token" in query, 1.5, 503))
    assert [info.key for info in store.list("k/")] == names


def test_a_large_write_whose_connection_broke_is_repeated(
    gs_url: str, google: GoogleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "PART_BYTES", 5 * 2**20)
    store = open_store(gs_url, deadline=3)
    content = bytes(100 * 2**20)
    google.faults.append(outage(lambda method, query: method == "PUT" and "partNumber" in query, 1.5, -1))
    store.put("large", content)
    info = store.stat("large")
    assert info is not None
    assert info.size == len(content)


def test_a_file_that_is_gone_is_not_taken_for_a_missing_bucket(gs_url: str, tmp_path: Path) -> None:
    def content() -> Iterator[bytes]:
        yield bytes(2**20)
        yield (tmp_path / "gone").read_bytes()

    with pytest.raises(FileNotFoundError):
        open_store(gs_url).put_stream("k", 20 * 2**20, content)


def test_a_large_body_has_more_time_than_a_small_one(
    gs_url: str, google: GoogleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_requests, "FREE_BYTES", 1000)
    monkeypatch.setattr(cloud_requests, "LEAST_RATE", 1000)
    store = open_store(gs_url, deadline=1.5)
    slow = [0.8]

    def fault(method: str, _key: str, _query: dict[str, str]) -> int:
        if method == "PUT" and slow:
            time.sleep(slow.pop())
        return 0

    google.faults.append(fault)
    store.put("k", bytes(2000))
    assert not slow
    assert sum(key.endswith("/k") for key in google.objects) == 1
    assert google.generation == 1001  # it was not sent again
