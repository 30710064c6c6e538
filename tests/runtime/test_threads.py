"""Waiting for a thread, as long as this process gets CPU time."""

import threading
import time

import pytest

from holdfast.runtime import exits


def test_join_within_waits_for_a_thread_up_to_a_timeout() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, daemon=True)
    thread.start()
    exits.join_within(thread, 0.25)
    assert thread.is_alive()
    release.set()
    exits.join_within(thread, 600.0)
    assert not thread.is_alive()


def test_a_process_that_stood_still_meanwhile_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    def last_work() -> None:
        started.wait()
        time.sleep(0.2)

    thread = threading.Thread(target=last_work, daemon=True)
    thread.start()
    join, stood_still = threading.Thread.join, [False]

    def joined(self: threading.Thread, timeout: float | None = None) -> None:
        if not stood_still[0]:  # all the time passes here, without any work
            stood_still[0] = True
            return
        started.set()
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", joined)
    exits.join_within(thread, 600.0)
    assert not thread.is_alive()
