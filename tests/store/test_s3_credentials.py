"""S3 credentials that are replaced, expire or are wrong while a process uses the store."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.pipelines.chaos.proxy import FaultyProxy, Forward, Reply, Request, answer
from holdfast.spec.errors import AccessDeniedError, HoldfastError, StoreUnreachableError
from holdfast.store import Store, open_store
from holdfast.store.s3 import errors, requests


@pytest.fixture
def file(tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The credentials file."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setattr(errors, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(requests, "LOOK_SECONDS", 0.0)
    write(file, "AKIAOLD")
    return file


def write(file: Path, key: str) -> None:
    file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = t\n")


def refuse(proxy: FaultyProxy, key: str, status: int, code: str, times: int | None = None) -> list[str]:
    """Answer requests with `code` if their key begins with `key`. Returns the methods of the refused requests."""
    methods: list[str] = []

    def act(request: Request, forward: Forward) -> Reply:
        if f"={key}" in request.headers.get("Authorization", "") and (times is None or len(methods) < times):
            methods.append(request.method)
            return answer(status, code)(request, forward)
        return forward(request)

    proxy.inject(act, times=None)
    return methods


@pytest.mark.parametrize(
    ("status", "code", "operations"),
    [  # one function reads all error codes, so every operation is tested with one code per status
        (400, "ExpiredToken", 6),
        (400, "InvalidToken", 1),
        (403, "InvalidAccessKeyId", 1),
        (403, "AccessDenied", 6),
    ],
)
def test_credentials_that_are_replaced_are_read_again_by_every_operation(
    file: Path, s3_url: str, proxy: FaultyProxy, status: int, code: str, operations: int
) -> None:
    store = open_store(s3_url, deadline=60)
    store.put("k", b"0")
    every = (
        lambda: store.put("k", b"1"),
        lambda: store.put_if_absent("claim", b"1"),
        lambda: store.get("k"),
        lambda: store.stat("k"),
        lambda: list(store.list("")),
        lambda: store.delete_many(["x", "y"]),
    )
    for number, operation in enumerate(every[:operations]):
        proxy.heal()
        refused_methods = refuse(proxy, "AKIAOLD" if not number else f"AKIANEW{number}X", status, code)
        write(file, f"AKIANEW{number + 1}X")
        operation()
        assert refused_methods
    assert store.get("k") == b"1"


def test_threads_that_are_refused_together_make_one_new_client(
    file: Path, s3_url: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3_url, deadline=60)
    store.put("k", b"0")
    connections: list[float] = []
    connect = requests._connect

    def counted(deadline: float) -> requests._Connection:
        connections.append(deadline)
        return connect(deadline)

    monkeypatch.setattr(requests, "_connect", counted)
    refuse(proxy, "AKIAOLD", 400, "ExpiredToken")
    write(file, "AKIANEW")
    start = threading.Barrier(8)

    def put(number: int) -> None:
        start.wait(60)
        store.put(f"k{number}", b"1")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(8)))
    assert len(connections) == 1


def test_expired_credentials_are_waited_for_until_the_deadline(file: Path, s3_url: str, proxy: FaultyProxy) -> None:
    store, patient = open_store(s3_url, deadline=2), open_store(s3_url, deadline=30)
    store.put("k", b"0")
    patient.put("k", b"0")
    refused_methods = refuse(proxy, "AKIAOLD", 400, "ExpiredToken")
    operations = (lambda: store.put("k", b"1"), lambda: store.stat("k"))  # a HEAD has no code
    for operation in operations:
        with pytest.raises(
            StoreUnreachableError, match=r"credentials have expired .*ExpiredToken.*renew them"
        ) as error:
            operation()
        assert "endpoint is up" not in str(error.value)
    assert len(refused_methods) > 2

    def renewed(request: Request, forward: Forward) -> Reply:
        write(file, "AKIANEW")  # while the operation waits
        return answer(400, "ExpiredToken")(request, forward)

    proxy.heal()
    proxy.inject(answer(400, "ExpiredToken"), method="PUT")
    proxy.inject(renewed, method="PUT")
    patient.put("k", b"2")
    assert patient.get("k") == b"2"


def test_a_credentials_file_that_is_half_written_is_read_once_it_is_whole(
    file: Path, s3_url: str, proxy: FaultyProxy
) -> None:
    store = open_store(s3_url, deadline=20)
    store.put("k", b"0")
    contents = iter(["", "[default", "[default]\naws_access_key_id = AKIANEW\n", None])

    def act(request: Request, forward: Forward) -> Reply:
        if "AKIAOLD" not in request.headers["Authorization"]:
            return forward(request)
        content = next(contents)
        if content is None:
            write(file, "AKIANEW")
        else:
            file.write_text(content)
        return answer(400, "ExpiredToken")(request, forward)

    proxy.inject(act, times=None)
    store.put("k", b"1")
    assert store.get("k") == b"1"


def test_a_new_key_that_the_server_does_not_know_yet_is_tried_again(
    file: Path, s3_url: str, proxy: FaultyProxy
) -> None:
    store = open_store(s3_url, deadline=20)
    store.put("k", b"0")
    proxy.inject(answer(400, "ExpiredToken"), method="PUT")
    refused_methods = refuse(proxy, "AKIANEW", 403, "InvalidAccessKeyId", times=3)
    write(file, "AKIANEW")
    store.put("k", b"1")
    assert len(refused_methods) == 3


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (400, "InvalidToken", "AWS_ACCESS_KEY_ID"),
        (403, "RequestTimeTooSkewed", "set the clock"),
    ],
)
def test_an_error_that_new_credentials_cannot_fix_is_raised_immediately(
    proxied: Store, proxy: FaultyProxy, status: int, code: str, says: str
) -> None:
    proxy.inject(answer(status, code), times=None)
    for operation in (lambda: proxied.put("k", b"1"), lambda: proxied.get("k"), lambda: proxied.stat("k")):
        before = len(proxy.requests)
        with pytest.raises(AccessDeniedError, match=says) as error:
            operation()
        assert code in str(error.value)
        assert ("usual AWS way" in str(error.value)) == (code != "RequestTimeTooSkewed")
        assert len(proxy.requests) - before <= 3  # a HEAD is followed by a request whose reply has a code


def test_a_source_that_gives_other_credentials_each_time_is_read_once(
    file: Path, s3_url: str, proxy: FaultyProxy
) -> None:
    store = open_store(s3_url, deadline=60)
    store.put("k", b"0")

    def act(request: Request, forward: Forward) -> Reply:
        write(file, f"AKIA{len(proxy.requests)}")
        return answer(403, "AccessDenied")(request, forward)

    proxy.inject(act, times=None)
    before = len(proxy.requests)
    with pytest.raises(AccessDeniedError):
        store.put("k", b"1")
    assert len(proxy.requests) - before == 2


def test_a_line_break_in_a_credential_is_named_and_the_credential_is_not(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA\nHUNTER2")
    with pytest.raises(HoldfastError, match="line break") as error:
        open_store(s3_url).put("k", b"1")
    assert isinstance(error.value, AccessDeniedError)
    assert "HUNTER2" not in str(error.value)
