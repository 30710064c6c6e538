"""The goodput ledger as a pure function: in any course of a run, every moment of every rank has exactly one class."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.spec.errors import ExitCode
from holdfast.telemetry.events import (
    AttemptBegan,
    Event,
    HangDetected,
    LaunchBegan,
    LaunchEnded,
    LaunchPending,
    Progress,
    RankEnded,
    SaveCommitted,
    StepBegan,
    StepEnded,
    TimeSpent,
)
from holdfast.telemetry.ledger import CLASSES, ledger

BEGUN = {"start": 1.0, "meet": 1.0, "build": 2.0, "restore": 1.0}  # 5 s
STEPS = {
    "data": 1.0,
    "forward": 2.0,
    "backward": 3.0,
    "communication": 2.0,
    "optimizer": 1.0,
    "check": 0.5,
    "save": 0.5,
}


def at(time: float, event: Event, attempt: int | None = None) -> Event:
    return event.model_copy(update={"time": time, "attempt": attempt, "writer": "w"})


def spent(time: float, rank: int, step: int, seconds: dict[str, float], attempt: int, **how: bool) -> Event:
    return at(time, TimeSpent(rank=rank, step=step, seconds=seconds, **how), attempt)


def killed_once() -> list[Event]:
    """Two ranks, ten steps a second apart. At second 28 rank 1 is killed, and rank 0 notices immediately. The launch
    ends at 30, the next begins at 33. Step 10 was saved at 15, and the second attempt resumes from it."""
    events = [
        at(0, StepBegan(name="train")),
        at(1, LaunchBegan(launch=1, job="j", nodes=1, processes=2)),
        *(spent(7, rank, 0, BEGUN, 1) for rank in (0, 1)),
        at(7, AttemptBegan(world=2, step=0, steps=40), 1),
        *(spent(17, rank, 10, STEPS, 1) for rank in (0, 1)),
        at(19, SaveCommitted(step=10, seconds=2), 1),
        *(spent(27, rank, 20, STEPS, 1) for rank in (0, 1)),
        spent(28, 0, 20, {"communication": 1.0}, 1, last=True, failed=True),
        at(28, RankEnded(rank=0, code=ExitCode.LOST_PEER), 1),
        at(30, LaunchEnded(launch=1, code=ExitCode.LOST_PEER, restart_in=3)),
        at(33, LaunchBegan(launch=2, job="j", nodes=1, processes=2)),
        *(spent(40, rank, 10, BEGUN, 2) for rank in (0, 1)),
        at(40, AttemptBegan(world=2, step=10, steps=40), 2),
        *(spent(50, rank, 20, STEPS, 2, last=True) for rank in (0, 1)),
        at(51, LaunchEnded(launch=2, code=ExitCode.OK)),
        at(60, StepEnded(name="train", code=0, seconds=60)),
    ]
    return sorted(events, key=lambda event: event.time)


def test_a_killed_rank_costs_what_was_computed_again_and_the_way_back() -> None:
    totals = ledger(killed_once())
    unreported = (0.0, 2 / 41)  # rank 1 did not report its last second: it counts like the other 41 of the attempt
    for rank in (0, 1):
        assert totals.ranks[rank] == pytest.approx({
            "schedule": 1 + 1 + 3 + 2,  # before the launches, and until their processes began
            "start": 4.0, "compile": 4.0, "restore": 2.0,
            "productive": 12.0, "data": 2.0, "communication": 4.0, "check": 1.0,
            "save": 1.5 + unreported[rank],  # waiting for a save is not work that could be lost
            "lost": 10.5 - unreported[rank],  # from second 17 to the end of the first attempt at 28
            "detect": 2.0, "end": 1.0,
        })  # fmt: skip
    assert totals.wall == 51.0
    assert totals.total == pytest.approx(2 * 51)
    assert totals.goodput == pytest.approx(12 / 51)


def test_unreported_time_before_a_kill_is_divided_like_the_rest_of_the_attempt() -> None:
    events = [event for event in killed_once() if not (isinstance(event, TimeSpent) and event.time == 27)]
    assert ledger(events).total == pytest.approx(2 * 51)
    kept = [event for event in killed_once() if not (isinstance(event, AttemptBegan) and event.attempt == 2)]
    totals = ledger([event for event in kept if not (isinstance(event, TimeSpent) and event.time == 27)])
    assert "lost" not in totals.ranks[1]
    # Rank 0 reported only its last second: 17 to 27 counts like the attempt, not like that second.
    assert totals.ranks[0]["communication"] == pytest.approx(2 + 10 * 5 / 21 + 1 + 2)
    assert totals.ranks[1]["productive"] == pytest.approx(6 + 11 * 12 / 21 + 6)  # 17 to 28 like the rest of the attempt


@pytest.mark.parametrize(
    ("attempts", "lost"),
    [
        ([(0, 20), (20, 40)], 0),
        ([(0, 20), (15, 40)], 5),
        ([(0, 20), (10, 20), (10, 40)], 10 + 10),
        ([(0, 20), (15, 25), (5, 40)], 15 + 10),  # an older checkpoint: kept work of the first is lost too
        ([(0, 20), (5, 15), (15, 40)], 15),
        ([(0, 10), (5, 12), (2, 4), (3, 40)], 8 + 7 + 1),
        ([(0, 30), (20, 35), (30, 38), (0, 40)], 30 + 15 + 8),
    ],
)
def test_work_is_lost_that_any_later_attempt_did_again_however_many_there_were(
    attempts: list[tuple[int, int]], lost: int
) -> None:
    events, now = [at(0, StepBegan(name="train"))], 1.0
    for number, (first, last) in enumerate(attempts, 1):
        code = ExitCode.OK if number == len(attempts) else ExitCode.LOST_PEER
        events.append(at(now, LaunchBegan(launch=number, job="j", nodes=1, processes=1)))
        events.append(at(now, AttemptBegan(world=1, step=first, steps=40), number))
        for step in range(first + 1, last + 1):
            now += 1
            events.append(spent(now, 0, step, {"forward": 1.0}, number, last=step == last))
        events.append(at(now, LaunchEnded(launch=number, code=code, restart_in=None if code == ExitCode.OK else 0)))
    totals = ledger(events).ranks[0]
    assert totals.get("lost", 0.0) == pytest.approx(lost)
    assert totals["productive"] == pytest.approx(40)  # each step of the run once


def test_time_after_a_launch_pending_event_counts_as_queue() -> None:
    waiting_event = at(34, LaunchPending(reason="job j is in its queue until that lets it go"))
    totals = ledger(sorted([*killed_once(), waiting_event], key=lambda event: event.time))
    assert [(rank["queue"], rank["schedule"]) for rank in totals.ranks.values()] == [(1.0, 1 + 1 + 3 + 1)] * 2


def test_a_hang_is_detection_from_its_first_moment_on() -> None:
    hang = at(27.5, HangDetected(rank=1, phase="backward", step=21, seconds=2.5, message="rank 1 hangs"))
    totals = ledger(sorted([*killed_once(), hang], key=lambda event: event.time))
    assert [rank["detect"] for rank in totals.ranks.values()] == pytest.approx([30 - 25 - 3, 30 - 27])


def test_time_between_executions_is_no_wall_time() -> None:
    events = killed_once()
    later = [at(event.time + 1000, event, event.attempt and event.attempt + 2) for event in events]
    totals = ledger([*events, *later])
    assert totals.wall == pytest.approx(2 * 51)
    assert totals.total == pytest.approx(4 * 51)


def test_the_ledger_of_a_running_run_ends_now() -> None:
    events = [event for event in killed_once() if event.time < 20]
    totals = ledger(events, until=22)
    assert totals.wall == 22
    assert totals.total == pytest.approx(44)
    assert "lost" not in totals.seconds


def test_the_ledger_of_ranks_without_a_launch_starts_with_their_processes() -> None:
    events = [event for event in killed_once() if isinstance(event, TimeSpent | AttemptBegan) and event.attempt == 2]
    totals = ledger(events)
    assert totals.wall == 15.0
    assert "schedule" not in totals.seconds


def test_without_events_there_is_nothing() -> None:
    assert (ledger([]).total, ledger([]).goodput) == (0, 0)


def a_life(seed: int) -> Iterator[Event]:
    """The events of a random run by seed: launches, attempts in them, kills, saves, and ranks that report nothing."""
    rng = random.Random(seed)
    now, attempt, saved, world = rng.uniform(0, 100), 0, 0, rng.randint(1, 4)

    def later(most: float) -> float:
        nonlocal now
        now += rng.uniform(0, most)
        return now

    yield at(now, StepBegan(name="train"))
    launches = rng.randint(1, 4)
    for launch in range(1, launches + 1):
        yield at(later(2), LaunchBegan(launch=launch, job="j", nodes=1, processes=world))
        if rng.random() < 0.3:
            yield at(later(2), LaunchPending(reason="a queue"))
        for _ in range(rng.randint(0, 3)):
            attempt, step = attempt + 1, saved
            reported, silent = [later(3)] * world, rng.random() < 0.2
            for rank in range(world):
                if rng.random() < 0.9:
                    yield spent(now, rank, step, {"start": rng.uniform(0, 2), "build": rng.uniform(0, 1)}, attempt)
            if not silent:
                yield at(now, AttemptBegan(world=world, step=step, steps=100), attempt)
            for _ in range(rng.randint(0, 5)):
                step, moment = step + rng.randint(0, 5), later(5)
                for rank in range(world):
                    if rng.random() < 0.8:
                        part = rng.random()
                        whole = (moment - reported[rank]) * rng.uniform(0.95, 1.05)  # a device has another clock
                        phases = {"forward": whole * part, "data": whole * (1 - part)}
                        reported[rank] = moment
                        yield spent(moment, rank, step, phases, attempt)
                yield at(moment, Progress(step=step, steps=100, tokens_per_second=1, seconds_left=1), attempt)
                if rng.random() < 0.5:
                    saved = step
                    yield at(moment, SaveCommitted(step=step, seconds=rng.uniform(0, 3)), attempt)
            if rng.random() < 0.5:
                yield at(later(1), RankEnded(rank=0, code=ExitCode.LOST_PEER), attempt)
        last = launch == launches
        code = ExitCode.OK if last else ExitCode.KILLED
        if last or rng.random() < 0.8:
            yield at(later(2), LaunchEnded(launch=launch, code=code, restart_in=None if last else 1.0))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_the_ledger_classes_of_each_rank_always_sum_to_the_wall_time(seed: int, cut: float) -> None:
    events = list(a_life(seed))
    begin, end = events[0].time, events[-1].time
    for until in (None, begin + cut * (end - begin)):
        totals = ledger([event for event in events if until is None or event.time <= until], until)
        assert totals.wall == pytest.approx((end if until is None else until) - begin)
        for rank in totals.ranks.values():
            assert sum(rank.values()) == pytest.approx(totals.wall)
            assert all(seconds >= -1e-9 for seconds in rank.values())
            assert set(rank) <= set(CLASSES)


def left_and_adopted() -> list[Event]:
    """One launch of two ranks that work from second 2 to 160. Its launcher is deleted at 40, and its successor
    adopts the job at 87."""
    events = [
        at(0, StepBegan(name="train")),
        at(1, LaunchBegan(launch=1, job="j", nodes=1, processes=2)),
        *(spent(7, rank, 0, BEGUN, 1) for rank in (0, 1)),
        at(7, AttemptBegan(world=2, step=0, steps=150), 1),
        *(spent(17 + 10 * n, rank, 10 * n + 10, STEPS, 1, last=n == 14) for n in range(15) for rank in (0, 1)),
        at(40, LaunchEnded(launch=1, code=ExitCode.TERMINATED)),
        at(40, StepEnded(name="train", code=ExitCode.TERMINATED, seconds=40)),
        at(85, StepBegan(name="train")),
        at(87, LaunchBegan(launch=1, job="j", nodes=1, processes=2, adopted=True)),
        at(158, LaunchEnded(launch=1, code=ExitCode.OK)),
        at(160, StepEnded(name="train", code=0, seconds=75)),
    ]
    return sorted(events, key=lambda event: event.time)


def test_what_ranks_did_while_no_launcher_followed_them_is_theirs() -> None:
    events = left_and_adopted()
    totals = ledger(events)
    assert totals.wall == 158
    assert totals.total == pytest.approx(2 * 158)
    assert totals.seconds["productive"] == pytest.approx(2 * 15 * 6.0)
    assert totals.goodput > 0.55
    assert totals.seconds["schedule"] == pytest.approx(2 * 2)
    untaken = ledger([event for event in events if event.time < 85])  # no launcher has adopted it yet
    assert untaken.wall == 77
    assert untaken.seconds["productive"] == pytest.approx(2 * 7 * 6.0)


def with_launchers_that_die(seed: int) -> tuple[list[Event], float, dict[int, float]]:
    """A run that loses no step, whose launchers are repeatedly killed or deleted and replaced. Returns its events,
    its wall time, and the seconds that each rank reported for forward, backward and update."""
    rng = random.Random(seed)
    world, events, attempt, step, now = rng.randint(1, 3), list[Event](), 0, 0, 1.0
    productive = dict.fromkeys(range(world), 0.0)
    launches = rng.randint(1, 3)
    events.append(at(0, StepBegan(name="train")))
    for launch in range(1, launches + 1):
        launch_start = now
        events.append(at(now, LaunchBegan(launch=launch, job="j", nodes=1, processes=world)))
        for _ in range(rng.randint(1, 2)):  # consecutive gangs of one launch
            attempt += 1
            now += 5 + rng.random()
            events += [spent(now, rank, step, BEGUN, attempt) for rank in range(world)]
            events.append(at(now, AttemptBegan(world=world, step=step, steps=100), attempt))
            intervals = rng.randint(1, 5)
            for n in range(intervals):
                now, step = now + 10, step + 10
                last = n == intervals - 1
                events += [spent(now, rank, step, STEPS, attempt, last=last) for rank in range(world)]
                productive = {rank: seconds + 6.0 for rank, seconds in productive.items()}
        died = launch_start + 0.1
        for _ in range(rng.randint(0, 3)):
            died, back = sorted((died + rng.uniform(0, 30), died + rng.uniform(0, 30)))
            if died >= now:
                break
            if deleted := rng.random() < 0.5:
                events.append(at(died, LaunchEnded(launch=launch, code=ExitCode.TERMINATED)))
            if deleted or rng.random() < 0.5:  # otherwise it was killed, or left no end
                events.append(at(died, StepEnded(name="train", code=ExitCode.TERMINATED, seconds=1)))
            events.append(at(back, StepBegan(name="train")))
            died = back + rng.uniform(0, 5)
            if rng.random() < 0.8:  # otherwise it dies before it has found the job
                events.append(at(died, LaunchBegan(launch=launch, job="j", nodes=1, processes=world, adopted=True)))
            died += 0.1
        if died > now - 1:
            events.append(at(died + 1, LaunchBegan(launch=launch, job="j", nodes=1, processes=world, adopted=True)))
            now = died + 1
        else:
            events.append(at(now, LaunchBegan(launch=launch, job="j", nodes=1, processes=world, adopted=True)))
        now += 1
        code, restart_in = (ExitCode.OK, None) if launch == launches else (ExitCode.LOST_PEER, 2.0)
        events.append(at(now, LaunchEnded(launch=launch, code=code, restart_in=restart_in)))
        now += 2
    events.append(at(now, StepEnded(name="train", code=0, seconds=now)))
    return sorted(events, key=lambda event: event.time), now - 2, productive


@settings(max_examples=100)
@given(st.integers(0, 10**6))
def test_however_launchers_die_the_ledger_is_wall_time_times_ranks_and_productive_is_what_ranks_recorded(
    seed: int,
) -> None:
    events, wall, productive = with_launchers_that_die(seed)
    totals = ledger(events)
    assert totals.wall == pytest.approx(wall)
    assert totals.total == pytest.approx(totals.wall * len(productive))
    for rank, seconds in productive.items():
        assert sum(totals.ranks[rank].values()) == pytest.approx(totals.wall)
        assert totals.ranks[rank]["productive"] == pytest.approx(seconds)
