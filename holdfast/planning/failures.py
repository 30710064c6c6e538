"""Failures of accelerators, the best interval between saves, and the cost of both.

The interval between two saves that loses least is sqrt(2 x cost of a save x time between failures) (Young 1974). Daly
2006 has further terms for saves that cost nearly as much as a failure loses; here a lower bound replaces them. Losses
follow Hérault and Robert ("Fault-Tolerance Techniques for High-Performance Computing", 2015, chapter 1): failures occur
during all of the run, not only during steps, so too many failures leave no time for steps.
"""

from __future__ import annotations

import math

# Failure rate before a run has failures: 419 in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783).
RANK_SECONDS_PER_FAILURE = 54 * 24 * 3600.0 * 16384 / 419
LEAST_COSTS = 10.0  # save costs between two saves: even with many failures, a run mostly trains


def best_interval(cost: float, between_failures: float) -> float:
    """Seconds between two saves that cost `cost` seconds each, with a failure every `between_failures` seconds."""
    return max(math.sqrt(2 * cost * between_failures), LEAST_COSTS * cost)


def goodput(cost: float, interval: float, between_failures: float, restart: float, told: float = 0.0) -> float:
    """The share of time in steps that count, 0 without any.

    A save takes `cost` seconds after each `interval`. A failure takes `restart` seconds and repeats half an interval.
    `told` is the share of all time that losses with a notice take.
    """
    lost = (restart + interval / 2) / between_failures + told
    return max(0.0, 1 - lost) / (1 + cost / interval)


def lasts(useful: float, share: float) -> float:
    """Seconds that a run takes for `useful` seconds of steps; infinite if its share of time for steps is 0."""
    return useful / share if share else math.inf
