"""What a layout means for a run: when it is done, what it takes, how often its state is saved, what failures leave."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.planning.failures import RANK_SECONDS_PER_FAILURE, best_interval, goodput, lasts
from holdfast.planning.search import Candidate
from holdfast.planning.speed import HOST_LINK

RESTART_SECONDS = 300.0  # from a failure to the first step after it: noticing, starting, loading
LEAST_STALL = 0.5  # seconds that a save takes of the steps, however small the state
HOUR = 3600.0


@dataclass(frozen=True)
class RunEstimate:
    """The figures of a whole run."""

    seconds: float  # from the first step to the last one, failures included
    goodput: float  # share of it in which steps are computed that count
    gpu_hours: float
    energy: float  # kWh, with the accelerators' share of their nodes
    cost: float  # of the hours and, where it has a price, of the energy; in the currency of the prices
    cost_per_million_tokens: float
    carbon: float | None  # grams of carbon dioxide; None where the grid is not known
    between_failures: float  # seconds
    interval: float  # seconds between two saves
    steps_between: int


def estimate_run(chosen: Candidate, rank_seconds_per_failure: float = RANK_SECONDS_PER_FAILURE) -> RunEstimate:
    """Of a run from its first step to its last one; the accelerators are taken to fail once in so many seconds each,
    and to draw their full power while it lasts."""
    task, step = chosen.task, chosen.speed.seconds
    stall = stall_of(chosen)
    between = rank_seconds_per_failure / task.gpus
    interval = max(step, best_interval(stall, between))
    share = goodput(stall, interval, between, RESTART_SECONDS)
    seconds = lasts(step * task.full_steps, share)  # a smaller batch takes the less
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
    """Seconds that a save takes of the steps: they wait for the copy to the host, and for nothing else."""
    state = chosen.practice.state
    saved = chosen.task.shape.parameters * (state.weights + state.optimizer) / chosen.task.gpus
    return LEAST_STALL + saved / HOST_LINK
