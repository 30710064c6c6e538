"""The restart budget, with a clock and endings that the test sets."""

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from holdfast.launch import GangExit, Job, Supervisor
from holdfast.launch.supervisor import PATIENCE
from holdfast.spec import ExitCode
from holdfast.spec.cluster import Cluster, Restarts
from holdfast.spec.errors import StoreUnreachableError, TerminatedError


def supervise(*given: Any, **named: Any) -> GangExit:
    """The ending of a supervised gang."""
    return Supervisor(*given, **named).run()


class Scripted:
    """A launcher whose launches end with the given codes, each `minutes` after the previous one."""

    def __init__(self, codes: Iterable[int], minutes: float = 0.0, elsewhere: bool = True) -> None:
        self._codes, self._minutes, self._elsewhere = iter(codes), minutes, elsewhere
        self.now, self.jobs, self.progress = 0.0, 0, True

    def run(self, job: Job) -> GangExit:
        self.now += self._minutes * 60
        return GangExit(next(self._codes), (), elsewhere=self._elsewhere)

    def stop(self) -> None:
        raise AssertionError("supervise leaves stopping to the caller")

    def saved_step(self) -> int:
        return self.jobs if self.progress else 0

    def next_job(self) -> Job:
        self.jobs += 1
        return Job("job", "run", self.jobs, ("-m", "module"), 1, 1, 1.0, Cluster())


class Waits(threading.Event):
    """Records the length of each wait instead of waiting; becomes set at wait number `stop_at`."""

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


def supervised(launcher: Scripted, waits: Waits, **restarts: float) -> GangExit:
    settings = Restarts(**restarts)
    return supervise(
        launcher, launcher.next_job, settings, waits, saved_step=launcher.saved_step, clock=lambda: launcher.now
    )


@pytest.mark.parametrize("code", [0, 1, 2, 10, 11, 12, 13, 14, 15, 16, 17, 127])
def test_a_permanent_failure_is_not_restarted(code: int) -> None:
    launcher = Scripted([code])
    assert supervised(launcher, Waits()).code == code
    assert launcher.jobs == 1


@pytest.mark.parametrize("code", [130, 137, 139, 143, 201, 202, 203, 204])
def test_a_retryable_failure_is_restarted(code: int) -> None:
    launcher = Scripted([code, code, 0])
    assert supervised(launcher, Waits()).code == 0
    assert launcher.jobs == 3


@pytest.mark.parametrize("code", [ExitCode.NO_SPACE, ExitCode.UNSCHEDULABLE])
def test_a_failure_that_needs_another_party_is_not_restarted(code: ExitCode) -> None:
    launcher = Scripted([code])
    assert supervised(launcher, Waits()).code == code
    assert launcher.jobs == 1


@pytest.mark.parametrize(("elsewhere", "launches"), [(False, 1), (True, 2)])
def test_a_launch_that_would_land_on_an_unhealthy_node_is_not_restarted(elsewhere: bool, launches: int) -> None:
    launcher = Scripted([ExitCode.UNHEALTHY_NODE, 0], elsewhere=elsewhere)
    assert supervised(launcher, Waits()).code == (0 if elsewhere else ExitCode.UNHEALTHY_NODE)
    assert launcher.jobs == launches


def test_the_first_restart_is_immediate_and_later_waits_double_up_to_a_minute() -> None:
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


def test_launches_without_a_new_checkpoint_end_it_however_long_each_takes() -> None:
    launcher = Scripted([ExitCode.RENDEZVOUS_TIMEOUT] * 30, minutes=25)
    launcher.progress = False
    ending = supervised(launcher, Waits(), max_stalled_launches=4)
    assert (ending.code, launcher.jobs) == (ExitCode.RENDEZVOUS_TIMEOUT, 4)
    assert ending.detail.startswith("4 launches in a row ended without a new checkpoint, the last one so: ")


def test_a_new_checkpoint_gives_every_chance_back() -> None:
    launcher = Scripted([137] * 7 + [0], minutes=25)
    steps = iter([0, 0, 0, 10, 10, 10, 20, 20])  # before the first launch, and after each launch
    launcher.saved_step = lambda: next(steps)  # type: ignore[method-assign]
    assert supervised(launcher, Waits(), max_stalled_launches=3).code == 0
    assert launcher.jobs == 8


def test_an_unreachable_store_shows_no_progress() -> None:
    launcher = Scripted([203] * 30, minutes=25)
    looks = iter(range(3))

    def saved_step() -> int:
        if next(looks):
            raise StoreUnreachableError("away")
        return 0

    launcher.saved_step = saved_step  # type: ignore[method-assign]
    assert supervised(launcher, Waits(), max_stalled_launches=2).code == 203
    assert launcher.jobs == 2


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
    """A launcher whose store does not answer for some calls; time passes only during waits."""

    def __init__(self, codes: Iterable[int], refusals: int = 0) -> None:
        super().__init__(codes)
        self.refusals = refusals
        self.refuse_after: dict[int, int] = {}  # launch -> calls that are refused once it has ended
        self.reported_codes: list[int] = []

    def answer(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreUnreachableError("away")

    def run(self, job: Job) -> GangExit:
        self.refusals = self.refuse_after.get(job.launch, 0)
        return super().run(job)

    def next_job(self) -> Job:
        self.answer()
        return super().next_job()

    def on_gang_exit(self, _job: Job, ending: GangExit) -> None:
        self.answer()
        self.reported_codes.append(ending.code)

    def supervised(self, waits: Waits) -> GangExit:
        return supervise(
            self, self.next_job, Restarts(), waits, self.on_gang_exit, self.saved_step, lambda: sum(waits.seconds)
        )


def test_an_unreachable_store_between_launches_is_waited_for_and_gets_the_missed_exits() -> None:
    launcher = Away([137, 0])
    launcher.refuse_after[1] = 3
    assert launcher.supervised(Waits()).code == 0
    assert launcher.reported_codes == [137, 0]
    assert launcher.jobs == 2


def test_an_unreachable_store_ends_the_supervisor_after_the_timeout_and_a_stop_immediately() -> None:
    waits = Waits()
    with pytest.raises(StoreUnreachableError):
        Away([0], 10**6).supervised(waits)
    assert PATIENCE - 60 < sum(waits.seconds) <= PATIENCE
    with pytest.raises(TerminatedError, match="stopped while the next launch waited, because away"):
        Away([0], 10**6).supervised(Waits(stop_at=2))


def test_an_unreachable_store_at_the_last_exit_does_not_change_it() -> None:
    launcher = Away([0])
    launcher.refuse_after[1] = 1
    assert launcher.supervised(Waits()).code == 0


def test_a_reclaimed_launch_uses_no_restart_budget_and_restarts_without_a_wait() -> None:
    launcher, waits = Scripted([204, 204, 137, 204, 0]), Waits()
    ending = supervise(
        launcher, launcher.next_job, Restarts(budget=1, backoff_seconds=9), waits, saved_step=launcher.saved_step,
        reclaimed=lambda job: job.launch != 3,
    )  # fmt: skip
    assert (ending.code, launcher.jobs, waits.seconds) == (0, 5, [0, 0, 0, 0])


def test_repeated_reclaims_without_a_saved_step_end_the_supervisor() -> None:
    launcher, waits = Scripted([143] * 30), Waits()
    launcher.progress = False
    ending = supervise(
        launcher, launcher.next_job, Restarts(max_stalled_launches=4), waits, saved_step=launcher.saved_step,
        reclaimed=lambda _: True,
    )  # fmt: skip
    assert (ending.code, launcher.jobs, waits.seconds) == (143, 4, [15, 30, 45])


def test_an_unreachable_store_does_not_turn_an_exit_into_a_reclaim() -> None:
    def away(_: Job) -> bool:
        raise StoreUnreachableError("away")

    launcher = Scripted([204, 204])
    ending = supervise(
        launcher, launcher.next_job, Restarts(budget=1), Waits(), saved_step=launcher.saved_step, reclaimed=away
    )
    assert (ending.code, launcher.jobs) == (204, 2)
