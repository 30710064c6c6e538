"""Uploads with a rate limit."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.spec.errors import MissingError
from holdfast.store import Store, Throttle, parallel, throttled

MIB = 2**20


class Clock:
    """A clock that only sleeps advance."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_every_way_in_takes_the_time_of_its_bytes_and_writes_them_all(
    store: Store, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "PART_BYTES", 5 * MIB)
    content = os.urandom(6 * MIB + 5)
    (tmp_path / "source").write_bytes(content)
    slow = throttled(store, Throttle(2 * MIB, clock=clock, sleep=clock.sleep))

    def made() -> Iterator[bytes]:
        yield content[:MIB]
        yield content[MIB:]

    slow.put("put", [content[:7], content[7:]])
    slow.put_stream("streamed", len(content), made)
    slow.upload(tmp_path / "source", "uploaded")
    slow.put("nothing", b"")
    assert [store.get(key) for key in ("put", "streamed", "uploaded", "nothing")] == [content] * 3 + [b""]
    assert clock.now - 1000 >= (3 * len(content) - MIB) / (2 * MIB)  # the last block is sent at its scheduled time
    with pytest.raises(MissingError, match="nothing-here"):
        slow.upload(tmp_path / "nothing-here", "k")


def test_commits_and_reads_do_not_wait(store: Store, clock: Clock) -> None:
    store.put("k", bytes(MIB))
    slow = throttled(store, Throttle(1, clock=clock, sleep=clock.sleep))
    slow.put("first", b"it is the turn of the first byte, and then of nothing for long")
    assert slow.put_if_absent("root", bytes(100))
    slow.compare_and_swap("swapped", bytes(100), None)
    assert slow.get("k") == bytes(MIB)
    assert slow.url == store.url
    assert clock.now == 1000


def test_threads_share_the_rate_and_time_without_uploads_is_not_saved_up(clock: Clock) -> None:
    throttle = Throttle(10, clock=clock, sleep=clock.sleep)
    clock.now += 1000.0  # idle
    for _ in range(5):
        throttle.take(10)
    assert clock.now == pytest.approx(2004.0)


def test_a_lifted_throttle_lets_pass_what_waits(clock: Clock) -> None:
    lifted: list[bool] = []
    throttle = Throttle(1, lambda: bool(lifted), clock=clock, sleep=clock.sleep)
    throttle.take(10**9)
    waiting = threading.Thread(target=throttle.take, args=(1,))
    lifted.append(True)
    waiting.start()
    waiting.join()
    throttle.take(10**9)
    assert clock.now == 1000
