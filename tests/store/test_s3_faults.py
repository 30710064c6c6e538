"""The S3 store when the network or the server misbehaves: real HTTP, broken by a real proxy."""

from __future__ import annotations

import base64
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from holdfast.components.spec.errors import (
    AccessDeniedError,
    DataError,
    ExitCode,
    HoldfastError,
    MissingError,
    StoreRefusedError,
    StoreUnreachableError,
)
from holdfast.components.store import ConflictError, Store, open_store, retry, s3_conditions, s3_parts, s3_reads
from tests.conftest import CREDENTIALS
from tests.faulty_proxy import FaultyProxy, Reply, answer, answer_after, flip, hold, lose_reply, reset, slow, truncate

DEADLINE = 10.0


@pytest.fixture
def proxy(s3_url: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def store(proxy: FaultyProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store behind the proxy that has done its first conditional write, and retries without long pauses."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.002)
    store = open_store(s3_url, deadline=DEADLINE)
    store.put_if_absent("warm", b"up")
    return store


PASSING = {
    "500": answer(500, "InternalError"),
    "503": answer(503, "SlowDown"),
    "502 without a code": answer(502, ""),
    "429": answer(429, "TooManyRequests"),
    "409": answer(409, "ConditionalRequestConflict"),
    "reset": reset(),
    "reply lost": lose_reply(),
    "500 although applied": answer_after(500, "InternalError"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_passes_is_ridden_out_by_every_operation(store: Store, proxy: FaultyProxy, fault, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"from a file")

    def twice(method: str) -> None:
        faults.append(proxy.inject(fault, method=method, times=2))

    faults: list = []
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


def test_a_claim_whose_reply_was_lost_is_still_ours(store: Store, proxy: FaultyProxy) -> None:
    fault = proxy.inject(lose_reply(), method="PUT", path="claim")
    assert store.put_if_absent("claim", b"mine")
    assert fault.hits == 1
    assert store.get("claim") == b"mine"
    assert not store.put_if_absent("claim", b"theirs")


def test_a_swap_whose_reply_was_lost_is_known_by_its_writer_not_its_content(
    store: Store, proxy: FaultyProxy, s3_url: str
) -> None:
    version = store.compare_and_swap("counter", b"1", None)
    proxy.inject(lose_reply(), method="PUT", path="counter")
    version = store.compare_and_swap("counter", b"2", version)
    assert store.get_versioned("counter") == (b"2", version)
    # Another writer makes the same increment while our request is on its way: theirs counts, ours must say so.
    released = threading.Event()
    other = open_store(s3_url, deadline=DEADLINE)

    def meanwhile() -> None:
        fault.hit.wait()
        proxy.heal()
        other.compare_and_swap("counter", b"3", version)
        released.set()

    def held_then_reset(request, forward):
        released.wait()
        return reset()(request, forward)

    fault = proxy.inject(held_then_reset, method="PUT", path="counter")
    thread = threading.Thread(target=meanwhile)
    thread.start()
    with pytest.raises(ConflictError):
        store.compare_and_swap("counter", b"3", version)
    thread.join()


def test_increments_survive_an_unreliable_network(store: Store, proxy: FaultyProxy) -> None:
    proxy.inject(reset(), chance=0.1, times=None)
    proxy.inject(lose_reply(), chance=0.1, times=None)
    proxy.inject(answer(503, "SlowDown"), chance=0.1, times=None)
    version = store.compare_and_swap("counter", b"0", None)
    for number in range(1, 21):
        content, version = store.get_versioned("counter")
        assert int(content) == number - 1
        version = store.compare_and_swap("counter", b"%d" % number, version)
    assert store.get("counter") == b"20"


def test_a_truncated_body_is_read_again(store: Store, proxy: FaultyProxy) -> None:
    content = os.urandom(100_000)
    store.put("k", content)
    for read in (
        lambda: store.get("k"),
        lambda: store.get("k", 0, 100_000),
        lambda: store.get_versioned("k")[0],
    ):
        faults = [proxy.inject(truncate(size), method="GET") for size in (0, 1, 99_999)]
        assert read() == content
        assert [fault.hits for fault in faults] == [1, 1, 1]


def test_a_body_with_a_flipped_bit_is_read_again(store: Store, proxy: FaultyProxy) -> None:
    store.put("k", b"0123456789")
    fault = proxy.inject(flip(3), method="GET")
    assert store.get("k") == b"0123456789"
    assert fault.hits == 1


def test_every_body_carries_a_checksum_for_the_server_to_verify(store: Store, proxy: FaultyProxy, large: bytes) -> None:
    seen: list[dict[str, str]] = []

    def look(request, forward):
        seen.append({name.lower(): value for name, value in request.headers.items()})
        return forward(request)

    proxy.inject(look, method="PUT", times=None)
    store.put("small", [b"01234", b"56789"])
    store.put("large", large)
    assert seen[0]["x-amz-checksum-crc32"] == base64.b64encode(zlib.crc32(b"0123456789").to_bytes(4, "big")).decode()
    assert len(seen) == 4
    assert all("x-amz-checksum-crc32" in headers for headers in seen)


def test_an_upload_that_was_too_slow_for_the_server_is_sent_again(store: Store, proxy: FaultyProxy) -> None:
    proxy.inject(answer(400, "RequestTimeout"), method="PUT")
    store.put("k", b"1")
    assert store.get("k") == b"1"


def test_a_silent_server_costs_an_attempt_not_the_operation(s3_url: str, proxy: FaultyProxy) -> None:
    store = open_store(s3_url, deadline=6)  # an attempt waits two seconds
    released = threading.Event()
    proxy.inject(hold(released), method="PUT")
    store.put("k", b"1")
    released.set()
    assert store.get("k") == b"1"


def test_the_deadline_ends_an_operation_that_never_succeeds(s3_url: str, proxy: FaultyProxy) -> None:
    store = open_store(s3_url, deadline=1)
    proxy.inject(answer(503, "SlowDown"), times=None)
    with pytest.raises(StoreUnreachableError) as caught:
        store.put("some/key", b"1")
    message = str(caught.value)
    assert "put some/key" in message
    assert "within 1 s" in message
    assert f"attempt {len(proxy.requests)} failed" in message  # every one of them, whatever their number
    assert "503 SlowDown" in message
    assert "run the same command again" in message


def test_a_server_that_is_not_there_is_unreachable(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hunter2@127.0.0.1:9")
    with pytest.raises(StoreUnreachableError, match=r"within 0\.5 s") as caught:
        open_store(s3_url, deadline=0.5).get("k")
    assert "hunter2" not in str(caught.value)


def test_slow_is_not_an_error(store: Store, proxy: FaultyProxy) -> None:
    proxy.inject(slow(0.3), times=None)
    store.put("k", b"1")
    assert store.get("k") == b"1"


@pytest.mark.parametrize(
    ("status", "code", "error", "says"),
    [
        (403, "AccessDenied", AccessDeniedError, "AWS_ACCESS_KEY_ID"),
        (403, "InvalidAccessKeyId", AccessDeniedError, "AWS_PROFILE"),
        (404, "NoSuchBucket", MissingError, "bucket 'test-"),
        (400, "InvalidRequest", StoreRefusedError, "400 InvalidRequest"),
        (400, "AuthorizationHeaderMalformed", StoreRefusedError, "AWS_REGION"),
        (501, "NotImplemented", StoreRefusedError, "upgrade"),
    ],
)
def test_what_repeating_cannot_mend_is_said_at_once(
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


def test_a_bucket_that_does_not_exist_is_named_by_every_operation(s3_endpoint: str, tmp_path: Path) -> None:
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
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(AccessDeniedError, match="nobody"):
        open_store(s3_url).get("k")
    assert proxy.requests == []


def test_no_message_or_name_shows_a_credential(store: Store, proxy: FaultyProxy) -> None:
    proxy.inject(answer(403, "SignatureDoesNotMatch"), times=None)
    with pytest.raises(AccessDeniedError) as caught:
        store.get("k")
    shown = f"{caught.value} {caught.value!r} {store!r} {store.url} {vars(store)}"
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in shown
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("status", "error"), [(403, AccessDeniedError), (400, HoldfastError), (503, StoreUnreachableError)]
)
def test_what_a_server_repeats_of_a_request_is_not_shown(
    s3_url: str, proxy: FaultyProxy, status: int, error: type[HoldfastError]
) -> None:
    def talkative(request, forward):
        text = "sent to https://user:hunter2@proxy/bucket?X-Amz-Signature=c0ffee&amp;x=1"
        body = f"<Error><Code>Refused</Code><Message>{text}</Message></Error>".encode()
        return Reply(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))], body)

    proxy.inject(talkative, times=None)
    with pytest.raises(error, match=f"{status} Refused: sent to https://proxy/bucket") as caught:
        open_store(s3_url, deadline=0.3).get("k")
    assert "hunter2" not in str(caught.value)
    assert "c0ffee" not in str(caught.value)


def without(*conditions: str, when=lambda request: True):
    """A server that does not look at some conditions of a write."""

    def act(request, forward):
        if when(request):
            request.headers = {n: v for n, v in request.headers.items() if n.lower() not in conditions}
        return forward(request)

    return act


@pytest.mark.parametrize(
    ("ignored", "method", "path", "kind"),
    [
        ("if-none-match", "PUT", "", "put if absent"),
        ("if-match", "PUT", "", "replace if unchanged"),
        ("if-none-match", "POST", "uploadId", "complete an upload if absent"),
    ],
)
def test_a_server_that_ignores_a_condition_is_refused_with_a_permanent_code(
    proxy: FaultyProxy, s3_url: str, ignored: str, method: str, path: str, kind: str
) -> None:
    proxy.inject(without(ignored), method=method, path=path, times=None)
    store = open_store(s3_url)
    for write in (
        lambda: store.put_if_absent("claim", b"mine"),
        lambda: store.compare_and_swap("k", b"1", None),
    ):
        with pytest.raises(StoreRefusedError, match=f"of 16 writers that {kind}.* at once, 16 won") as caught:
            write()
        assert not caught.value.exit_code.retryable
        assert caught.value.exit_code != ExitCode.UNEXPECTED
    assert store.stat("claim") is None


def test_a_server_that_holds_conditions_for_one_writer_but_not_for_several_is_refused(
    proxy: FaultyProxy, s3_url: str
) -> None:
    both = threading.Barrier(2)

    def looked_at_too_early(request, forward):
        if "probes" in request.path:  # two writers look, both see nothing, both write
            request.headers = {n: v for n, v in request.headers.items() if n.lower() != "if-none-match"}
            both.wait(20)
        return forward(request)

    proxy.inject(looked_at_too_early, method="PUT", times=2)
    with pytest.raises(StoreRefusedError, match="2 won instead of one"):
        open_store(s3_url).put_if_absent("claim", b"mine")


def test_a_server_without_conditional_writes_is_refused_in_its_own_words(proxy: FaultyProxy, s3_url: str) -> None:
    def unknown(request, forward):
        if "If-None-Match" in request.headers:
            body = b"<Error><Code>NotImplemented</Code><Message>no such header here</Message></Error>"
            return Reply(501, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))], body)
        return forward(request)

    proxy.inject(unknown, method="PUT", times=None)
    with pytest.raises(StoreRefusedError, match=r"501 NotImplemented: no such header here; this S3 lacks") as caught:
        open_store(s3_url).put_if_absent("claim", b"mine")
    assert caught.value.exit_code == ExitCode.STORE_REFUSED


def test_a_server_that_passed_is_remembered_by_what_it_calls_itself(
    proxy: FaultyProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requests_of_a_first_claim(key: str) -> int:
        monkeypatch.setattr(s3_conditions, "_known", set())  # as in a new process
        before = len(proxy.requests)
        assert open_store(s3_url).put_if_absent(key, b"mine")
        return len(proxy.requests) - before

    named = ["first 1.0"]

    def name(request, forward):
        reply = forward(request)
        reply.headers.append(("Server", named[0]))
        return reply

    proxy.inject(name, times=None)
    assert requests_of_a_first_claim("a") > 16
    assert requests_of_a_first_claim("b") == 3  # what it calls itself, what is remembered, and the write
    named[0] = "first 1.1"
    assert requests_of_a_first_claim("c") > 16
    assert [info.key for info in open_store(s3_url).list("")] == ["a", "b", "c"]


def test_a_probe_survives_an_unreliable_network(proxy: FaultyProxy, s3_url: str) -> None:
    proxy.inject(lose_reply(), method="PUT", path="probes", chance=0.3, times=None)
    proxy.inject(answer(503, "SlowDown"), path="probes", chance=0.1, times=None)
    assert open_store(s3_url, deadline=30).put_if_absent("claim", b"mine")


def uploads(s3_url: str) -> list[str]:
    client = boto3.client("s3", region_name="us-east-1")
    return [upload["Key"] for upload in client.list_multipart_uploads(Bucket=s3_url.split("/")[2]).get("Uploads", ())]


def test_uploads_of_writers_that_died_are_ended_and_younger_ones_are_not(
    store: Store, proxy: FaultyProxy, s3_url: str
) -> None:
    client = boto3.client("s3", region_name="us-east-1")
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/packs/dead.pack")
    client.create_multipart_upload(Bucket=bucket, Key="somebody/else")
    century = 100 * 365 * 86400.0  # this server says that every upload began in 2010
    assert store.end_abandoned(century) == 0
    assert len(uploads(s3_url)) == 2
    refused = proxy.inject(answer(403, "AccessDenied"), path="uploads", times=1)
    assert store.end_abandoned(older_than=0) == 0  # best effort: not allowed to look is no error
    assert refused.hits == 1
    assert store.end_abandoned(older_than=0) == 1
    assert uploads(s3_url) == ["somebody/else"]


def test_a_large_upload_ends_what_dead_writers_left(store: Store, large: bytes, s3_url: str) -> None:
    client = boto3.client("s3", region_name="us-east-1")
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/packs/dead.pack")
    store.put("big", large)
    assert uploads(s3_url) == []
    assert store.get("big") == large


def test_many_objects_are_deleted_with_few_requests(store: Store, proxy: FaultyProxy, monkeypatch) -> None:
    keys = [f"many/{number}" for number in range(25)]
    for key in keys:
        store.put(key, b"1")
    before = len(proxy.requests)
    store.delete_many([*keys, "never/there"])
    assert len(proxy.requests) - before == 1
    assert list(store.list("many/")) == []


def test_a_server_that_deletes_one_by_one_only_is_asked_so(store: Store, proxy: FaultyProxy) -> None:
    for key in ("a", "b"):
        store.put(key, b"1")
    proxy.inject(answer(501, "NotImplemented"), method="POST", path="delete", times=None)
    store.delete_many(["a", "b"])
    assert [info.key for info in store.list("")] == ["warm"]


@pytest.mark.parametrize(("code", "error"), [("AccessDenied", AccessDeniedError), ("InternalError", None)])
def test_an_object_that_could_not_be_deleted_is_said_or_tried_again(
    store: Store, proxy: FaultyProxy, code: str, error: type[HoldfastError] | None
) -> None:
    for key in ("a", "b"):
        store.put(key, b"1")

    def partly(request, forward):
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


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The content of an object of three parts."""
    monkeypatch.setattr(s3_parts, "PART_BYTES", 5 * 2**20)
    return os.urandom(2 * 5 * 2**20 + 1000)


@pytest.mark.parametrize(
    "fault", [reset(), lose_reply(), answer(500, "InternalError"), answer(409, "OperationAborted")]
)
@pytest.mark.parametrize("step", ["uploads", "partNumber=2", "uploadId"])
def test_a_large_object_survives_a_fault_in_any_step_of_its_upload(
    store: Store, proxy: FaultyProxy, large: bytes, fault, step: str
) -> None:
    method = "PUT" if "partNumber" in step else "POST"
    injected = proxy.inject(fault, method=method, path=step)
    assert store.put_if_absent("big", large)
    assert injected.hits == 1
    assert store.get("big") == large
    assert not store.put_if_absent("big", large[:-1])


def test_an_upload_that_the_server_forgot_starts_again(
    store: Store, proxy: FaultyProxy, large: bytes, s3_url: str
) -> None:
    forgotten = proxy.inject(answer(404, "NoSuchUpload"), method="POST", path="uploadId")
    store.put("big", large)
    assert forgotten.hits == 1
    assert store.get("big") == large
    proxy.inject(answer(404, "NoSuchUpload"), method="POST", path="uploadId", times=None)
    with pytest.raises(StoreUnreachableError, match="gave up 3 uploads"):
        store.put("other", large)
    assert store.stat("other") is None


def test_an_upload_that_fails_leaves_no_parts_behind(s3_url: str, proxy: FaultyProxy, large: bytes) -> None:
    store = open_store(s3_url, deadline=DEADLINE)
    proxy.inject(answer(403, "AccessDenied"), method="PUT", path="partNumber=3", times=None)
    with pytest.raises(AccessDeniedError, match="part 3"):
        store.put("big", large)
    bucket = s3_url.split("/")[2]
    client = boto3.client("s3", region_name="us-east-1")
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    assert store.stat("big") is None


def test_two_large_claims_have_one_winner(store: Store, proxy: FaultyProxy, large: bytes, s3_url: str) -> None:
    released = threading.Event()
    late = proxy.inject(hold(released), method="POST", path="uploadId")
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(store.put_if_absent("claim", large)))
    thread.start()
    assert late.hit.wait(30)
    assert open_store(s3_url).put_if_absent("claim", b"the other was faster")
    released.set()
    thread.join()
    assert outcome == [False]
    assert store.get("claim") == b"the other was faster"


def test_an_object_that_is_replaced_while_it_is_read_is_never_mixed(
    store: Store, proxy: FaultyProxy, large: bytes, tmp_path: Path
) -> None:
    store.put("big", large)

    def replace(request, forward):
        proxy.heal()
        store.put("big", bytes(len(large)))
        return forward(request)

    proxy.inject(replace, method="GET", skip=1)
    with pytest.raises(ConflictError, match="replaced while it was read"):
        store.download("big", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []
    store.put("big", large)
    proxy.inject(replace, method="GET", skip=1)
    with pytest.raises(ConflictError, match="replaced while it was read"):
        store.get("big")


def test_a_download_is_whole_or_not_there(store: Store, proxy: FaultyProxy, large: bytes, tmp_path: Path) -> None:
    store.put("big", large)
    proxy.inject(truncate(1000), method="GET", times=2)
    store.download("big", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == large
    proxy.inject(answer(403, "AccessDenied"), method="GET", skip=2, times=None)
    with pytest.raises(AccessDeniedError):
        store.download("big", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_range_beyond_the_end_is_not_repeated(store: Store, proxy: FaultyProxy) -> None:
    store.put("k", b"0123456789")
    before = len(proxy.requests)
    with pytest.raises(DataError, match="has 10 bytes"):
        store.get("k", 5, 6)
    assert len(proxy.requests) - before == 1


def test_a_listing_of_many_pages_is_whole(store: Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_reads, "PAGE_KEYS", 3)
    for number in range(10):
        store.put(f"many/{number}", b"")
    fault = proxy.inject(reset(), method="GET", path="continuation-token", skip=1)
    assert [info.key for info in store.list("many/")] == [f"many/{number}" for number in range(10)]
    assert fault.hits == 1
