"""A server in memory that speaks the part of Google Cloud Storage's XML interface that the store uses.

Its listings have no generations for their objects, as the library of the store reads none.
"""

import hashlib
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from html import escape
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.http_server import QuietHandler, running

PAGE = 4  # keys in one page of a listing
META = "x-goog-meta-"

Fault = Callable[[str, str, dict[str, str]], int]  # method, key, query: a status, 0, or -1 for a lost connection


@dataclass
class GoogleServer:
    """A server with empty buckets of any name."""

    address: str = ""
    faults: list[Fault] = field(default_factory=list)
    objects: dict[str, tuple[bytes, int, dict[str, str]]] = field(default_factory=dict)  # content, generation, metadata
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    generation: int = 1000

    @property
    def credentials(self) -> str:
        """The key of a service account for which no token is requested."""
        names = ("client_email", "private_key", "private_key_id")
        return json.dumps({"gcs_base_url": self.address, "disable_oauth": True, **dict.fromkeys(names, "")})

    def store(self, key: str, content: bytes, metadata: dict[str, str], condition: str | None) -> int:
        """Keep an object. Returns its generation, or 0 if the condition does not hold."""
        with self.lock:
            if condition is not None and int(condition) != self.objects.get(key, (b"", 0, {}))[1]:
                return 0
            self.generation += 1
            self.objects[key] = content, self.generation, metadata
            return self.generation


@contextmanager
def google_server() -> Iterator[GoogleServer]:
    """A running server."""
    state = GoogleServer()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            key, query = unquote(url.path).removeprefix("/"), dict(parse_qsl(url.query, keep_blank_values=True))
            body = self.body()
            for fault in state.faults:
                if status := fault(self.command, key, query):
                    if status > 0:
                        return self.answer(status)
                    self.close_connection = True
                    return self.connection.close()
            if "list-type" in query:
                return self.answer(200, _listing(state, f"{key.rstrip('/')}/", query).encode())
            if self.command == "DELETE" and "uploadId" in query:
                state.uploads.pop(query["uploadId"], None)
                return self.answer(204)
            if self.command == "DELETE":
                return self.answer(204 if state.objects.pop(key, None) else 404)
            if self.command in ("GET", "HEAD"):
                return self.read(key)
            return self.write(key, query, body)

        def read(self, key: str) -> None:
            found = state.objects.get(key)
            if found is None:
                return self.answer(404)
            content, generation, metadata = found
            tag = f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
            if self.headers.get("If-Match") not in (None, tag):
                return self.answer(412)
            status, headers = (
                200,
                {"ETag": tag, "x_goog_generation": str(generation), "Last_Modified": formatdate(1.5e9)},
            )
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
                start, size = int(wanted[1]), len(content)
                content = content[start : int(wanted[2]) + 1]
                if not content:
                    return self.answer(416)
                status = 206
                headers["Content_Range"] = f"bytes {start}-{start + len(content) - 1}/{size}"
            return self.answer(status, content, **headers, **metadata)

        def write(self, key: str, query: dict[str, str], body: bytes) -> None:
            if "uploads" in query:
                state.uploads[upload := uuid.uuid4().hex] = {}
                text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                return self.answer(200, text.encode())
            if "partNumber" in query:
                state.uploads[query["uploadId"]][int(query["partNumber"])] = body
                return self.answer(200, ETag='"part"')
            if "uploadId" in query:
                parts = state.uploads.pop(query["uploadId"])
                body = b"".join(parts[number] for number in sorted(parts))
            metadata = {name: value for name, value in self.headers.items() if name.lower().startswith(META)}
            generation = state.store(key, body, metadata, self.headers.get("x-goog-if-generation-match"))
            if not generation:
                return self.answer(412)
            tag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
            text = "<CompleteMultipartUploadResult><ETag>whole</ETag></CompleteMultipartUploadResult>"
            answer = text.encode() if "uploadId" in query else b""
            return self.answer(200, answer, ETag=tag, x_goog_generation=str(generation))

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815

    with running(Handler) as state.address:
        yield state


def _listing(state: GoogleServer, bucket: str, query: dict[str, str]) -> str:
    prefix, begin = query.get("prefix", ""), max(query.get("start-after", ""), query.get("continuation-token", ""))
    with state.lock:
        found = {key.removeprefix(bucket): value[0] for key, value in state.objects.items() if key.startswith(bucket)}
    keys = sorted(key for key in found if key.startswith(prefix) and key > begin)
    folders = set()
    if "delimiter" in query:
        folders = {prefix + key[len(prefix) :].split("/")[0] + "/" for key in keys if "/" in key[len(prefix) :]}
        keys = [key for key in keys if "/" not in key[len(prefix) :]]
    page, text = keys[:PAGE], "<ListBucketResult>"
    for key in page:
        tag = hashlib.md5(found[key], usedforsecurity=False).hexdigest()
        text += f"<Contents><Key>{escape(key)}</Key><Size>{len(found[key])}</Size><Generation>1</Generation>"
        text += f"<LastModified>2017-07-14T02:40:00.000Z</LastModified><ETag>&quot;{tag}&quot;</ETag></Contents>"
    text += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders))
    if page != keys:
        text += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
    return f"{text}</ListBucketResult>"
