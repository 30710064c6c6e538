"""Bar K3: objects to and from S3, checksummed, alternately with boto3, s3torchconnector and obstore in one run.

    python -m benchmarks.store [--sizes 1K,64K,1M,8M,32M,64M,256M,1G] [--rounds 9]

The server (`benchmarks._discarding_s3`, on loopback) copies nothing, so the client is the limit. Each line is a size
and an operation of Holdfast. It has Holdfast's median, and for each peer the median over the rounds of how many times
faster Holdfast was. In parentheses: how many times faster its best round was than the peer's best, which a busy machine
disturbs less. The first peer is the bar's: one unsigned `put_object` of boto3 without a checksum, and one plain ranged
`get_object`. A restore reads into allocated memory, in the ranges of a pack. It verifies the BLAKE3 digest of each
range while further ones are in flight; no peer verifies. A peer that is not installed is skipped, and the output says
so: `pip install .[bench]`. A note on fairness: obstore's puts and the peers' reads carry no checksum that is compared.
The last line shows the other load of the machine.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import psutil
from blake3 import blake3
from botocore.config import Config

from benchmarks._discarding_s3 import PATTERN_BYTES, DiscardingS3, content
from holdfast.store import Read, open_store

BUCKET = "bench"
SIZES = "1K,64K,1M,8M,32M,64M,256M,1G"
PIECE_BYTES = 16 * 2**20  # of a restore, as the reader of checkpoints requests them
SAMPLE_BYTES = 8 * 2**20  # small objects are sent this often in a row, at most SAMPLE_CALLS times
SAMPLE_CALLS = 20
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "of-a-benchmark", "AWS_REGION": "us-east-1"}

Call = Callable[[], object]


def boto3_client() -> Any:
    """boto3 without checksums and with unsigned payloads: its minimum of work."""
    config = Config(
        s3={"payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=32,
    )
    return boto3.client("s3", region_name="us-east-1", config=config)


def obstore_calls(endpoint: str, data: bytes, key: str) -> dict[str, Call]:
    """obstore: parts in parallel beyond 5 MiB, unsigned; and with SHA-256, its only checksum."""
    import obstore
    from obstore.store import S3Store

    def store(**more: Any) -> Any:
        return S3Store(
            BUCKET,
            endpoint=endpoint,
            region="us-east-1",
            access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            unsigned_payload=True,
            client_options={"allow_http": True},
            **more,
        )

    plain, checked = store(), store(checksum_algorithm="SHA256")
    return {
        "write obstore": lambda: obstore.put(plain, key, data),
        "write obstore with sha256": lambda: obstore.put(checked, key, data),
        "read obstore": lambda: obstore.get_range(plain, key, start=0, end=len(data)),
    }


def s3torchconnector_calls(endpoint: str, data: bytes, key: str, target: memoryview) -> dict[str, Call]:
    """s3torchconnector's checkpoint writer (a checksum of every part) and reader."""
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    connector = S3Checkpoint(
        "us-east-1",
        endpoint=endpoint,
        s3client_config=S3ClientConfig(force_path_style=True, throughput_target_gbps=100.0),
    )
    uri = f"s3://{BUCKET}/{key}"

    def write() -> None:
        with connector.writer(uri) as writer:
            writer.write(data)

    def read() -> None:
        with connector.reader(uri) as reader:
            assert reader.readinto(target) == len(data)

    return {"write s3torchconnector": write, "read s3torchconnector": read}


def calls(endpoint: str, size: int, folder: Path) -> dict[str, Call]:
    """The calls for an object of `size` bytes, by "operation name". "holdfast" is compared with the rest."""
    pattern = content()
    data = (pattern * (-(-size // PATTERN_BYTES)))[:size]
    target = memoryview(bytearray(size))
    client, store, key = boto3_client(), open_store(f"s3://{BUCKET}"), f"object-{size}"
    store.put_if_absent("claim", b"")  # done once per store
    digests = [blake3(data[start : start + PIECE_BYTES]).digest() for start in range(0, size, PIECE_BYTES)]

    def verify(number: int, part: memoryview) -> None:
        assert blake3(part).digest() == digests[number]

    def restore() -> None:
        parts = [target[start : start + PIECE_BYTES] for start in range(0, size, PIECE_BYTES)]
        store.read_many(
            Read(key, number * PIECE_BYTES, part, partial(verify, number, part)) for number, part in enumerate(parts)
        )

    def claim() -> None:
        client.delete_object(Bucket=BUCKET, Key=f"claim-{size}")
        store.put_if_absent(f"claim-{size}", data)

    def unsigned() -> None:
        client.delete_object(Bucket=BUCKET, Key=f"claim-{size}")
        client.put_object(Bucket=BUCKET, Key=f"claim-{size}", Body=data)

    calls_by_name: dict[str, Call] = {
        "write holdfast": lambda: store.put(key, data),
        "write boto3 put_object": lambda: client.put_object(Bucket=BUCKET, Key=key, Body=data),
        "write boto3 upload_fileobj": lambda: client.upload_fileobj(io.BytesIO(data), BUCKET, key),
        "claim holdfast": claim,
        "claim boto3 put_object": unsigned,
        "stream holdfast": lambda: store.put_stream(
            key, size, lambda: (memoryview(data)[start : start + 2**20] for start in range(0, size, 2**20))
        ),
        "stream boto3 put_object": lambda: client.put_object(Bucket=BUCKET, Key=key, Body=data),
        "read holdfast": lambda: store.read_into(key, 0, target),
        "read boto3 get_object": lambda: _ranged(client, key, size),
        "restore holdfast": restore,
        "restore boto3 get_object": lambda: _ranged(client, key, size),
        "get holdfast": lambda: store.get(key),
        "get boto3 get_object": lambda: bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read()),
        "download holdfast": lambda: store.download(key, folder / "ours"),
        "download boto3 download_file": lambda: client.download_file(BUCKET, key, str(folder / "theirs")),
    }
    for load in (
        partial(obstore_calls, endpoint, data, key),
        partial(s3torchconnector_calls, endpoint, data, key, target),
    ):
        try:
            calls_by_name |= load()
        except ImportError as error:
            print(f"left out: {error.name}")
    calls_by_name |= {
        name.replace("read ", "restore ", 1): call
        for name, call in calls_by_name.items()
        if re.match("read [os]", name)
    }
    return calls_by_name


def _ranged(client: Any, key: str, size: int) -> bytes:
    return bytes(client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes=0-{size - 1}")["Body"].read())


def measure(found: dict[str, Call], size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a call in each round, all calls alternately. A first round is not counted."""
    repeated = max(1, min(SAMPLE_CALLS, SAMPLE_BYTES // size))
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, call in found.items():
            start = time.perf_counter()
            for _ in range(repeated):
                call()
            if number:
                seconds[name].append((time.perf_counter() - start) / repeated)
    return seconds


def report(size: int, seconds: dict[str, list[float]]) -> None:
    """Print one line for each operation."""
    for operation in dict.fromkeys(name.split()[0] for name in seconds):
        ours = seconds[f"{operation} holdfast"]
        ratios_of_peers = []
        for name, theirs in seconds.items():
            if name.startswith(f"{operation} ") and not name.endswith(" holdfast"):
                ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
                best = min(theirs) / min(ours)
                ratios_of_peers.append(
                    f"{statistics.median(ratios):.2f}x ({best:.2f}x) {name.removeprefix(f'{operation} ')}"
                )
        middle = statistics.median(ours)
        figure = f"{size / middle / 1e9:.2f} GB/s" if size >= 2**20 else f"{middle * 1e3:.2f} ms"
        print(f"{_size_text(size):>5} {operation:8} {figure:>10} | {' | '.join(ratios_of_peers)}", flush=True)


def _size_text(size: int) -> str:
    for unit, bytes_ in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if size % bytes_ == 0:
            return f"{size // bytes_} {unit}iB"
    return f"{size} B"


def _bytes(text: str) -> int:
    return int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=SIZES, help="comma-separated, each with K, M or G")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    os.environ.update(CREDENTIALS, AWS_EC2_METADATA_DISABLED="true")
    cpu, began = psutil.cpu_times(), time.monotonic()
    with DiscardingS3() as endpoint, tempfile.TemporaryDirectory() as folder:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        for text in arguments.sizes.split(","):
            size = _bytes(text)
            rounds = max(3, arguments.rounds // 3) if size >= 2**30 else arguments.rounds
            report(size, measure(calls(endpoint, size, Path(folder)), size, rounds))
        us = psutil.Process()
        own = sum(sum(process.cpu_times()[:2]) for process in (us, *us.children()))
    duration, now = time.monotonic() - began, psutil.cpu_times()
    busy = sum(now[:3]) + now.softirq - sum(cpu[:3]) - cpu.softirq
    cores = psutil.cpu_count() or 1
    print(f"{cores} cores; other processes used about {max(0.0, busy - own) / (duration * cores):.0%} of them")


if __name__ == "__main__":
    main()
