"""Model of the simulated cluster: groups of equal nodes in racks, quotas, and changes over a day.

It comes from one YAML file. An invalid description is refused with the field, the value and the remedy.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from holdfast.spec import strict_yaml
from holdfast.spec.errors import DataError, MissingError, Problem, SpecError
from holdfast.spec.section import Section
from holdfast.store import read_file_bounded

HOUR = 3600.0
DAY = 24 * HOUR


class NodeGroup(Section):
    """A group of equal nodes."""

    name: str = Field(description="What traces and quotas call it, such as `h100`.")
    nodes: int = Field(ge=1, le=1_000_000, description="How many nodes.")
    gpus: int = Field(8, ge=1, le=1024, description="Accelerators in a node.")
    rack: int = Field(32, ge=1, le=100_000, description="Nodes in a rack: a gang inside one talks faster.")
    speed: float = Field(1.0, gt=0, description="Speed of an accelerator; a job's seconds are meant at 1.")
    price: float = Field(0.0, ge=0, description="Price of an accelerator's hour, in any currency.")
    watts: float = Field(700.0, ge=0, description="Power of a busy accelerator, its share of the node included.")
    mtbf_hours: float | None = Field(None, gt=0, description="Mean time between failures of a node; none never fails.")
    repair_hours: float = Field(4.0, gt=0, description="Mean time to repair a node.")
    reclaim_hours: float | None = Field(
        None, gt=0, description="Spot nodes: mean time until one is reclaimed, with `grace_seconds` of notice."
    )
    inference_share: tuple[float, ...] = Field(
        (), max_length=24, description="Share of the nodes that inference takes, for equal parts of a day."
    )


class ClusterModel(Section):
    """A cluster, and defaults for its jobs where a trace lacks them."""

    name: str = Field("cluster", description="Its name in reports.")
    groups: tuple[NodeGroup, ...] = Field(min_length=1, max_length=64, description="The groups of nodes.")
    quotas: dict[str, float] = Field({}, description="Share of the cluster that a tenant is entitled to; none is 1.")
    spread_penalty: float = Field(0.1, ge=0, lt=1, description="Speed that a gang over more than one rack loses.")
    scaling: float = Field(0.9, gt=0, le=1, description="An elastic gang of n times the size is n^scaling as fast.")
    checkpoint_minutes: float = Field(15.0, gt=0, description="Time between two checkpoints of a job.")
    restart_minutes: float = Field(5.0, ge=0, description="Time that a job loses whenever it starts again.")
    save_seconds: float = Field(30.0, ge=0, description="Time to save a checkpoint.")
    grace_seconds: float = Field(60.0, ge=0, description="Notice before a preemption; enough to save, no work is lost.")
    price_by_hour: tuple[float, ...] = Field((), max_length=24, description="Price factors for equal parts of a day.")
    carbon_by_hour: tuple[float, ...] = Field((), max_length=24, description="g CO2 a kWh for equal parts of a day.")

    @property
    def gpus(self) -> int:
        """The number of accelerators."""
        return sum(group.nodes * group.gpus for group in self.groups)


def load_cluster(path: str | Path) -> ClusterModel:
    """Read a cluster from a YAML file. Raises MissingError or SpecError with every problem."""
    path = Path(path)
    try:
        text = read_file_bounded(path).decode("utf-8")
    except MissingError:
        raise MissingError(f"{path}: cannot be read: no such file; see examples/clusters/") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8: {error}; see examples/clusters/") from None
    try:
        return ClusterModel.model_validate(strict_yaml.read(text))
    except strict_yaml.YamlRefusedError as error:
        problem = Problem(getattr(error, "place", "") or "(file)", None, f"not valid YAML: {error}", "fix the syntax")
        raise SpecError([problem], str(path)) from None
    except ValidationError as error:
        problems = [
            Problem(".".join(map(str, detail["loc"])), detail["input"], detail["msg"], "see examples/clusters/")
            for detail in error.errors(include_url=False)
            if detail["type"] != "too_short" or not detail["input"]  # a list with refused items is not too short
        ]
        raise SpecError(problems, str(path)) from None


def part_of_day(values: tuple[float, ...], now: float, default: float) -> float:
    """The value at `now` (seconds; 0 is midnight) among values for equal parts of a day."""
    return values[int(now % DAY * len(values) / DAY)] if values else default


# Jobs of a trace, and a generator of traces with published cluster statistics.


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
        accepted = more[random.uniform(0, 1.5, len(more)) < 1 + 0.5 * np.sin(2 * np.pi * more / DAY)]
        times = np.concatenate([times, accepted])
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
