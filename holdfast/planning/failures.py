"""Failures, how often a state is saved because of them, and what they cost.

The interval between two saves that loses least is sqrt(2 x cost of a save x time between failures) (Young 1974; Daly
2006 has the terms that matter when a save costs nearly as much as is lost by a failure; here it is bounded from below).
What is lost is counted as Hérault and Robert do ("Fault-Tolerance Techniques for High-Performance Computing", 2015,
chapter 1): failures come while the run lasts, not while it computes, so that too many of them leave no time for steps.
"""

from __future__ import annotations

import math

# What is assumed before a run has failures of its own: 419 in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783).
RANK_SECONDS_PER_FAILURE = 54 * 24 * 3600.0 * 16384 / 419
LEAST_COSTS = 10.0  # of a save between two of them: however often a run fails, it mostly trains


def best_interval(cost: float, between_failures: float) -> float:
    """Seconds between two saves that cost `cost` seconds each, where a failure comes every `between_failures`."""
    return max(math.sqrt(2 * cost * between_failures), LEAST_COSTS * cost)


def goodput(cost: float, interval: float, between_failures: float, restart: float, told: float = 0.0) -> float:
    """The share of the time in which steps are computed that count, 0 where none is left: saves take `cost` seconds
    after each `interval`, a failure takes `restart` seconds and half an interval that is computed again, and `told` is
    the share of all time that is lost to what comes with a notice."""
    lost = (restart + interval / 2) / between_failures + told
    return max(0.0, 1 - lost) / (1 + cost / interval)


def lasts(useful: float, share: float) -> float:
    """Seconds that a run takes for `useful` seconds of steps; infinite where nothing is left for them."""
    return useful / share if share else math.inf
