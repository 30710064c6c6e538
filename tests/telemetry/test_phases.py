"""Phases: every moment of a process is in exactly one of them."""

import ast
import os
import time

from holdfast.telemetry import phases
from holdfast.telemetry.phases import Phase, PhaseClock

DAY: tuple[tuple[Phase, float], ...] = (
    ("start", 2.0), ("meet", 1.0), ("data", 0.5), ("forward", 3.0), ("backward", 6.0), ("forward", 3.0), ("save", 0.25),
)  # fmt: skip


class Clock:
    """A clock that stands still until the test advances it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Mark:
    """A mark in the work of a device that lags its host by a second and takes twice as long."""

    def __init__(self, clock: Clock) -> None:
        self.at, self.waited = 2 * clock.now + 1, False

    def elapsed_time(self, end_event: phases.Stamp) -> float:
        assert isinstance(end_event, Mark)
        return (end_event.at - self.at) * 1000

    def synchronize(self) -> None:
        self.waited = True


def lived(clock: Clock, here: PhaseClock, day: tuple[tuple[Phase, float], ...]) -> None:
    for phase, seconds in day:
        here.enter(phase)
        clock.now += seconds


def test_phases_of_a_lap_cover_its_time_and_the_last_continues_in_the_next_lap() -> None:
    clock = Clock()
    here = PhaseClock(clock, age=0.75)
    lived(clock, here, DAY)
    first = here.lap()
    clock.now += 4
    second = here.lap()
    assert dict(first.seconds) == {
        "start": 2.75, "meet": 1.0, "data": 0.5, "forward": 6.0, "backward": 6.0, "save": 0.25,
    }  # fmt: skip
    assert dict(second.seconds) == {"save": 4.0}


def test_the_phase_clock_shows_phase_step_and_start_time() -> None:
    clock = Clock()
    here = PhaseClock(clock)
    here.enter("data", 7)
    clock.now += 1
    here.enter("forward")
    clock.now += 1
    here.lap()
    assert here.place == ("forward", 7, 101.0)


def test_what_is_entered_while_a_model_is_built_counts_as_building() -> None:
    clock = Clock()
    here = PhaseClock(clock)
    with here.only("build"):
        lived(clock, here, DAY)
    here.enter("data")
    clock.now += 1
    assert dict(here.lap().seconds) == {"start": 0.0, "build": sum(seconds for _, seconds in DAY), "data": 1.0}


def test_a_device_is_measured_by_its_own_clock_without_a_gap_between_two_laps() -> None:
    clock = Clock()
    here = PhaseClock(clock)
    marks: list[Mark] = []

    def stamp() -> Mark:
        marks.append(Mark(clock))
        return marks[-1]

    here.measure_by(stamp)
    here.lap()  # earlier work has no mark
    clock.now += 1
    here.enter("forward")
    clock.now += 2
    lap = here.lap()
    assert not any(mark.waited for mark in marks)
    assert dict(lap.seconds) == {"start": 2.0, "forward": 4.0}
    assert marks[-1].waited
    clock.now += 0.5
    assert dict(here.lap().seconds) == {"forward": 1.0}


def test_a_forked_process_counts_from_its_fork_on() -> None:
    phases.lap()
    start = time.monotonic()
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writing, repr(dict(phases.lap().seconds)).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        seconds = ast.literal_eval(stream.read())
    assert list(seconds) == ["start"]
    assert seconds["start"] <= time.monotonic() - start
