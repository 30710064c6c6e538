"""Estimates for a whole run: duration, cost, energy, save interval and goodput."""

import math
from dataclasses import dataclass

from holdfast.planning.search import Candidate
from holdfast.planning.speed import HOST_LINK

# Failures of accelerators, the best interval between saves, and the cost of both.
#
# The interval between two saves that loses least is sqrt(2 x cost of a save x time between failures) (Young 1974). Daly
# 2006 has further terms for saves that cost nearly as much as a failure loses; here a lower bound replaces them. Losses
# follow Hérault and Robert ("Fault-Tolerance Techniques for High-Performance Computing", 2015, chapter 1). Failures
# occur during all of the run, not only during steps, so too many failures leave no time for steps.

# Failure rate before a run has failures: 419 in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783).
RANK_SECONDS_PER_FAILURE = 54 * 24 * 3600.0 * 16384 / 419
LEAST_COSTS = 10.0  # save costs between two saves: even with many failures, a run mostly trains


def best_interval(cost: float, between_failures: float) -> float:
    """Seconds between two saves that cost `cost` seconds each, with a failure every `between_failures` seconds."""
    return max(math.sqrt(2 * cost * between_failures), LEAST_COSTS * cost)


def goodput(cost: float, interval: float, between_failures: float, restart: float, announced: float = 0.0) -> float:
    """The share of time in steps that count, 0 without any.

    A save takes `cost` seconds after each `interval`. A failure takes `restart` seconds and repeats half an interval.
    `announced` is the share of all time that losses with a notice take.
    """
    lost = (restart + interval / 2) / between_failures + announced
    return max(0.0, 1 - lost) / (1 + cost / interval)


def lasts(useful: float, share: float) -> float:
    """Seconds that a run takes for `useful` seconds of steps; infinite if its share of time for steps is 0."""
    return useful / share if share else math.inf


RESTART_SECONDS = 300.0  # from a failure to the next step: detection, start, loading
LEAST_STALL = 0.5  # seconds that a save delays steps, for a state of any size
HOUR = 3600.0


@dataclass(frozen=True)
class RunEstimate:
    """Estimates for a whole run."""

    seconds: float  # from the first step to the last one, including failures
    goodput: float  # share of it in steps that count
    gpu_hours: float
    energy: float  # kWh, including the accelerators' share of their nodes
    cost: float  # of the hours and, if priced, the energy; in the currency of the prices
    cost_per_million_tokens: float
    carbon: float | None  # grams of carbon dioxide; None for an unknown grid
    between_failures: float  # seconds
    interval: float  # seconds between two saves
    steps_between: int


def estimate_run(chosen: Candidate, rank_seconds_per_failure: float = RANK_SECONDS_PER_FAILURE) -> RunEstimate:
    """Estimate a run from its first step to its last one.

    Each accelerator fails once per `rank_seconds_per_failure` seconds, and draws full power the whole time.
    """
    task, step = chosen.task, chosen.speed.seconds
    stall = stall_of(chosen)
    between = rank_seconds_per_failure / task.gpus
    interval = max(step, best_interval(stall, between))
    share = goodput(stall, interval, between, RESTART_SECONDS)
    seconds = lasts(step * task.full_steps, share)  # a smaller batch takes proportionally less
    hours = seconds / HOUR * task.gpus
    here = task.accelerator
    energy = hours * (here.watts + here.overhead_watts) / 1000
    cost = hours * here.price + energy * here.kilowatt_hour
    return RunEstimate(
        seconds=seconds,
        goodput=share,
        gpu_hours=hours,
        energy=energy,
        cost=cost,
        cost_per_million_tokens=cost / task.tokens * 1e6,
        carbon=None if here.carbon is None else energy * here.carbon,
        between_failures=between,
        interval=interval,
        steps_between=max(1, round(interval / step)),
    )


def stall_of(chosen: Candidate) -> float:
    """Seconds that a save delays steps. They wait only for the copy to the host."""
    state = chosen.practice.state
    state_bytes = chosen.task.shape.parameters * (state.weights + state.optimizer) / chosen.task.gpus
    return LEAST_STALL + state_bytes / HOST_LINK
