"""Estimates for a whole run: duration, cost, energy, save interval and goodput."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.planning.failures import RANK_SECONDS_PER_FAILURE, best_interval, goodput, lasts
from holdfast.planning.search import Candidate
from holdfast.planning.speed import HOST_LINK

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
    saved = chosen.task.shape.parameters * (state.weights + state.optimizer) / chosen.task.gpus
    return LEAST_STALL + saved / HOST_LINK
