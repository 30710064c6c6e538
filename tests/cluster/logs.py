"""Container logs over HTTP as a node serves them: followed, from a given time, or only the last lines."""

import ipaddress
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.cluster.container import Printed
from tests.http_server import QuietHandler


def chunked(request: BaseHTTPRequestHandler) -> Callable[[bytes], None]:
    """Begin an answer of unknown length. Returns a function that sends a piece of it."""
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()

    def send(data: bytes) -> None:
        request.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        request.wfile.flush()

    return send


def stream(
    request: BaseHTTPRequestHandler, printed: Printed, query: dict[str, str], broken: Callable[[], bool]
) -> None:
    """Send a log until its end, or stop in the middle when the connection is to be `broken`."""
    follow, since, count = query.get("follow") == "true", query.get("sinceTime", ""), 0
    lines, _ = printed.snapshot()
    if "tailLines" in query:
        count = max(0, len(lines) - int(query["tailLines"]))
    send = chunked(request)
    with suppress(BrokenPipeError, ConnectionResetError):
        while True:
            lines, has_ended = printed.snapshot()
            fresh = [line for line in lines[count:] if line[: len(since) - 1] >= since[:-1]]
            if query.get("timestamps") != "true":
                fresh = [line.partition(" ")[2] for line in fresh]
            if fresh:
                send("".join(f"{line}\n" for line in fresh).encode())
            count = len(lines)
            if broken():
                request.close_connection = True
                return
            if has_ended or not follow:
                break
            printed.wait(count, 0.2)
        request.wfile.write(b"0\r\n\r\n")


class NodeLogs:
    """`with NodeLogs(folder, logs) as port`: the kubelet's log endpoint, which an API server queries over TLS."""

    def __init__(self, folder: Path, logs: Callable[[str], Printed | None]) -> None:
        node = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                address = urlsplit(self.path)
                _, _, _, pod, _ = address.path.split("/")  # /containerLogs/namespace/pod/container
                output = logs(pod)
                if output is None:
                    self.send_response(404)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                query = {key: values[-1] for key, values in parse_qs(address.query).items()}
                stream(self, output, query, node._closing.is_set)

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass

        self._closing = threading.Event()
        self._server = Server(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(_certificate(folder / "node.pem"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = int(self._server.server_port)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True, name="node logs").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()


def _certificate(path: Path) -> Path:
    """A self-signed certificate of 127.0.0.1 with its key, valid for a day."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    begin = datetime.now(UTC) - timedelta(hours=1)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return path
