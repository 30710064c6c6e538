"""The page on which a process reports its position, as another process reads it."""

import os
import threading
from pathlib import Path

import pytest

from holdfast.runtime import heartbeat
from holdfast.runtime.heartbeat import REMEMBERED, SUFFIX, HeartbeatPage, HeartbeatReader

DATA, FORWARD, BACKWARD, SAVE = range(4)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(heartbeat, "time", fake)
    return fake


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> HeartbeatPage:
    monkeypatch.setattr(heartbeat, "here", heartbeat.here)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    return heartbeat.publish(tmp_path, begins=DATA, outside=[SAVE])


@pytest.fixture
def page(tmp_path: Path, here: HeartbeatPage) -> HeartbeatReader:
    return HeartbeatReader(tmp_path / f"{os.getpid()}{SUFFIX}")


def test_another_process_sees_rank_step_phase_and_wait_as_they_are_now(
    page: HeartbeatReader, here: HeartbeatPage
) -> None:
    here.enter(BACKWARD, 41, 100.0)
    snapshot = page.read()
    assert (snapshot.rank, snapshot.world, snapshot.step, snapshot.phase, snapshot.waiting) == (
        3,
        8,
        41,
        BACKWARD,
        False,
    )
    with here.waiting():
        assert page.read().waiting
        assert page.read().beats == snapshot.beats + 1
    assert not page.read().waiting
    with here.waiting():
        here.enter(FORWARD, 41, 100.0)
        assert not page.read().waiting


def test_the_first_step_and_gaps_between_steps_are_not_typical_steps(
    page: HeartbeatReader, here: HeartbeatPage, clock: Clock
) -> None:
    def step(number: int, seconds: float, save: float = 0.0) -> None:
        here.enter(FORWARD, number - 1, clock.now)
        clock.now += seconds
        here.enter(SAVE, number, clock.now)
        clock.now += save
        here.enter(DATA, number, clock.now)

    here.enter(DATA, 7, clock.now)
    step(8, 60.0)
    assert page.read().steps == ()
    for number in range(9, 9 + REMEMBERED + 2):
        step(number, 0.5)
    assert page.read().steps == (0.5,) * REMEMBERED
    step(100, 0.25, save=30.0)
    assert sorted(page.read().steps)[:2] == [0.25, 0.5]
    assert here.own(SAVE) == 30.0


def test_waiting_for_peers_does_not_count_as_own_time(here: HeartbeatPage, clock: Clock) -> None:
    here.enter(FORWARD, 0, clock.now)
    clock.now += 1.0
    with here.waiting():
        clock.now += 9.0
    clock.now += 2.0
    here.enter(BACKWARD, 0, clock.now)
    assert here.own(FORWARD) == 3.0


def test_requests_of_any_thread_count_and_other_threads_do_not_wait(page: HeartbeatReader, here: HeartbeatPage) -> None:
    def other() -> None:
        with here.requesting(), here.waiting():
            counted.append((page.read().requests, page.read().waiting))

    counted: list[tuple[int, bool]] = []
    with here.requesting():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert counted == [(2, False)]
    with here.requesting(600.0), here.requesting(), here.requesting(30.0):
        assert page.read().allowed == 600.0
    assert page.read().allowed == 0.0
    assert page.read().requests == 0


def test_requests_of_a_forked_process_do_not_count(page: HeartbeatReader, here: HeartbeatPage) -> None:
    with here.requesting():
        child = os.fork()
        if child == 0:
            with heartbeat.here.requesting(), heartbeat.here.waiting():
                os._exit(page.read().requests + 10 * page.read().waiting)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert page.read().requests == 0


def test_without_a_folder_marks_are_kept_for_the_process_itself(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(heartbeat, "here", heartbeat.here)
    published = heartbeat.publish(None, begins=DATA, outside=[])
    published.enter(FORWARD, 0, clock.now + 2.0)
    assert published.own(DATA) == 2.0
