"""Model of the simulated cluster: groups of equal nodes in racks, quotas, and changes over a day.

It comes from one YAML file. An invalid description is refused with the field, the value and the remedy.
"""

from __future__ import annotations

from pathlib import Path

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
        problem = Problem(getattr(error, "place", "") or "(file)", None, f"not valid YAML: {error}", "mend the syntax")
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
