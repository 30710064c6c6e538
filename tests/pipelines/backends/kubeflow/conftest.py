"""A fake KFP server, a connection to it, and a spec without external data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.pipelines.backends import explain
from holdfast.pipelines.backends.kubeflow import connection, submit
from holdfast.pipelines.backends.kubeflow.connection import Access, Server
from holdfast.spec import Spec, parse_spec
from tests.kubeflow_server import KubeflowServer

SPEC = "{name: small, store: 's3://bucket/prefix', data: {sources: [{uri: 'python:stdlib'}]}}"
VARIABLES = (
    "KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT", "KF_PIPELINES_UI_ENDPOINT", "KFP_NAMESPACE", "KFP_UI", "KFP_TOKEN",
    "KFP_TOKEN_FILE", "KFP_COOKIE", "KFP_HEADER", "KFP_CA_FILE", "KUBERNETES_SERVICE_HOST",
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Kubeflow of the machine is known, and waits are short."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(connection, "PAUSE", 0.001)
    monkeypatch.setattr(explain, "DEADLINE", 0.2)
    monkeypatch.setattr(submit, "SETTLE_SECONDS", 0.0)


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
