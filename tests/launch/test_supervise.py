"""The restart budget, with a clock and endings that the test chooses."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from holdfast.components.launch import Ending, Job, supervise
from holdfast.components.launch.supervise import PATIENCE
from holdfast.components.spec import ExitCode
from holdfast.components.spec.cluster import Cluster, Restarts
from holdfast.components.spec.errors import StoreUnreachableError


class Scripted:
    """A launcher whose launches end with the given codes, each `minutes` after the one before."""

    def __init__(self, codes: Iterable[int], minutes: float = 0.0) -> None:
        self._codes, self._minutes = iter(codes), minutes
        self.now, self.jobs = 0.0, 0

    def run(self, job: Job) -> Ending:
        self.now += self._minutes * 60
        return Ending(next(self._codes), ())

    def stop(self) -> None:
        raise AssertionError("supervise leaves stopping to the caller")

    def next_job(self) -> Job:
        self.jobs += 1
        return Job("job", "run", self.jobs, ("-m", "module"), 1, 1, 1.0, Cluster())


class Waits(threading.Event):
    """Notes how long it was waited for instead of waiting; is set at the wait number `stop_at`."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._stop_at = stop_at

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if len(self.seconds) == self._stop_at:
            self.set()
        self.seconds.append(timeout)
        return self.is_set()


def supervised(launcher: Scripted, waits: Waits, **restarts: float) -> Ending:
    settings = Restarts(**restarts)  # type: ignore[arg-type]
    return supervise(launcher, launcher.next_job, settings, waits, clock=lambda: launcher.now)


@pytest.mark.parametrize("code", [0, 1, 2, 10, 11, 12, 13, 14, 15, 16, 17, 127])
def test_what_repeating_cannot_change_is_not_repeated(code: int) -> None:
    launcher = Scripted([code])
    assert supervised(launcher, Waits()).code == code
    assert launcher.jobs == 1


@pytest.mark.parametrize("code", [130, 137, 139, 143, 201, 202, 203, 204])
def test_what_may_succeed_is_started_again(code: int) -> None:
    launcher = Scripted([code, code, 0])
    assert supervised(launcher, Waits()).code == 0
    assert launcher.jobs == 3


@pytest.mark.parametrize("code", [ExitCode.NO_SPACE, ExitCode.UNSCHEDULABLE])
def test_what_only_somebody_else_can_mend_is_not_repeated_here(code: ExitCode) -> None:
    launcher = Scripted([code])
    assert supervised(launcher, Waits()).code == code
    assert launcher.jobs == 1


def test_the_first_restart_comes_at_once_and_later_waits_double_up_to_a_minute() -> None:
    waits = Waits()
    supervised(Scripted([137] * 9 + [0]), waits, budget=20, backoff_seconds=1)
    assert waits.seconds == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_the_budget_ends_it_with_the_last_ending() -> None:
    launcher = Scripted([137, 202, 203, 204])
    assert supervised(launcher, Waits(), budget=2).code == 203
    assert launcher.jobs == 3


def test_no_budget_means_no_restart() -> None:
    launcher = Scripted([137])
    assert supervised(launcher, Waits(), budget=0).code == 137


def test_restarts_that_the_window_has_left_behind_count_no_more() -> None:
    waits, launcher = Waits(), Scripted([137] * 30 + [0], minutes=25)
    assert supervised(launcher, waits, budget=3, window_minutes=60, backoff_seconds=1).code == 0
    assert launcher.jobs == 31
    assert max(waits.seconds) == 2
    hasty = Scripted([137] * 30 + [0], minutes=15)
    assert supervised(hasty, Waits(), budget=3, window_minutes=60).code == 137
    assert hasty.jobs == 4


def test_a_stop_during_a_launch_or_between_two_starts_no_other() -> None:
    stopped = Waits()
    stopped.set()
    during = Scripted([204, 0])
    assert supervised(during, stopped).code == 204
    assert (during.jobs, stopped.seconds) == (1, [])
    between = Scripted([137, 137, 0])
    assert supervised(between, Waits(stop_at=1)).code == 137
    assert between.jobs == 2


class Away(Scripted):
    """A launcher whose store does not answer for some calls; time passes only while it is waited for."""

    def __init__(self, codes: Iterable[int], refusals: int = 0) -> None:
        super().__init__(codes)
        self.refusals = refusals
        self.refuse_after: dict[int, int] = {}  # launch -> calls that are refused once it has ended
        self.told: list[int] = []

    def answer(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreUnreachableError("away")

    def run(self, job: Job) -> Ending:
        self.refusals = self.refuse_after.get(job.launch, 0)
        return super().run(job)

    def next_job(self) -> Job:
        self.answer()
        return super().next_job()

    def on_ending(self, _job: Job, ending: Ending) -> None:
        self.answer()
        self.told.append(ending.code)

    def supervised(self, waits: Waits) -> Ending:
        return supervise(self, self.next_job, Restarts(), waits, self.on_ending, lambda: sum(waits.seconds))


def test_a_store_that_is_away_between_two_launches_is_waited_for_and_told_what_it_missed() -> None:
    launcher = Away([137, 0])
    launcher.refuse_after[1] = 3
    assert launcher.supervised(Waits()).code == 0
    assert launcher.told == [137, 0]
    assert launcher.jobs == 2


def test_a_store_that_stays_away_ends_it_after_a_stated_time_and_a_stop_at_once() -> None:
    waits = Waits()
    with pytest.raises(StoreUnreachableError):
        Away([0], 10**6).supervised(waits)
    assert PATIENCE - 60 < sum(waits.seconds) <= PATIENCE
    with pytest.raises(StoreUnreachableError):
        Away([0], 10**6).supervised(Waits(stop_at=2))


def test_a_store_that_is_away_at_the_last_ending_does_not_change_it() -> None:
    launcher = Away([0])
    launcher.refuse_after[1] = 1
    assert launcher.supervised(Waits()).code == 0
