"""An S3 server that is full from the start: moto over HTTP, in a separate process, with the objects of a folder.

    with FilledS3(folder) as endpoint: ...

Uploading 100,000 objects would take longer than the measurement. They are put into moto's store before it begins to
serve, with the modification times of their files. The bucket is `growth`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

BUCKET = "growth"


class FilledS3:
    """The server in a separate process, on a free port of 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> str:
        command = [sys.executable, "-m", __name__, str(self._folder)]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.wait()


def _serve(folder: Path) -> None:
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    from holdfast.pipelines.chaos.s3 import S3Server
    from holdfast.store import open_store

    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    backend.create_bucket(BUCKET, "us-east-1")
    store = open_store(f"file://{folder}")
    with S3Server() as endpoint:
        for info in store.list(""):
            stored = backend.put_object(BUCKET, info.key, store.get(info.key))
            stored.last_modified = datetime.fromtimestamp(info.modified, UTC).replace(tzinfo=None)
        print(endpoint, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
