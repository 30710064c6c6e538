"""Spot and on-demand nodes for a run: the expected time and cost of each mix.

A gang stops as a whole when one of its nodes is reclaimed. So every spot node lengthens the run and makes the hour
cheaper. The result is the cheapest mix whose expected time is within a limit. The user supplies prices and reclaim
rates. A replacement node is assumed to exist when the gang restarts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast.planning.run_estimate import (
    HOUR,
    RANK_SECONDS_PER_FAILURE,
    RESTART_SECONDS,
    best_interval,
    goodput,
    lasts,
    stall_of,
)
from holdfast.planning.search import Candidate

SHOWN = 4  # steps from no spot node to all: 0, 1/4, 1/2, 3/4, 1


@dataclass(frozen=True)
class Mix:
    """A run on `spot` spot nodes of `nodes` nodes; the rest is on demand."""

    nodes: int
    spot: int
    seconds: float  # expected, first to last step; infinite if the gang only restarts
    goodput: float  # share of it in steps that count
    interruptions: float  # expected reclaims of spot nodes
    cost: float  # expected; of the hours and, if priced, the energy
    interval: float  # seconds between two saves


@dataclass(frozen=True)
class Spot:
    """The mixes of spot and on-demand nodes, and the best one."""

    notice: bool  # whether the gang saves before a reclaim
    limit: float | None  # maximum seconds of the run
    best: Mix | None  # the cheapest within the limit; None without one
    shown: tuple[Mix, ...]  # from no spot node to all
    break_even: float  # reclaims per node and hour above which all-spot costs more than no spot node


def spot(chosen: Candidate, *, notice: bool, limit: float | None = None) -> Spot | None:
    """The mixes for a layout; None if its accelerator has no spot price or no reclaim rate.

    `notice`: the gang gets the notice in time to save (`cluster.spot`). `limit`: maximum seconds of the run.
    """
    accelerator = chosen.task.accelerator
    if accelerator.spot_price is None or accelerator.spot_interruptions is None:
        return None
    nodes = nodes_of(chosen)
    every = [mix(chosen, count, notice=notice) for count in range(nodes + 1)]
    within = [one for one in every if limit is None or one.seconds <= limit]
    best = min(within, key=lambda one: (one.cost, one.spot), default=None)
    if best is not None and math.isinf(best.seconds):
        best = None
    counts = sorted({round(nodes * part / SHOWN) for part in range(SHOWN + 1)})
    return Spot(notice, limit, best, tuple(every[count] for count in counts), break_even(chosen, notice=notice))


def nodes_of(chosen: Candidate) -> int:
    """The number of nodes of the run."""
    return math.ceil(chosen.task.gpus / chosen.task.accelerator.node)


def mix(chosen: Candidate, count: int, *, notice: bool) -> Mix:
    """The run with `count` of its nodes on spot.

    A reclaim with a notice costs a save and a restart. One without is like a failure, which costs a restart and half an
    interval. Reclaims occur during the whole run, including restarts. The interval is Young's and Daly's for events
    without a notice.
    """
    task, step, accelerator = chosen.task, chosen.speed.seconds, chosen.task.accelerator
    nodes, stall = nodes_of(chosen), stall_of(chosen)
    reclaims = count * (accelerator.spot_interruptions or 0.0) / HOUR  # per second
    failures = task.gpus / RANK_SECONDS_PER_FAILURE
    sudden, announced = (failures, reclaims) if notice else (failures + reclaims, 0.0)
    interval = max(step, best_interval(stall, 1 / sudden))
    share = goodput(stall, interval, 1 / sudden, RESTART_SECONDS, announced * (stall + RESTART_SECONDS))
    seconds = lasts(step * task.full_steps, share)  # as in the run estimate
    energy = (
        (accelerator.watts + accelerator.overhead_watts) / 1000 * accelerator.kilowatt_hour
    )  # per accelerator and hour
    price = accelerator.price + ((accelerator.spot_price or 0.0) - accelerator.price) * count / nodes + energy
    cost = seconds / HOUR * task.gpus * price if share else math.inf  # infinite even at price 0
    return Mix(nodes, count, seconds, share, reclaims * seconds if reclaims else 0.0, cost, interval)


def break_even(chosen: Candidate, *, notice: bool) -> float:
    """The reclaims per node and hour at which all-spot costs as much as no spot node, or never finishes.

    0 where a spot hour is not cheaper.
    """
    task = chosen.task
    on_demand_cost, nodes = mix(chosen, 0, notice=notice).cost, nodes_of(chosen)

    def dearer(rate: float) -> bool:
        accelerator = task.accelerator.model_copy(update={"spot_interruptions": rate})
        return (
            mix(replace(chosen, task=replace(task, accelerator=accelerator)), nodes, notice=notice).cost
            >= on_demand_cost
        )

    low, high = 0.0, HOUR / RESTART_SECONDS  # at this rate, a single node only restarts
    if dearer(low):
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if dearer(middle) else (middle, high)
    return low


def in_words(found: Spot) -> Iterator[str]:
    """Lines for people: the mixes, the best one, and the break-even rate."""
    condition = "with a notice" if found.notice else "without a notice (cluster.spot is not set)"
    yield f"Spot nodes, taken back {condition}:"
    yield "  on spot  on demand      hours  goodput  taken back         cost"
    for mix_ in found.shown:
        if math.isinf(mix_.seconds):
            yield f"{mix_.spot:>9,} {mix_.nodes - mix_.spot:>10,} {'never':>10} {mix_.goodput:>8.1%}"
            continue
        yield (
            f"{mix_.spot:>9,} {mix_.nodes - mix_.spot:>10,} {mix_.seconds / HOUR:>10,.1f} {mix_.goodput:>8.1%} "
            f"{mix_.interruptions:>11,.1f} {mix_.cost:>12,.0f}"
        )
    limit = "" if found.limit is None else f" within cluster.deadline_hours ({found.limit / HOUR:g})"
    if found.best is None:
        yield f"No mix is done{limit}."
    else:
        yield (
            f"Cheapest{limit}: {found.best.spot:,} of {found.best.nodes:,} nodes on spot, {found.best.cost:,.0f}; "
            f"save every {found.best.interval:,.0f} s"
        )
    pays = f"Spot nodes alone cost less than none of them below {found.break_even:.3g} times an hour of a node."
    yield pays if found.break_even else "Spot nodes do not pay."
