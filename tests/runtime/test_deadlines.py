"""A server that sends a byte now and then cannot keep a client: each request has a total deadline."""

from collections.abc import Callable

import pytest
from kubernetes.client import Configuration

from holdfast.components.notify import summary
from holdfast.launch.kubernetes import client as kubernetes
from holdfast.pipelines.backends.kubeflow import connection
from holdfast.runtime import deadlines
from holdfast.serving import model_registry
from holdfast.spec.errors import HoldfastError
from holdfast.tracking import preflight
from tests.dripping import REPLIES, dripping

SECONDS = 0.3


def kubernetes_api(url: str) -> object:
    return kubernetes.Api(lambda: Configuration(host=url), "default", patience=1.0).get(kubernetes.PODS, "a")


def kubeflow(url: str) -> object:
    server = connection.Server(connection.Access(endpoint=url, namespace="me"))
    return server.ask(server.runs.run_service_list_runs)


def registry(url: str) -> None:
    model_registry.ModelRegistry(url, "me").point("story", "1")


CLIENTS: dict[str, Callable[[str], object]] = {
    "kubernetes": kubernetes_api,
    "kubeflow": kubeflow,
    "model registry": registry,
    "webhook": lambda url: summary.post(url, {"text": "x"}),
    "mlflow": lambda url: preflight._on_server(url, "story"),
}


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_drips_keeps_no_client(client: str, reply: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kubernetes, connection, model_registry):
        monkeypatch.setattr(module, "ANSWER_SECONDS", SECONDS)
        monkeypatch.setattr(module, "FIRST_PAUSE" if module is not connection else "PAUSE", 0.01)
    monkeypatch.setattr(model_registry, "TRIES", 2)
    monkeypatch.setattr(connection, "TRIES", 2)
    monkeypatch.setattr(summary, "TOTAL", SECONDS)
    monkeypatch.setattr(summary, "TRIES", 2)
    monkeypatch.setattr(preflight, "SECONDS", SECONDS)
    with dripping(REPLIES[reply]) as url:
        try:
            assert not CLIENTS[client](url) or (client == "webhook" and reply in ("body", "chunks"))
        except HoldfastError as error:
            assert "does not answer" in str(error) or "failed for" in str(error)
    assert not deadlines._attempts
