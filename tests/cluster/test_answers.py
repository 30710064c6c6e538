"""The API server's reasons for refusing a request, on the emulated server and on a real one."""

import json
import logging
from functools import partial

import pytest

from holdfast.launch.kubernetes import client
from holdfast.launch.kubernetes.api_errors import OverQuotaError, WebhookAwayError
from holdfast.launch.kubernetes.client import Api
from holdfast.launch.kubernetes.kinds import KINDS
from holdfast.spec.errors import AccessDeniedError, SpecError
from tests.cluster.emulation import Emulation
from tests.cluster.objects import NAMESPACE, Object, StatusError
from tests.cluster.test_refusals import emitted
from tests.envtest.control_plane import ADMIN, ControlPlane, needs_assets

JOBS = KINDS["pytorchjob"].resource
AWAY = (
    'Internal error occurred: failed calling webhook "validator.pytorchjob.training-operator.kubeflow.org": failed to '
    'call webhook: Post "https://training-operator.kubeflow.svc:443/validate?timeout=10s": dial tcp 10.0.0.7:443: '
    "connect: connection refused"
)
ROOM = 'pytorchjobs.kubeflow.org "x" is forbidden: exceeded quota: few, requested: count/pytorchjobs.kubeflow.org=1'
DENIED = 'admission webhook "validate.kyverno.svc" denied the request: no label "team"'


def answering(cluster: Emulation, code: int, words: str, patience: float = 2.0) -> Api:
    cluster.server.faults.append(lambda verb, plural: StatusError(code, words) if plural == "pytorchjobs" else None)
    return cluster.api(patience=patience)


@pytest.fixture
def plane() -> None:
    """Only the server in this process takes faults from a test."""


def test_a_webhook_that_does_not_answer_is_named_and_the_server_is_not_blamed(
    cluster: Emulation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "retried", partial(client.retried, tries=5))  # the fourth try is logged
    caplog.set_level(logging.INFO, "holdfast.launch")
    with pytest.raises(WebhookAwayError, match="connection refused; ask who runs it: kubectl get validating") as error:
        answering(cluster, 500, AWAY, patience=600.0).create(JOBS, emitted())
    name = "validator.pytorchjob.training-operator.kubeflow.org"
    assert f"because the admission webhook {name} does not answer" in str(error.value)
    assert f"the admission webhook {name} does not answer" in caplog.text
    assert "the API server is away" not in caplog.text


def test_a_quota_of_objects_is_waited_for_and_named(cluster: Emulation) -> None:
    with pytest.raises(
        OverQuotaError, match=r"a quota of the namespace has no room, lastly with: .*exceeded quota: few"
    ):
        answering(cluster, 403, ROOM).create(JOBS, emitted())
    assert cluster.server.requests == [("create", "pytorchjobs")]  # the next request comes seconds later


def test_an_admission_refusal_is_not_a_permission_error(cluster: Emulation) -> None:
    with pytest.raises(AccessDeniedError, match=r'no label "team"; ask who runs the cluster$'):
        answering(cluster, 403, DENIED).create(JOBS, emitted())


@needs_assets
def test_a_real_server_names_an_unknown_field_and_an_unreachable_webhook(
    control_plane: ControlPlane,
) -> None:
    api = Api(lambda: control_plane.configuration(ADMIN), NAMESPACE, patience=3.0)
    body: Object = emitted()
    body["spec"]["colour"] = "blue"
    with pytest.raises(SpecError, match="colour"):
        api.apply(JOBS, body, "test")
    name = "unknown.holdfast.test"
    hook = {
        "name": name,
        "clientConfig": {"url": "https://127.0.0.1:1/", "caBundle": ""},
        "rules": [{"apiGroups": ["kubeflow.org"], "apiVersions": ["*"], "operations": ["*"], "resources": ["*"]}],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [hook],
    }
    control_plane.kubectl("apply", "-f", "-", text=json.dumps(configuration))
    try:
        with pytest.raises(WebhookAwayError, match=f"the admission webhook {name} does not answer"):
            _until_it_is_queried(api)
    finally:
        control_plane.kubectl("delete", "validatingwebhookconfiguration", name)


def _until_it_is_queried(api: Api) -> None:
    """Repeat until a running server has read its new configuration."""
    for _ in range(100):
        api.create(JOBS, emitted())
        api.delete(JOBS, emitted()["metadata"]["name"], background=True)
