"""Fixtures for the tests of all parts: a real S3 over HTTP, and the store over a folder and over that S3."""

import gc
import hashlib
import inspect
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from holdfast.pipelines.chaos.s3 import S3Server
from holdfast.store import Store, open_store

os.environ["DVC_NO_ANALYTICS"] = "true"  # tests send no usage data
# The duration of an example depends on the load of the machine, not on the code.
hypothesis.settings.register_profile(
    "untimed", hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


def _name_the_frames_of_xdist() -> None:
    """For each task of a pipeline, kfp calls `inspect.stack()`. For a file without a module, inspect searches all
    imported modules. Processes of xdist run two such files, which costs a second per pipeline.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        file = frame.f_code.co_filename
        if inspect.getmodule(frame) is None:
            inspect.modulesbyfile[inspect.getabsfile(frame, file)] = __name__
        frame = frame.f_back


_name_the_frames_of_xdist()


# The files that take longest, measured with `--durations` on two cores. A file that takes ten minutes and begins last
# would run alone at the end.
LONGEST = (
    "tests/ray", "tests/slurm/test_sweep", "tests/slurm/test_faults", "tests/faults/test_mixtures",
    "tests/cluster/drill",
    "tests/train/test_large_export", "tests/whole", "tests/pipelines/chaos/test_chaos", "tests/faults/test_members",
    "tests/cluster/test_rehearsal", "tests/train/test_mesh", "tests/faults/test_kill", "tests/train/test_experts",
    "tests/pipelines/backends/argo/test_emulated", "tests/register/test_registration", "tests/launch/kubernetes",
)  # fmt: skip


# The minutes of a short drill, and the order of its files. Tests that would begin too late are skipped; another day has
# another order.
DRILL_SECONDS = 60 * float(os.environ.get("HOLDFAST_DRILL_MINUTES", "0"))
DRILL_ORDER = os.environ.setdefault("HOLDFAST_DRILL_ORDER", str(datetime.now(UTC).date()))  # the workers inherit it
BEGAN = time.monotonic()


def _is_short_drill(config: pytest.Config) -> bool:
    """Slow tests run before the drill, whole and with the longest files first."""
    return DRILL_SECONDS > 0 and config.getvalue("markexpr") == "drill"


def pytest_report_header(config: pytest.Config) -> str | None:
    """How to run the same short drill again."""
    return f"short drill: HOLDFAST_DRILL_ORDER={DRILL_ORDER}" if _is_short_drill(config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """In a short drill, begin a test only while half of its time limit is left, or half of the drill."""
    if not _is_short_drill(item.config):
        return
    mark = item.get_closest_marker("timeout")
    limit = mark.args[0] if mark else item.config.getvalue("timeout")
    if time.monotonic() - BEGAN + min(limit, DRILL_SECONDS) / 2 > DRILL_SECONDS:
        pytest.skip("the time of this short drill is over; `make drill` runs all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first, then those with slow tests and longer time limits, so that the other processes do
    not wait for them. A short drill has the files in a random order.
    """
    if _is_short_drill(config):
        items.sort(key=lambda item: hashlib.sha256(f"{DRILL_ORDER} {_file_of(item.nodeid)}".encode()).digest())
        return

    def rank_of(file: str) -> int:
        return next((rank for rank, prefix in enumerate(LONGEST) if file.startswith(prefix)), len(LONGEST))

    def is_long(item: pytest.Item) -> bool:
        return any(item.get_closest_marker(name) for name in ("slow", "timeout"))

    long = Counter(item.path for item in items if is_long(item))
    # Stable: the tests of a file stay together, in order.
    items.sort(key=lambda item: (rank_of(item.nodeid), -long[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while test files are imported, and never look at what they made: a million objects that live
    to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _file_of(nodeid: str) -> str:
    """The file of a test. Those that share one Ray cluster count as one file."""
    file = nodeid.split("::", maxsplit=1)[0]
    return "tests/ray" if file.startswith("tests/ray/") else file


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A drill imports no file without the mark: importing all takes each process long. Fixtures may add the mark."""
    word = {"drill": "drill", "slow and not drill": "slow"}.get(config.getvalue("markexpr"))
    if collection_path.suffix != ".py" or word is None:
        return None
    fixtures = collection_path.with_name("conftest.py")
    return not any(word in path.read_text() for path in (collection_path, fixtures) if path.exists()) or None


class FileScheduling(LoadFileScheduling):
    """Distribution by file, except that one process runs all files that share one Ray cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return _file_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """Replace the scheduler of `--dist=loadfile` only."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "a-secret-that-no-message-shows",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a real S3, one per test process."""
    with S3Server() as endpoint:
        yield endpoint


@pytest.fixture
def s3_endpoint(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The S3's URL. The AWS environment points to it, and child processes inherit that."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    return s3_server


@pytest.fixture
def s3_url(s3_endpoint: str) -> str:
    """The root of an empty store in a fresh bucket."""
    bucket = f"test-{uuid.uuid4().hex}"
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/some/prefix"


@pytest.fixture(params=["file", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The root of an empty store. A test with this fixture runs over a folder and over S3."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    return f"file://{tmp_path / 'store'}"


@pytest.fixture
def store(store_url: str) -> Store:
    """An empty store, over a folder and over S3."""
    return open_store(store_url, deadline=120)
