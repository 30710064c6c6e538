"""Gangs that are killed, frozen, replaced and thawed in a world of faults: all invariants of the protocol hold."""

import pytest

from tests.protocol.scenario import simulate
from tests.seeds import SEEDS

TOGETHER = 50  # seeds per test


def require(seeds: range) -> None:
    for seed in seeds:
        try:
            simulate(seed)
        except BaseException as error:
            error.add_note(f"replay it: python -m tests.protocol.simulation --seed {seed}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, TOGETHER))
def test_the_invariants_hold_for_every_seed(first: int) -> None:
    require(range(first, first + TOGETHER))


def test_seeds_that_find_what_the_first_ones_do_not() -> None:
    for seed in (316, 645):  # a single wrong reader; damage that the last gang finds
        require(range(seed, seed + 1))


@pytest.mark.drill
@pytest.mark.parametrize("first", range(1000, 1000 + 250 * SEEDS, 250))
def test_the_invariants_hold_for_thousands_of_seeds(first: int) -> None:
    require(range(first, first + 250))


def test_a_seed_does_the_same_again() -> None:
    first, second = ([simulate(seed).digest for seed in range(8)] for _ in range(2))
    assert first == second
    assert len(set(first)) == 8
