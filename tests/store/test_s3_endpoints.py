"""Wrong S3 endpoints: the error comes within seconds and has the remedy."""

from pathlib import Path

import pytest

from holdfast.pipelines.chaos.proxy import Act, FaultyProxy, Forward, Reply, Request
from holdfast.spec.errors import HoldfastError, StoreRefusedError
from holdfast.store import open_store

OPERATIONS = {
    "put": lambda store: store.put("k", b"1"),
    "put_if_absent": lambda store: store.put_if_absent("k", b"1"),
    "get": lambda store: store.get("k"),
    "stat": lambda store: store.stat("k"),
    "list": lambda store: list(store.list("")),
    "delete_many": lambda store: store.delete_many(["a", "b"]),
}


def redirect(status: int, content: bytes, location: str = "https://minio.example") -> Act:
    def act(request: Request, forward: Forward) -> Reply:
        body = b"" if request.method == "HEAD" else content
        headers = [("Content-Type", "text/html"), ("Content-Length", str(len(body)))]
        headers += [("Location", location + request.path)] if location else []
        return Reply(status, headers, body)

    return act


@pytest.mark.parametrize(
    ("status", "content"),
    [(301, b"<html><h1>Moved</h1></html>"), (302, b"<html><br>Moved</html>"), (307, b"moved"), (308, b"")],
)
def test_an_endpoint_that_redirects_is_reported_with_the_address_to_use(
    s3_url: str, proxy: FaultyProxy, status: int, content: bytes
) -> None:
    proxy.inject(redirect(status, content), times=None)
    store = open_store(s3_url)
    for name, operation in OPERATIONS.items():
        before = len(proxy.requests)
        with pytest.raises(StoreRefusedError, match="AWS_ENDPOINT_URL") as error:
            operation(store)
        assert "https://minio.example:" in str(error.value), name
        assert len(proxy.requests) - before == 1, name


def test_a_redirection_without_an_address_is_refused(s3_url: str, proxy: FaultyProxy) -> None:
    proxy.inject(redirect(301, b"", ""), times=None)
    for operation in OPERATIONS.values():
        with pytest.raises(StoreRefusedError, match="AWS_ENDPOINT_URL"):
            operation(open_store(s3_url))


def test_a_bucket_in_another_region_is_followed_there(s3_url: str, proxy: FaultyProxy) -> None:
    def moved(request: Request, forward: Forward) -> Reply:
        if "us-east-1" not in request.headers["Authorization"]:
            return forward(request)
        body = b"<Error><Code>PermanentRedirect</Code><Message>x</Message></Error>"
        headers = [("x-amz-bucket-region", "eu-west-1"), ("Content-Length", str(len(body)))]
        return Reply(301, headers, b"" if request.method == "HEAD" else body)

    proxy.inject(moved, times=None)
    store = open_store(s3_url)
    store.put("k", b"1")
    assert store.get("k") == b"1"


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("127.0.0.1:9000", r"AWS_ENDPOINT_URL with its scheme, such as http://"),
        ("minio", "AWS_ENDPOINT_URL"),
        ("http://", "AWS_ENDPOINT_URL"),
        ("http://127.0.0.1:port", "AWS_ENDPOINT_URL"),
        ("http://[::1", "AWS_ENDPOINT_URL"),
    ],
)
def test_an_endpoint_that_is_no_address_is_refused_by_every_operation(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, endpoint: str, says: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for name in ("put", "put_if_absent", "stat"):
        with pytest.raises(StoreRefusedError, match=says):
            OPERATIONS[name](open_store(s3_url, deadline=60))


def test_a_region_that_is_no_name_is_refused(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us east\n1")
    for name in ("put", "put_if_absent", "stat"):
        with pytest.raises(HoldfastError) as error:
            OPERATIONS[name](open_store(s3_url, deadline=60))
        assert not error.value.exit_code.retryable


def test_tls_that_cannot_work_is_refused_and_not_waited_for(
    s3_url: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint.replace("http:", "https:"))
    with pytest.raises(StoreRefusedError, match=r"does not speak TLS.*http://"):
        open_store(s3_url).put("k", b"1")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(StoreRefusedError, match=r"AWS_CA_BUNDLE .*none\.pem: no such file"):
        open_store(s3_url).put("k", b"1")
    (tmp_path / "none.pem").write_text("no certificate\n")
    with pytest.raises(StoreRefusedError, match="AWS_CA_BUNDLE"):
        open_store(s3_url).put("k", b"1")
