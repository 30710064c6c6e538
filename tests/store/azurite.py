"""Azurite, Microsoft's own server of Azure Blob Storage for tests: `npm install azurite`."""

import base64
import contextlib
import hashlib
import hmac
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate

from holdfast.runtime.node import free_port

PROGRAM = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
# The key of every Azurite, from its documentation.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2021-08-06"
START_SECONDS = 120.0


@contextlib.contextmanager
def azurite() -> Iterator[str]:
    """The address of the account on a running server."""
    assert PROGRAM is not None
    port = free_port()
    arguments = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry"]
    server = subprocess.Popen([PROGRAM, "--silent", "--skipApiVersionCheck", *arguments], stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/{ACCOUNT}"
    end = time.monotonic() + START_SECONDS
    try:
        while True:
            try:
                create_container(address, "started")
                break
            except urllib.error.URLError:
                assert server.poll() is None
                assert time.monotonic() < end, "Azurite did not start"
                time.sleep(0.2)
        yield address
    finally:
        server.kill()
        server.wait()


def create_container(address: str, name: str) -> None:
    """Create a container. The library of the store creates objects only."""
    date = formatdate(usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:{VERSION}"
    signed = "PUT" + "\n" * 12 + f"{headers}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    request = urllib.request.Request(f"{address}/{name}?restype=container", method="PUT", data=b"")
    request.add_header("x-ms-date", date)
    request.add_header("x-ms-version", VERSION)
    request.add_header("Authorization", f"SharedKey {ACCOUNT}:{signature}")
    request.add_header("Content-Type", "")
    urllib.request.urlopen(request, timeout=30).close()
