"""Conditional writes on S3: exactly one winner despite any fault of the network or the server, or the server is
refused.
"""

import threading
from collections.abc import Callable

import pytest

from holdfast.pipelines.chaos.proxy import (
    Act,
    FaultyProxy,
    Forward,
    Reply,
    Request,
    answer,
    answer_after,
    hold,
    lose_reply,
    reset,
)
from holdfast.spec.errors import (
    ExitCode,
    StoreRefusedError,
)
from holdfast.store import ConflictError, Store, open_store
from holdfast.store.s3 import store as s3_store
from tests.store.conftest import DEADLINE


@pytest.fixture
def store(proxied: Store) -> Store:
    """The store behind the proxy."""
    return proxied


def test_a_claim_whose_reply_was_lost_is_still_ours(store: Store, proxy: FaultyProxy) -> None:
    fault = proxy.inject(lose_reply(), method="PUT", path="claim")
    assert store.put_if_absent("claim", b"mine")
    assert fault.hits == 1
    assert store.get("claim") == b"mine"
    assert not store.put_if_absent("claim", b"theirs")


def test_a_412_that_answers_what_was_applied_is_a_write_of_ours(store: Store, proxy: FaultyProxy) -> None:
    """As when a proxy repeats a conditional write on its own."""
    faults = [
        proxy.inject(answer_after(412, "PreconditionFailed"), method="PUT", path=key) for key in ("claim", "counter")
    ]
    assert store.put_if_absent("claim", b"mine")
    version = store.compare_and_swap("counter", b"1", None)
    assert store.get_versioned("counter") == (b"1", version)
    assert [fault.hits for fault in faults] == [1, 1]


def test_a_swap_whose_reply_was_lost_is_known_by_its_writer_not_its_content(
    store: Store, proxy: FaultyProxy, s3_url: str
) -> None:
    version = store.compare_and_swap("counter", b"1", None)
    proxy.inject(lose_reply(), method="PUT", path="counter")
    version = store.compare_and_swap("counter", b"2", version)
    assert store.get_versioned("counter") == (b"2", version)
    # Another writer makes the same increment while our request is in flight. Theirs counts, and ours must report it.
    release = threading.Event()
    other = open_store(s3_url, deadline=DEADLINE)

    def meanwhile() -> None:
        fault.hit.wait()
        proxy.heal()
        other.compare_and_swap("counter", b"3", version)
        release.set()

    def held_then_reset(request: Request, forward: Forward) -> Reply:
        release.wait()
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


@pytest.mark.parametrize("fault", [reset(), lose_reply(), answer(500, "InternalError")])
def test_a_large_claim_is_one_request_and_survives_a_fault(
    store: Store, proxy: FaultyProxy, large: bytes, fault: Act
) -> None:
    """Some servers that honor a condition for one request do not honor it when they assemble parts to an object."""
    parts = proxy.inject(answer(403, "AccessDenied"), path="uploads", times=None)
    injected = proxy.inject(fault, method="PUT", path="big")
    assert store.put_if_absent("big", large)
    assert (injected.hits, parts.hits) == (1, 0)
    assert store.get("big") == large
    assert not store.put_if_absent("big", large[:-1])


def test_two_large_claims_have_one_winner(store: Store, proxy: FaultyProxy, large: bytes, s3_url: str) -> None:
    release = threading.Event()
    late = proxy.inject(hold(release), method="PUT", path="claim")
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(store.put_if_absent("claim", large)))
    thread.start()
    assert late.hit.wait(180)
    assert open_store(s3_url).put_if_absent("claim", b"the other was faster")
    release.set()
    thread.join()
    assert outcome == [False]
    assert store.get("claim") == b"the other was faster"


def without(*conditions: str, when: Callable[[Request], bool] = lambda request: True) -> Act:
    """A server that ignores some conditions of a write."""

    def act(request: Request, forward: Forward) -> Reply:
        if when(request):
            request.headers = {n: v for n, v in request.headers.items() if n.lower() not in conditions}
        return forward(request)

    return act


@pytest.mark.parametrize(
    ("ignored", "kind"), [("if-none-match", "put if absent"), ("if-match", "replace if unchanged")]
)
def test_a_server_that_ignores_a_condition_is_refused_with_a_permanent_code(
    proxy: FaultyProxy, s3_url: str, ignored: str, kind: str
) -> None:
    proxy.inject(without(ignored), method="PUT", times=None)
    store = open_store(s3_url)
    for write in (
        lambda: store.put_if_absent("claim", b"mine"),
        lambda: store.compare_and_swap("k", b"1", None),
    ):
        with pytest.raises(StoreRefusedError, match=f"of 16 writers that {kind}.* concurrently, 16 won") as error:
            write()
        assert not error.value.exit_code.retryable
        assert error.value.exit_code != ExitCode.UNEXPECTED
    assert store.stat("claim") is None


def test_a_server_that_holds_conditions_for_one_writer_but_not_for_several_is_refused(
    proxy: FaultyProxy, s3_url: str
) -> None:
    barrier = threading.Barrier(2)

    def looked_at_too_early(request: Request, forward: Forward) -> Reply:
        if "probes" in request.path:  # two writers look, find nothing and write; another writer may have won
            request.headers = {n: v for n, v in request.headers.items() if n.lower() != "if-none-match"}
            barrier.wait(180)
        return forward(request)

    proxy.inject(looked_at_too_early, method="PUT", times=2)
    with pytest.raises(StoreRefusedError, match=r"[23] won instead of one"):
        open_store(s3_url).put_if_absent("claim", b"mine")


def test_a_server_without_conditional_writes_is_refused_with_its_message(proxy: FaultyProxy, s3_url: str) -> None:
    def unknown(request: Request, forward: Forward) -> Reply:
        if "If-None-Match" in request.headers:
            body = b"<Error><Code>NotImplemented</Code><Message>no such header here</Message></Error>"
            return Reply(501, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))], body)
        return forward(request)

    proxy.inject(unknown, method="PUT", times=None)
    with pytest.raises(StoreRefusedError, match=r"501 NotImplemented: no such header here; this S3 lacks") as error:
        open_store(s3_url).put_if_absent("claim", b"mine")
    assert error.value.exit_code == ExitCode.STORE_REFUSED


def test_a_server_that_passed_is_remembered_by_its_name(
    proxy: FaultyProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requests_of_a_first_claim(key: str) -> int:
        monkeypatch.setattr(s3_store, "_known", set())  # as in a new process
        before = len(proxy.requests)
        assert open_store(s3_url).put_if_absent(key, b"mine")
        return len(proxy.requests) - before

    server_name = ["first 1.0"]

    def name(request: Request, forward: Forward) -> Reply:
        reply = forward(request)
        reply.headers.append(("Server", server_name[0]))
        return reply

    proxy.inject(name, times=None)
    assert requests_of_a_first_claim("a") > 16
    assert requests_of_a_first_claim("b") == 3  # one for the server's name, one to record it, and the write
    server_name[0] = "first 1.1"
    assert requests_of_a_first_claim("c") > 16
    assert [info.key for info in open_store(s3_url).list("")] == ["a", "b", "c"]


def test_a_probe_survives_an_unreliable_network(proxy: FaultyProxy, s3_url: str) -> None:
    proxy.inject(lose_reply(), method="PUT", path="probes", chance=0.3, times=None)
    proxy.inject(answer(503, "SlowDown"), path="probes", chance=0.1, times=None)
    assert open_store(s3_url, deadline=DEADLINE).put_if_absent("claim", b"mine")
