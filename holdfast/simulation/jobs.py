"""Jobs of a trace, and a generator of traces with published cluster statistics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.simulation.cluster import DAY


@dataclass(frozen=True, slots=True)
class Job:
    """One submitted job. Times are in seconds."""

    id: str
    submit: float
    gpus: int  # of the gang
    seconds: float  # undisturbed computing time on `gpus` accelerators of speed 1
    tenant: str = "default"
    priority: int = 0  # higher goes first in policies that use it
    value: float = 1.0  # of a finished job, in any currency
    group: str = ""  # required group of nodes; empty: any
    min_gpus: int = 0  # an elastic job shrinks to this; 0: not elastic
    max_gpus: int = 0  # and grows to this; 0: not beyond `gpus`
    same_rack: bool = False  # it must not span racks
    estimate: float = 0.0  # the owner's estimate of seconds; 0: `seconds`
    slack: float = 0.0  # seconds by which its start may be delayed for a cheaper hour

    @property
    def work(self) -> float:
        """Accelerator-seconds."""
        return self.gpus * self.seconds


# Gang sizes and their share of all jobs: most jobs are small, and most accelerator time goes to large ones. After the
# tables of Jeon et al. 2019 (Philly) and Hu et al. 2021 (Helios): over half of the jobs take one accelerator.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHARES = (0.54, 0.10, 0.12, 0.14, 0.05, 0.025, 0.012, 0.008, 0.004, 0.001)


def synthetic_jobs(
    count: int,
    gpus: int,
    load: float = 0.9,
    *,
    seed: int = 0,
    tenants: int = 8,
    elastic: float = 0.2,
    noise: float = 1.0,
) -> list[Job]:
    """`count` jobs that demand `load` times the capacity of `gpus` accelerators; the same for the same arguments.

    - Arrivals are Poisson with a daily wave (rate 1 + 0.5 sin).
    - Durations are lognormal (sigma 2: the median is minutes, the mean hours), longer for larger gangs, and at most 14
      days.
    - `elastic`: share of the jobs with 8 or more that may shrink to half and grow to double their size.
    - `noise`: sigma of the lognormal factor by which owners overestimate time. No owner underestimates, because most
      clusters end a job that exceeds its time.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    sizes = np.array([size for size in SIZES if size <= max(1, gpus // 4)])
    shares = np.array(SHARES[: len(sizes)])
    size = random.choice(sizes, size=count, p=shares / shares.sum())
    seconds = np.exp(random.normal(np.log(900.0), 2.0, count)) * size**0.3
    seconds = np.clip(seconds, 10.0, 14 * DAY)
    span = float((size * seconds).sum()) / (gpus * load)
    # Thinning: draw arrivals at the highest rate, and keep the wave's share of them.
    times = np.empty(0)
    while len(times) < count:
        more = random.uniform(0, span, 2 * count)
        kept = more[random.uniform(0, 1.5, len(more)) < 1 + 0.5 * np.sin(2 * np.pi * more / DAY)]
        times = np.concatenate([times, kept])
    times = np.sort(times[:count])
    popularity = 1.0 / np.arange(1, tenants + 1)
    tenant = random.choice(tenants, size=count, p=popularity / popularity.sum())
    priority = random.choice(3, size=count, p=(0.7, 0.25, 0.05))
    stretch = random.uniform(0, 1, count) < elastic
    guess = seconds * np.exp(np.abs(random.normal(0.0, noise, count))) if noise else seconds
    return [
        Job(
            id=str(index),
            submit=float(times[index]),
            gpus=int(size[index]),
            seconds=float(seconds[index]),
            tenant=f"tenant-{tenant[index]}",
            priority=int(priority[index]),
            value=float((1 + 2 * priority[index]) * size[index] * seconds[index] / 3600),
            min_gpus=int(size[index]) // 2 if stretch[index] and size[index] >= 8 else 0,
            max_gpus=int(size[index]) * 2 if stretch[index] and size[index] >= 8 else 0,
            estimate=float(guess[index]),
        )
        for index in range(count)
    ]
