"""The simulated world schedules its code correctly: one thread at a time, one order per seed."""

import pytest

from tests.protocol.world import START, Killed, Process, StuckError, World


def test_actors_run_one_at_a_time_in_the_order_of_their_clocks() -> None:
    world, events = World(0), list[object]()

    def actor(name: str, pause: float) -> None:
        for _ in range(3):
            world.sleep(pause)
            events.append((name, world.now - START))

    world.spawn("slow", lambda: actor("slow", 10.0), Process("a"))
    world.spawn("fast", lambda: actor("fast", 4.0), Process("b"))
    world.run()
    expected = [("fast", 4), ("fast", 8), ("slow", 10), ("fast", 12), ("slow", 20), ("slow", 30)]
    assert events == [(name, pytest.approx(time)) for name, time in expected]


def test_a_waiting_actor_resumes_when_its_condition_holds_or_times_out() -> None:
    world, box, results = World(0), list[int](), list[object]()

    def waiter() -> None:
        results.append((world.wait(lambda: bool(box), 100.0), world.now - START))
        results.append((world.wait(lambda: len(box) > 1, 5.0), world.now - START))

    def giver() -> None:
        world.sleep(7.0)
        box.append(1)

    world.spawn("waiter", waiter, Process("a"))
    world.spawn("giver", giver, Process("b"))
    world.run()
    assert results == [(True, 7.0), (False, 12.0)]


def test_a_killed_process_ends_immediately_and_a_frozen_one_resumes_later() -> None:
    world, events = World(0), list[object]()
    victim, frozen = Process("victim"), Process("frozen")

    def worker(name: str) -> None:
        try:
            for _ in range(3):
                world.sleep(1.0)
                events.append((name, world.now - START))
        except Killed:
            events.append((name, "killed"))
            raise

    def chaos() -> None:
        world.sleep(1.5)
        world.kill(victim)
        frozen.frozen = True
        world.sleep(100.0)
        frozen.frozen = False

    world.spawn("victim", lambda: worker("victim"), victim)
    world.spawn("frozen", lambda: worker("frozen"), frozen)
    world.spawn("chaos", chaos, Process("chaos"))
    world.run()
    assert events == [("victim", 1.0), ("frozen", 1.0), ("victim", "killed"), ("frozen", 101.5), ("frozen", 102.5)]


def test_a_failing_actor_ends_the_world_and_leaves_no_actor() -> None:
    world = World(0)

    def fails() -> None:
        world.sleep(1.0)
        raise ValueError("wrong")

    world.spawn("fails", fails, Process("a"))
    world.spawn("sleeps", lambda: world.sleep(1e9), Process("b"))
    with pytest.raises(ValueError, match="wrong"):
        world.run()
    assert not world._actors


@pytest.mark.parametrize("how", ["waits", "is frozen", "never ends"])
def test_a_world_without_progress_raises_stuck_error(how: str) -> None:
    world, process = World(0, most_moves=1000), Process("a")

    def actor() -> None:
        process.frozen = how == "is frozen"
        while True:
            world.wait(lambda: False) if how == "waits" else world.sleep(1.0)

    world.spawn("lonely", actor, process)
    with pytest.raises(StuckError, match="no end after 1000" if how == "never ends" else "no actor can run.*lonely"):
        world.run()
