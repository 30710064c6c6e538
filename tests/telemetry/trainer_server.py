"""A real HTTPS server that answers as the status server of the Kubeflow Trainer."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.http_server import QuietHandler, running

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/job/status"


class TrainerServer(ThreadingHTTPServer):
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


class _Handler(QuietHandler):
    server: TrainerServer

    def do_POST(self) -> None:
        assert self.server.answers.wait(60)
        body = json.loads(self.body())
        fits = (self.path, self.headers["Authorization"]) == (PATH, f"Bearer {self.server.token}")
        if fits:
            self.server.bodies.append(body)
        else:
            self.server.refused += 1
            body = {"status": "Failure", "message": "Forbidden", "code": 403}
        self.answer(200 if fits else 403, body)


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


@contextmanager
def trainer_server(folder: Path) -> Iterator[TrainerServer]:
    """A server, and the variables in this process that the Trainer sets in the pods of a TrainJob."""
    write_certificate(folder)
    (folder / "token").write_text("first\n")
    server = TrainerServer(folder)
    with running(server), pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://localhost:{server.server_address[1]}{PATH}")
        patch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(folder / "ca.crt"))
        patch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(folder / "token"))
        patch.setenv("RANK", "0")
        yield server
