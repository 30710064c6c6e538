"""A crash at any operation of save, commit, restore or collection loses nothing and leaves nothing incomplete."""

from dataclasses import replace
from itertools import islice

import pytest

from tests.protocol.crashes import OF_TWO, PLANS, Crash, crash, points

ENDS = {
    "all die": (True, False),
    "all are thawed": (True, True),
}


@pytest.mark.parametrize(
    ("ranks", "ends", "every"),
    [
        ("one rank", "all die", 1),
        ("one rank", "all are thawed", 3),
        pytest.param("one rank", "all are thawed", 1, marks=pytest.mark.drill),
        *(pytest.param("two ranks", ends, 1, marks=pytest.mark.drill) for ends in ("all die", "all are thawed")),
        pytest.param("nodes above the ranks", "all die", 1, marks=pytest.mark.drill),
    ],
)
def test_a_crash_before_or_after_any_operation_loses_and_tears_nothing(ranks: str, ends: str, every: int) -> None:
    """Every third point covers before and after alternately."""
    plan = PLANS[ranks]
    count = crash(plan, [])[1]
    assert count > 80
    for point in islice(points(count, *ENDS[ends]), 0, None, every):
        happened, _ = crash(plan, [point])
        assert happened, point


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "half", "every"),
    [
        ("two ranks", 0, 3),
        *(pytest.param("two ranks", half, 1, marks=pytest.mark.drill) for half in (0, 1)),
        pytest.param("nodes above the ranks", 0, 1, marks=pytest.mark.drill),
    ],
)
def test_one_process_that_crashes_before_or_after_any_operation_loses_and_tears_nothing(
    ranks: str, half: int, every: int
) -> None:
    """Each half covers every point once: in one half the process dies there, in the other it is thawed. Every third
    point still covers both ends, before and after, and all kinds of operations but the deletion of a checkpoint.
    """
    plan = PLANS[ranks]
    for point in islice(points(crash(plan, [])[1], gang=False, thaw=False), 0, None, every):
        thaw = (point.number + (point.when == "after") + half) % 2 == 1
        happened, _ = crash(plan, [replace(point, thaw=thaw)])
        assert happened, point


def test_a_crash_occurs_at_the_requested_operation() -> None:
    trace: list[str] = []
    crash(OF_TWO, [Crash(20, "before", gang=False), Crash(30, "after", gang=True, thaw=True)], trace)
    crashes = [
        line.partition(" gang ")[2].split(" runs/")[0] for line in trace if " dies " in line or " stands " in line
    ]
    assert [line.rpartition(" ")[0].partition("rank ")[2][2:] for line in crashes] == [
        "dies before",
        "stands still after",
    ]
