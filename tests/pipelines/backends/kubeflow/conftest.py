"""A fake KFP server, a connection to it, and a spec without external data."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.pipelines.backends import explain
from holdfast.pipelines.backends.kubeflow import connection, schedule, submit
from holdfast.pipelines.backends.kubeflow.compile import order_text, pipeline_text
from holdfast.pipelines.backends.kubeflow.connection import Access, Server
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec import Spec, parse_spec
from holdfast.spec.load import written_spec
from tests.kubeflow_server import KubeflowServer

SPEC = "{name: small, store: 's3://bucket/prefix', data: {sources: [{uri: 'python:stdlib'}]}}"
VARIABLES = (
    "KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT", "KF_PIPELINES_UI_ENDPOINT", "KFP_NAMESPACE", "KFP_UI", "KFP_TOKEN",
    "KFP_TOKEN_FILE", "KFP_COOKIE", "KFP_HEADER", "KFP_CA_FILE", "KUBERNETES_SERVICE_HOST",
)  # fmt: skip

_TEXTS: dict[str, str] = {}  # compiled in this process; KFP takes half a second for each


def _kept(key: object, spec: Spec, compile_text: Callable[[], str]) -> str:
    """The text of a pipeline. Each one is compiled once. An error is not kept."""
    whole = repr((key, spec, written_spec(spec)))
    if whole not in _TEXTS:
        _TEXTS[whole] = compile_text()
    return _TEXTS[whole]


def _order(request: RunRequest) -> str:
    return _kept(request, request.spec, lambda: order_text(request))


def compiled_text(spec: Spec, image: str | None = None, scheduled: bool = False) -> str:
    """The text of the pipeline of `spec`, which this process compiles once."""
    return _kept((image, scheduled), spec, lambda: pipeline_text(spec, image, scheduled))


@pytest.fixture(autouse=True)
def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for the same pipeline share its text. `test_compile.py` checks that equal requests give equal texts."""
    monkeypatch.setattr(submit, "order_text", _order)
    monkeypatch.setattr(submit, "pipeline_text", compiled_text)
    monkeypatch.setattr(schedule, "pipeline_text", compiled_text)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission waits neither for runs that are older by the clock of the server nor long before another try."""
    monkeypatch.setattr(connection, "PAUSE", 0.001)
    monkeypatch.setattr(submit, "SETTLE_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Kubeflow of the machine is known, and an unreachable store is left soon."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(explain, "DEADLINE", 0.2)


@pytest.fixture
def kubeflow() -> Iterator[KubeflowServer]:
    """An empty KFP server."""
    with KubeflowServer() as server:
        yield server


def connect(kubeflow: KubeflowServer, **access: Any) -> Server:
    """A connection to `kubeflow`."""
    return Server(Access(endpoint=kubeflow.endpoint, **access))


@pytest.fixture
def server(kubeflow: KubeflowServer) -> Server:
    """A connection to the empty KFP server."""
    return connect(kubeflow)


def spec(*changes: str) -> Spec:
    """The small spec with overrides."""
    return parse_spec(SPEC, changes)
