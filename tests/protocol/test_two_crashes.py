"""Crashes at any two operations of a training's storage lose nothing and leave nothing incomplete."""

import pytest

from tests.protocol.crashes import OF_ONE, Crash, crash, points
from tests.seeds import SEEDS

PARTS = 16  # of all pairs: each part takes ten seconds on an idle core


@pytest.mark.drill
@pytest.mark.parametrize("part", range(min(PARTS, SEEDS)))
def test_two_crashes_at_any_two_operations_lose_and_tear_nothing(part: int) -> None:
    for first in list(points(crash(OF_ONE, [])[1], gang=True, thaw=False))[part::PARTS]:
        for number in range(1000):
            happened, _ = crash(
                OF_ONE, [first, Crash(number, "after" if number % 2 else "before", thaw=number % 3 == 0)]
            )
            if not happened:
                break
