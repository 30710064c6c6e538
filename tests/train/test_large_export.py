"""A model of 5 GB passes from its checkpoint to a registered version in a cgroup of 2 GiB, like a step's pod."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from holdfast.store import layout, open_store
from tests import empty_mlflow
from tests.seeds import in_full
from tests.train.large import BYTES, EXPORTS, RUN

LIMIT = 2 * 2**30
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextmanager
def limited(name: str) -> Iterator[Path]:
    """A cgroup with LIMIT bytes of memory. Returns the file through which processes enter it."""
    version_1 = V1.is_dir()
    group = (V1 if version_1 else V2) / name
    try:
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if version_1 else "memory.max")
        limit.write_text(str(LIMIT))
        if not version_1:
            (group / "memory.swap.max").write_text("0")
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"this machine does not allow a cgroup with a memory limit: {error}")
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def in_it(entry: Path, *arguments: str, **environment: str) -> dict[str, int]:
    """The output of `python -m tests.train.large` in the cgroup."""
    command = f'echo $$ > {entry}; exec "{sys.executable}" -m tests.train.large "$@"'
    process = subprocess.run(
        ["/bin/sh", "-c", command, "sh", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert process.returncode == 0, f"ended with {process.returncode}: {process.stderr[-3000:]}"
    report: dict[str, int] = json.loads(process.stdout.splitlines()[-1])
    return report


@pytest.mark.drill
@pytest.mark.timeout(3000)
def test_a_pod_of_2_gib_exports_and_registers_5_gb(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 3 * BYTES:
        pytest.skip(f"{3 * BYTES} bytes of disk are needed for the checkpoint and the export")
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    empty_mlflow.place(home)
    url = f"file://{tmp_path / 'store'}"
    try:
        with limited(f"holdfast-{os.getpid()}") as entry:
            surroundings = {"HOLDFAST_HOME": str(home), "TMPDIR": str(temporary), "MLFLOW_TRACKING_URI": ""}
            checkpoint = in_it(entry, "checkpoint", url, **surroundings)
            assert checkpoint["bytes"] >= BYTES  # with the digests of its tiles
            export = in_it(entry, "export", url, **surroundings)
            registration = in_it(entry, "register", url, **surroundings)
            read = in_it(entry, "load", url, **surroundings)
        sizes = {info.key: info.size for info in open_store(url).list(layout.run(RUN, "export/"))}
        shards = {key: size for key, size in sizes.items() if key.endswith(".safetensors")}
        print(f"peaks of resident memory in MiB: export {export['peak']}, register {registration['peak']}")
        assert sum(shards.values()) > 5 * 10**9
        assert len(shards) == 2
        assert registration["version"] == 1
        assert read["same"] == 1
        assert registration["temporary"] < 10 * 2**20
    finally:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)


@in_full
@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_an_export_into_a_bucket_holds_a_few_parts_and_no_shard(s3_url: str, tmp_path: Path) -> None:
    model = {"HOLDFAST_LARGE": json.dumps({"layers": 4, "hidden": 2048, "ffn": 7168}), "HOLDFAST_HOME": str(tmp_path)}

    def done(what: str) -> dict[str, int]:
        command = [sys.executable, "-m", "tests.train.large", what, s3_url]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **model}
        process = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
        assert process.returncode == 0, process.stderr[-3000:]
        report: dict[str, int] = json.loads(process.stdout.splitlines()[-1])
        return report

    checkpoint, export = done("checkpoint"), done("export")
    shards = [info.size for info in open_store(s3_url).list(EXPORTS) if info.key.endswith(".safetensors")]
    print(
        f"MiB: a shard of {shards[0] // 2**20}, resident memory {export['before']} before and {export['peak']} at most"
    )
    assert checkpoint["bytes"] > 8 * 10**8
    assert len(shards) == 1
    assert export["peak"] - export["before"] < 512  # eight parts of 32 MiB, a slab of rows, and buffers for reading
    assert done("load")["same"] == 1
