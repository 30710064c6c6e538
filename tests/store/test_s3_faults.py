"""The S3 store with a faulty network or server: real HTTP through a real faulty proxy."""

import threading
from pathlib import Path

import pytest

from holdfast.pipelines.chaos.proxy import (
    Act,
    FaultyProxy,
    Forward,
    Injection,
    Reply,
    Request,
    answer,
    answer_after,
    hold,
    lose_reply,
    reset,
)
from holdfast.spec.errors import (
    AccessDeniedError,
    HoldfastError,
    MissingError,
    NoSpaceError,
    StoreRefusedError,
    StoreUnreachableError,
)
from holdfast.store import Store, open_store
from holdfast.store.s3 import errors
from tests.conftest import CREDENTIALS
from tests.store.conftest import DEADLINE


@pytest.fixture
def store(proxied: Store) -> Store:
    """The store behind the proxy."""
    return proxied


PASSING = {
    "500": answer(500, "InternalError"),
    "503": answer(503, "SlowDown"),
    "502 without a code": answer(502, ""),
    "409": answer(409, "ConditionalRequestConflict"),
    "reset": reset(),
    "reply lost": lose_reply(),
    "500 although applied": answer_after(500, "InternalError"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_every_operation_retries_a_temporary_fault(
    store: Store, proxy: FaultyProxy, fault: Act, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(b"from a file")

    def twice(method: str) -> None:
        faults.append(proxy.inject(fault, method=method, times=2))

    faults: list[Injection] = []
    twice("PUT")
    store.put("k", b"0123456789")
    twice("GET")
    assert store.get("k") == b"0123456789"
    twice("GET")
    assert store.get("k", 3, 4) == b"3456"
    twice("PUT")
    assert store.put_if_absent("claim", b"mine")
    twice("PUT")
    assert not store.put_if_absent("claim", b"theirs")
    twice("PUT")
    version = store.compare_and_swap("swap", b"1", None)
    twice("PUT")
    version = store.compare_and_swap("swap", b"2", version)
    twice("GET")
    assert store.get_versioned("swap") == (b"2", version)
    twice("HEAD")
    info = store.stat("k")
    assert info is not None
    assert info.size == 10
    twice("GET")
    assert [entry.key for entry in store.list("")] == ["claim", "k", "swap", "warm"]
    twice("PUT")
    store.upload(tmp_path / "source", "file")
    twice("HEAD")
    twice("GET")
    store.download("file", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"from a file"
    twice("DELETE")
    store.delete("k")
    assert store.stat("k") is None
    assert [fault.hits for fault in faults] == [2] * len(faults)


def test_a_silent_server_fails_an_attempt_and_not_the_operation(s3_url: str, proxy: FaultyProxy) -> None:
    store = open_store(s3_url, deadline=15)  # an attempt waits five seconds
    release = threading.Event()
    proxy.inject(hold(release), method="PUT")
    store.put("k", b"1")
    release.set()
    assert store.get("k") == b"1"


def test_the_deadline_ends_an_operation_that_never_succeeds(
    s3_url: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "MAX_RETRY_AFTER", 2 * DEADLINE)
    store = open_store(s3_url, deadline=DEADLINE)
    proxy.inject(answer(503, "SlowDown"), times=2)
    proxy.inject(answer(503, "SlowDown", retry_after=3600), times=None)  # longer than the remaining time
    with pytest.raises(StoreUnreachableError) as error:
        store.put("some/key", b"1")
    message = str(error.value)
    assert "put some/key" in message
    assert f"within {DEADLINE:g} s" in message
    assert len(proxy.requests) == 3
    assert "attempt 3 failed" in message
    assert "503 SlowDown" in message
    assert "run the same command again" in message


def test_a_server_that_is_not_there_is_unreachable(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hunter2@127.0.0.1:9")
    with pytest.raises(StoreUnreachableError, match=r"within 0\.5 s") as error:
        open_store(s3_url, deadline=0.5).get("k")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "code", "error", "says"),
    [
        (403, "AccessDenied", AccessDeniedError, "AWS_ACCESS_KEY_ID"),
        (404, "NoSuchBucket", MissingError, "bucket 'test-"),
        (400, "InvalidRequest", StoreRefusedError, "400 InvalidRequest"),
        (507, "XMinioStorageFull", NoSpaceError, "free some space"),
    ],
)
def test_a_permanent_s3_error_is_raised_without_retry(
    store: Store, proxy: FaultyProxy, status: int, code: str, error: type[HoldfastError], says: str
) -> None:
    before = len(proxy.requests)
    proxy.inject(answer(status, code), times=None)
    for operation in (lambda: store.put("k", b"1"), lambda: store.get("k"), lambda: list(store.list("k"))):
        with pytest.raises(error, match=says) as caught:
            operation()
        assert type(caught.value) is error
        assert " k in s3://test-" in str(caught.value)
    assert len(proxy.requests) - before == 3


def test_a_missing_bucket_is_reported_by_every_operation(s3_endpoint: str, tmp_path: Path) -> None:
    store = open_store("s3://no-such-bucket-here/prefix")
    (tmp_path / "f").write_bytes(b"1")
    for operation in (
        lambda: store.put("k", b"1"),
        lambda: store.put_if_absent("k", b"1"),
        lambda: store.compare_and_swap("k", b"1", None),
        lambda: store.get("k"),
        lambda: store.get("k", 0, 0),
        lambda: store.stat("k"),
        lambda: list(store.list("")),
        lambda: store.delete("k"),
        lambda: store.upload(tmp_path / "f", "k"),
        lambda: store.download("k", tmp_path / "g"),
    ):
        with pytest.raises(MissingError, match="bucket 'no-such-bucket-here' does not exist"):
            operation()


def test_without_credentials_the_remedy_is_given_and_nothing_is_sent(
    s3_url: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(AccessDeniedError, match="AWS_ACCESS_KEY_ID"):
        open_store(s3_url).get("k")
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(AccessDeniedError, match="missing"):
        open_store(s3_url).get("k")
    assert proxy.requests == []


def test_no_message_or_name_shows_a_credential(store: Store, proxy: FaultyProxy) -> None:
    proxy.inject(answer(403, "SignatureDoesNotMatch"), times=None)
    with pytest.raises(AccessDeniedError) as error:
        store.get("k")
    texts = f"{error.value} {error.value!r} {store!r} {store.url} {vars(store)}"
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in texts
    assert error.value.__cause__ is None


@pytest.mark.parametrize(
    ("status", "error"), [(403, AccessDeniedError), (400, HoldfastError), (503, StoreUnreachableError)]
)
def test_secrets_echoed_by_a_server_are_not_in_the_error(
    s3_url: str, proxy: FaultyProxy, status: int, error: type[HoldfastError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "FIRST_PAUSE", 3 * DEADLINE)  # there is no time for another attempt
    monkeypatch.setattr(errors, "LONGEST_PAUSE", 3 * DEADLINE)

    def talkative(request: Request, forward: Forward) -> Reply:
        text = "sent to https://user:hunter2@proxy/bucket?X-Amz-Signature=c0ffee&amp;x=1"
        body = f"<Error><Code>Refused</Code><Message>{text}</Message></Error>".encode()
        return Reply(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))], body)

    proxy.inject(talkative, times=None)
    with pytest.raises(error, match=f"{status} Refused: sent to https://proxy/bucket") as caught:
        open_store(s3_url, deadline=DEADLINE).get("k")
    assert "hunter2" not in str(caught.value)
    assert "c0ffee" not in str(caught.value)


def test_a_retry_after_of_an_hour_is_capped(store: Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "MAX_RETRY_AFTER", 0.01)
    fault = proxy.inject(answer(503, "SlowDown", retry_after=3600), method="PUT", times=3)
    store.put("k", b"1")
    assert fault.hits == 3
    assert store.get("k") == b"1"
