"""An S3 server with almost no cost, so that a benchmark measures the client. The kernel drops incoming bodies, and
outgoing bodies are sent from memory pages; neither is copied.

    with DiscardingS3() as endpoint: ...

It supports the requests of the measured clients: PUT, GET with a range, HEAD, DELETE, multipart uploads and (empty)
listings. Whole objects support the conditions If-None-Match and If-Match. It keeps only the size of an object. A read
returns `content`, from the beginning of the object and again after PATTERN_BYTES. It checks neither signatures nor
checksums, and counts the bytes that it receives. It runs in a separate process with a thread for each connection. Linux
only.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import threading
import uuid
from urllib.parse import parse_qs, unquote, urlsplit

PATTERN_BYTES = 64 * 2**20
HEAD_BYTES = 64 * 2**10
DISCARD_BYTES = 8 * 2**20
DATE = "Wed, 01 Jan 2025 00:00:00 GMT"


def content() -> bytes:
    """The content of every object, repeated."""
    return random.Random(8).randbytes(PATTERN_BYTES)


class DiscardingS3:
    """The server in a separate process, on a free port of 127.0.0.1."""

    def __enter__(self) -> str:
        self._server = subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        return f"http://127.0.0.1:{int(self._server.stdout.readline())}"

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.wait()


class _Objects:
    """The sizes and versions of the stored objects."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, tuple[int, str]] = {}
        self._uploads: dict[str, dict[int, int]] = {}

    def get(self, path: str) -> tuple[int, str] | None:
        return self._found.get(path)

    def put(self, path: str, size: int, headers: dict[str, str]) -> str | None:
        """Record an object. Returns its version; None if a condition does not hold."""
        with self._lock:
            current = self._found.get(path)
            if "if-none-match" in headers and current is not None:
                return None
            if "if-match" in headers and (current is None or current[1] != headers["if-match"]):
                return None
            version = f'"{uuid.uuid4().hex}"'
            self._found[path] = (size, version)
            return version

    def delete(self, path: str) -> None:
        self._found.pop(path, None)

    def begin(self) -> str:
        upload = uuid.uuid4().hex
        self._uploads[upload] = {}
        return upload

    def add(self, upload: str, number: int, size: int) -> None:
        self._uploads[upload][number] = size

    def complete(self, path: str, upload: str) -> str:
        version = self.put(path, sum(self._uploads.pop(upload).values()), {})
        assert version is not None
        return version


class _Connection:
    """One client's connection."""

    def __init__(self, connection: socket.socket, objects: _Objects, pattern: int) -> None:
        self._socket, self._objects, self._pattern = connection, objects, pattern
        self._head = bytearray(HEAD_BYTES)
        self._nothing = bytearray(DISCARD_BYTES)  # its bytes are never written
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(self) -> None:
        with self._socket, contextlib.suppress(OSError):
            while self._one():
                pass

    def _one(self) -> bool:
        """Answer a request. Returns False if the client left."""
        filled = 0
        while (end := self._head.find(b"\r\n\r\n", 0, filled)) < 0:
            got = self._socket.recv_into(memoryview(self._head)[filled:])
            if not got:
                return False
            filled += got
        lines = bytes(self._head[:end]).decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines[1:])}
        if "transfer-encoding" in headers:
            self._reply(501, [("Connection", "close")])
            return False
        length = int(headers.get("content-length", 0))
        if headers.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        missing = length - (filled - end - 4)
        while missing > 0:
            got = self._socket.recv_into(self._nothing, min(missing, DISCARD_BYTES), socket.MSG_TRUNC)
            if not got:
                return False
            missing -= got
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        size = int(headers.get("x-amz-decoded-content-length", length))
        path = unquote(url.path)
        if method == "PUT":
            self._put(path, query, headers, size)
        elif method == "POST":
            self._post(path, query)
        elif method == "DELETE":
            self._objects.delete(path)
            self._reply(204, [])
        elif "uploads" in query:
            self._reply(200, [], b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")
        elif path.strip("/").count("/") == 0:  # a bucket
            self._reply(200, [])
        else:
            self._get(path, headers, sent=method == "GET")
        return True

    def _put(self, path: str, query: dict[str, str], headers: dict[str, str], size: int) -> None:
        if path.count("/") == 1:  # a bucket
            self._reply(200, [])
            return
        checksums = [(name, value) for name, value in headers.items() if re.fullmatch("x-amz-checksum-crc.*", name)]
        if "uploadId" in query:
            self._objects.add(query["uploadId"], int(query["partNumber"]), size)
            self._reply(200, [("ETag", f'"{uuid.uuid4().hex}"'), *checksums])
            return
        version = self._objects.put(path, size, headers)
        if version is None:
            self._reply(412, [], b"<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>")
            return
        self._reply(200, [("ETag", version), *checksums])

    def _post(self, path: str, query: dict[str, str]) -> None:
        bucket, _, key = path[1:].partition("/")
        result = f"<Bucket>{bucket}</Bucket><Key>{key}</Key>"
        if "uploads" in query:
            result = f"{result}<UploadId>{self._objects.begin()}</UploadId>"
            self._reply(200, [], f"<InitiateMultipartUploadResult>{result}</InitiateMultipartUploadResult>".encode())
        elif "uploadId" in query:
            version = self._objects.complete(path, query["uploadId"]).replace('"', "&quot;")
            result = f"{result}<ETag>{version}</ETag>"
            self._reply(200, [], f"<CompleteMultipartUploadResult>{result}</CompleteMultipartUploadResult>".encode())
        else:
            self._reply(501, [])

    def _get(self, path: str, headers: dict[str, str], sent: bool) -> None:
        entry = self._objects.get(path)
        if entry is None:
            self._reply(404, [], b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>" if sent else b"")
            return
        size, version = entry
        range_ = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if range_ is None:
            self._reply(200, _about(version), length=size)
            self._send(0, size if sent else 0)
            return
        first, last = int(range_[1]), min(int(range_[2] or size - 1), size - 1)
        if first >= size:
            self._reply(416, [], b"<Error><Code>InvalidRange</Code><Message>no</Message></Error>")
            return
        ranged = ("Content-Range", f"bytes {first}-{last}/{size}")
        self._reply(206, [*_about(version), ranged], length=last + 1 - first)
        self._send(first, last + 1 - first if sent else 0)

    def _send(self, start: int, length: int) -> None:
        while length:
            at = start % PATTERN_BYTES
            count = os.sendfile(self._socket.fileno(), self._pattern, at, min(length, PATTERN_BYTES - at))
            start, length = start + count, length - count

    def _reply(self, status: int, headers: list[tuple[str, str]], body: bytes = b"", length: int | None = None) -> None:
        fields = [
            *headers,
            ("Content-Length", str(len(body) if length is None else length)),
            ("Server", "DiscardingS3"),
        ]
        lines = [f"HTTP/1.1 {status} -", *(f"{name}: {value}" for name, value in fields), "", ""]
        self._socket.sendall("\r\n".join(lines).encode() + body)


def _about(version: str) -> list[tuple[str, str]]:
    return [("ETag", version), ("Last-Modified", DATE), ("Accept-Ranges", "bytes")]


def main() -> None:
    """Serve until the parent ends this process, or is gone."""
    pattern = os.memfd_create("pattern")
    os.write(pattern, content())
    objects = _Objects()
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listening.getsockname()[1], flush=True)
    parent = os.getppid()
    listening.settimeout(5)
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            connection = listening.accept()[0]
            connection.settimeout(None)
            threading.Thread(target=_Connection(connection, objects, pattern).serve, daemon=True).start()


if __name__ == "__main__":
    main()
