"""A faulty store costs time but no bits: a real training of real processes, with a faulty proxy before a real S3. One
process is killed, so that a load happens too.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.pipelines.chaos.proxy import (
    FaultyProxy,
    answer,
    answer_after,
    lose_reply,
    reset,
    slow,
    truncate,
)
from holdfast.store import open_store
from tests.faults.killing import Deed, outcome, train_through
from tests.faults.undisturbed import STEPS, undisturbed_end
from tests.train.tiny_run import tiny_spec, write_dataset

COMMON = (f"training.steps={STEPS}", "parallel.processes=2", "checkpoint.every_steps=5")
SPEC = tiny_spec(*COMMON)
HELD_BACK = tiny_spec(*COMMON, "checkpoint.upload_mib_per_second=20")  # the same run
pytestmark = pytest.mark.timeout(1000)  # longer than train_through and an undisturbed run may take
NEVER = threading.Event()  # set after all tests
FAULTS = {
    "500": answer(500, "InternalError"),
    "503": answer(503, "SlowDown"),
    "slow": slow(0.2),
    "reset in the middle of a body": reset(after=100),
    "reset": reset(),
    "truncated": truncate(20),
    "reply lost": lose_reply(),
    "409": answer(409, "ConditionalRequestConflict"),
    "500 although applied": answer_after(500, "InternalError"),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return undisturbed_end(tmp_path_factory)


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_endpoint, seed=8) as proxy:
        yield proxy
        NEVER.set()
        NEVER.clear()


def disturbed(s3_url: str, home: Path, proxy: FaultyProxy) -> dict[str, object]:
    """The end of a training that reaches its store through the proxy and loses a rank to a kill."""
    store = open_store(s3_url)
    write_dataset(store)
    train_through(HELD_BACK, store, home, [Deed("rank1", 12, 0.0)], environment={"AWS_ENDPOINT_URL": proxy.url})
    return outcome(store, SPEC)[1]


@pytest.mark.slow
def test_a_store_that_misbehaves_in_many_ways_changes_no_bit(
    tmp_path: Path, s3_url: str, proxy: FaultyProxy, undisturbed: dict[str, object]
) -> None:
    faults = [proxy.inject(fault, times=None, chance=0.02) for fault in FAULTS.values()]
    assert disturbed(s3_url, tmp_path, proxy) == undisturbed
    assert sum(fault.hits for fault in faults) > 10
