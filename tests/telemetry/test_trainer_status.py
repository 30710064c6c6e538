"""The status of a TrainJob, posted to a real HTTPS server that answers as the Kubeflow Trainer's."""

from __future__ import annotations

import json
import logging
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast.telemetry import emit
from holdfast.telemetry.events import Progress
from holdfast.telemetry.trainer_status import reporting_trainer_status, status_of

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/job/status"


class _Server(ThreadingHTTPServer):
    """The Trainer's status server: it checks path and token, and answers with the parsed body."""

    daemon_threads = True
    token = "first"

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.refused = 0
        self.answers = threading.Event()  # until it is set, no request is answered
        self.answers.set()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key.pem")
        self.socket = context.wrap_socket(self.socket, server_side=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        assert self.server.answers.wait(60)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fits = (self.path, self.headers["Authorization"]) == (PATH, f"Bearer {self.server.token}")
        if fits:
            self.server.bodies.append(body)
        else:
            self.server.refused += 1
            body = {"status": "Failure", "message": "Forbidden", "code": 403}
        self.send_response(200 if fits else 403)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def write_certificate(folder: Path) -> None:
    """Write a certificate for localhost that is its own authority, and its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(certificate.public_bytes(pem))
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    write_certificate(tmp_path)
    (tmp_path / "token").write_text("first\n")
    server = _Server(tmp_path)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://localhost:{server.server_address[1]}{PATH}")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    monkeypatch.setenv("RANK", "0")
    yield server
    server.shutdown()
    server.server_close()


def progress(step: int, **more: Any) -> Progress:
    return Progress(step=step, steps=40, seconds_left=90.5, loss=2.25, **more)


def wait_for(server: _Server, count: int) -> None:
    limit = time.monotonic() + 20
    while len(server.bodies) + server.refused < count and time.monotonic() < limit:
        time.sleep(0.01)


def test_the_trainjob_gets_the_newest_progress_and_the_last_one(server: _Server, tmp_path: Path) -> None:
    with reporting_trainer_status(pause=0.01):
        emit(progress(10, grad_norm=float("nan")))
        wait_for(server, 1)
        server.token = "second"
        (tmp_path / "token").write_text("second")  # it was renewed
        emit(progress(20))
        wait_for(server, 2)
        emit(progress(40))
    statuses = [body["trainerStatus"] for body in server.bodies]
    assert [status["progressPercentage"] for status in statuses] == [25, 50, 100]
    assert statuses[0]["estimatedRemainingSeconds"] == 90
    assert statuses[0]["metrics"] == [{"name": "step", "value": "10"}, {"name": "loss", "value": "2.25"}]
    assert abs(datetime.fromisoformat(statuses[0]["lastUpdatedTime"]).timestamp() - time.time()) < 60
    assert server.refused == 0


def test_posts_are_limited_and_a_slow_server_does_not_delay_the_training(server: _Server) -> None:
    server.answers.clear()
    with reporting_trainer_status(pause=60):
        for step in range(1, 30):
            emit(progress(step))
        assert not server.bodies, "the training went on before an answer"
        server.answers.set()
    assert len(server.bodies) <= 2  # the first and the last one
    assert server.bodies[-1]["trainerStatus"]["metrics"][0]["value"] == "29"


def test_a_server_that_refuses_is_a_warning_once(server: _Server, caplog: pytest.LogCaptureFixture) -> None:
    server.token = "other"
    caplog.set_level(logging.INFO, "holdfast")
    with reporting_trainer_status(pause=0.01):
        emit(progress(10))
        wait_for(server, 1)
        emit(progress(20))
        wait_for(server, 2)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "status 403" in warnings[0]


def test_another_authority_is_not_trusted(server: _Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_certificate(tmp_path)
    with reporting_trainer_status(pause=0.01):
        emit(progress(10))
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    assert server.bodies == []


@pytest.mark.parametrize("name", ["KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"])
def test_nothing_is_posted_outside_of_a_trainjob(server: _Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name)
    with reporting_trainer_status(pause=0.01):
        emit(progress(10))
    assert server.bodies == []


def test_other_ranks_post_nothing(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with reporting_trainer_status(pause=0.01):
        emit(progress(10))
    assert server.bodies == []


def test_values_fit_the_fields_of_the_trainjob() -> None:
    status = status_of(Progress(step=50, steps=40, seconds_left=1e12, loss=1e-300))["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 2**31 - 1)
    assert all(0 < len(metric["value"]) <= 64 for metric in status["metrics"])
